"""Does a GPU give one answer, and the CPU's? In two halves, so that a slow CPU need not be waited for.

    python benchmarks/gpu_answers.py reference OUT.npz [-m MODEL] [--tokens 6000] [--text FILE]
    python benchmarks/gpu_answers.py check IN.npz [-m MODEL] [--save FILE.json]

`reference` runs the CPU's float32 path over the text and keeps logits of 800 rows. `check` prints,
for float32, float16 and bfloat16 on the GPU: SHA-256 of all logits for prefill batches of 64 to
8192, for a batch of three sessions, for eight rows at a time and for token-by-token decoding, with
the n-gram table on disk, in memory and on the GPU (all must be equal), and the distance to the
reference (relative error, mean KL, top-1 where the two best are apart by 0.05 of the logits'
spread). For the draft head and the vision tower it prints the distance to the CPU too. Exits 1 when
a bound is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from civetta.chat.images import prepare_image
from civetta.kernels.select import select
from civetta.model.bind_mtp import find_head
from civetta.model.build import TableOptions, build_trunk, check_checkpoint
from civetta.model.embedded import embedded_model_path
from civetta.model.inputs import Piece
from civetta.model.vision_build import build_tower, check_mmproj, find_mmproj
from civetta.ngram.placement import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.model.build import CheckedModel
    from civetta.model.trunk import Trunk

DECODED = 150
KEPT_ROWS = 800
BOUNDS: dict[str, dict[str, float]] = {
    "float32": {"relative_error": 1e-3},
    "float16": {"mean_kl": 8e-4},
    "bfloat16": {},
}


def logits_in_cuts(trunk: Trunk, ids: Sequence[int], edges: Sequence[int]) -> torch.Tensor:
    """Logits of all rows, launch by launch between `edges`."""
    session = trunk.store(sessions=1, context_tokens=len(ids)).open()
    parts = [trunk.forward(session, ids[a:b], "all").cpu() for a, b in pairwise(edges)]
    return torch.cat(parts)


def edges_of(tokens: int, batch: int, last: int = 0, step: int = 1) -> list[int]:
    """Cuts every `batch` tokens, the last `last` tokens every `step`."""
    prompt = tokens - last
    return [*range(0, prompt, batch), *range(prompt, tokens, step), tokens]


def logits_in_company(trunk: Trunk, ids: list[int]) -> torch.Tensor:
    """The same rows with two other sequences in every launch, the last ones token by token."""
    store = trunk.store(sessions=3, context_tokens=len(ids))
    sessions = [store.open() for _ in range(3)]
    other = ids[::-1]
    parts = []
    for start, stop in pairwise(edges_of(len(ids), 300, 40)):
        pieces = [
            Piece(session=sessions[0], ids=other[start : min(start + 7, stop)], rows="last"),
            Piece(session=sessions[1], ids=ids[start:stop], rows="all"),
            Piece(session=sessions[2], ids=other[start:stop], rows="last"),
        ]
        parts.append(trunk.forward_pieces(pieces)[1:-1].cpu())
    return torch.cat(parts)


def digest(logits: torch.Tensor) -> str:
    return hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:16]


def distance(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
    best = want.topk(2, dim=-1).values
    clear = (best[:, 0] - best[:, 1]) > 0.05 * want.std(-1)
    agree = got.argmax(-1) == want.argmax(-1)
    return {
        "relative_error": float((got - want).norm() / want.norm()),
        "mean_kl": float((p.exp() * (p - q)).sum(-1).mean()),
        "top1_where_clear": float(agree[clear].double().mean()),
        "top1": float(agree.double().mean()),
    }


def trunk_of(
    checked: CheckedModel, dtype: torch.dtype, device: str, placement: str = "ram"
) -> Trunk:
    where = torch.device(device)
    options = TableOptions(store=StoreOptions(placement=placement, reader="auto"))
    ops = select(device)
    return build_trunk(checked, dtype=dtype, ops=ops, device=where, table=options)


def write_reference(args: argparse.Namespace) -> None:
    from civetta.engine.load import read_text_side

    checked = check_checkpoint(args.model or embedded_model_path())
    tokenizer, _ = read_text_side(checked)
    assert tokenizer is not None
    files = [args.text] if args.text else sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    ids: list[int] = []
    for file in files:
        ids += tokenizer.encode(Path(file).read_text())
    ids = (ids * (-(-args.tokens // len(ids))))[: args.tokens]
    trunk = trunk_of(checked, torch.float32, "cpu")
    rows = np.unique(np.linspace(0, len(ids) - 1, KEPT_ROWS).astype(int))
    store = trunk.store(sessions=1, context_tokens=len(ids))
    session, parts = store.open(), []
    for a, b in pairwise(edges_of(len(ids), 1024)):
        logits = trunk.forward(session, ids[a:b], "all")
        parts.append(logits[rows[(rows >= a) & (rows < b)] - a].numpy())
    np.savez(args.file, ids=np.array(ids), rows=rows, logits=np.concatenate(parts))


def answers(checked: CheckedModel, dtype: torch.dtype, data: Any, device: str) -> dict[str, Any]:
    """Every way to compute the same rows, and how far they are from the reference."""
    from gpu_ahead import compile_ahead

    ids = [int(i) for i in data["ids"]]
    trunk, tokens = trunk_of(checked, dtype, device), len(ids)
    compile_ahead(lambda: [logits_in_cuts(trunk, ids, [0, n]) for n in (1, 3, 8, 20, 100, 4096)])
    whole = logits_in_cuts(trunk, ids, edges_of(tokens, 4096))
    hashes = {"batch 4096": digest(whole)}
    for batch in (64, 512, 2048, 8192):
        hashes[f"batch {batch}"] = digest(logits_in_cuts(trunk, ids, edges_of(tokens, batch)))
    for step in (1, 2, 8):
        edges = edges_of(tokens, 4096, DECODED, step)
        hashes[f"last {DECODED} by {step}"] = digest(logits_in_cuts(trunk, ids, edges))
    hashes["in company"] = digest(logits_in_company(trunk, ids))
    trunk.close()
    for placement in ("disk", "gpu"):
        other = trunk_of(checked, dtype, device, placement)
        found = logits_in_cuts(other, ids, edges_of(tokens, 2048))
        hashes[f"table on {placement}"] = digest(found)
        other.close()
    want = torch.from_numpy(data["logits"])
    return {
        "tokens": tokens,
        "one_answer": len(set(hashes.values())) == 1,
        "hashes": hashes,
        **distance(whole[torch.from_numpy(data["rows"])], want),
    }


def sides(checked: CheckedModel, ids: list[int], device: str) -> dict[str, float]:
    """Relative error, float32, of the draft head's first two steps and of the tower's rows."""
    found = []
    for name in ("cpu", device):
        where, ops = torch.device(name), select(name)
        head = find_head(checked.checkpoint, checked.config, None)
        trunk = build_trunk(checked, dtype=torch.float32, ops=ops, device=where, head=head)
        assert trunk.head is not None
        session = trunk.store(sessions=1, context_tokens=len(ids)).open()
        trunk.forward(session, ids[:-2], "last")
        session.reserve(2)
        first, chain = trunk.head.begin([session], ids[-2:-1])
        second, _ = trunk.head.extend(chain, ids[-1:])
        trunk.close()
        sidecar = find_mmproj(checked.checkpoint.path)
        assert sidecar is not None
        vision = check_mmproj(sidecar)
        tower = build_tower(vision, dtype=torch.float32, ops=ops, device=where)
        rows = tower.encode(prepare_image(noise_png(), vision.rules))
        found.append([x.cpu() for x in (first, second, rows)])
    names = ("draft step 1", "draft step 2", "tower")
    return {
        name: float((got - want).norm() / want.norm())
        for name, want, got in zip(names, *found, strict=True)
    }


def noise_png() -> bytes:
    """A picture of 200 x 120 random pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (120, 200, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def check(args: argparse.Namespace) -> int:
    checked = check_checkpoint(args.model or embedded_model_path())
    report: dict[str, Any] = {}
    missed = []
    with np.load(args.file) as data:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            began, name = time.perf_counter(), str(dtype).removeprefix("torch.")
            found = answers(checked, dtype, data, args.device)
            found["seconds"] = time.perf_counter() - began
            report[name] = found
            print(name, json.dumps(found, indent=1), flush=True)
            if not found["one_answer"]:
                missed.append(f"{name}: hashes differ")
            for key, bound in BOUNDS[name].items():
                if not found[key] <= bound:
                    missed.append(f"{name}: {key} is {found[key]:.3g}, bound {bound}")
        report["sides"] = sides(checked, [int(i) for i in data["ids"][:300]], args.device)
    print("sides", json.dumps(report["sides"]), flush=True)
    missed += [f"{k}: {v:.3g}" for k, v in report["sides"].items() if not v <= 1e-3]
    print("MISSED:" if missed else "all bounds kept", *missed, sep="\n  ")
    if args.save:
        Path(args.save).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("reference", "check"))
    parser.add_argument("file")
    parser.add_argument("-m", "--model", default=None)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--text")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--save")
    args = parser.parse_args()
    if args.what == "check":
        return check(args)
    write_reference(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
