"""Long prompts and extreme ones on a GPU, with tiny checkpoints: one answer, the CPU's, no NaN.

    python benchmarks/gpu_long.py reference OUT.npz [--tokens 20000]      # on a CPU
    python benchmarks/gpu_long.py check IN.npz [--save FILE.json]         # on a GPU
    python benchmarks/gpu_long.py where [--dtypes float32]                # on a GPU: which op differs
    compute-sanitizer python benchmarks/gpu_long.py touch                 # every kernel, odd sizes

A tiny checkpoint (model/tiny.py) is given a context of exactly `--tokens`. `reference` keeps logits of
the CPU's float32 path, the last row among them: the context is full there. `check` hashes all rows for
batches of 512 and 4096 and with the last rows one by one, in float32, float16 and bfloat16, and
compares them with the reference in float32. Then come checkpoints whose router, embedding or all
weights are zero, and prompts of one token: nothing may be NaN or infinite. Then fresh memory is filled
with NaN, whatever it is for, and the answer must stay the same. Exits 1 when a bound is missed.

`where` keeps what every op gives for every row, kernel by kernel, and prints for each of these cuts
the first row and op that differ from batches of 4096. The same cut is run twice: what differs there
does not depend on cuts. It compares the last rows through captured graphs too. `touch` runs a few
launches of odd sizes, one by one and in company, for a sanitizer to watch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpu_ahead import compile_ahead
from gpu_answers import digest, distance, edges_of, logits_in_cuts, trunk_of
from gpu_watch import difference, trace

from civetta.model.build import check_checkpoint
from civetta.model.gpu.trunk import GpuTrunk
from civetta.model.inputs import Piece
from civetta.model.tiny import (
    tiny_config,
    tiny_tensors,
    to_bf16,
    write_json,
    write_safetensors,
    write_tokenizer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEPT_ROWS = 400
ZEROED: dict[str, Callable[[str], bool]] = {
    "router": lambda name: name.endswith("mlp.gate.weight"),
    "embedding": lambda name: "embed_tokens" in name,
    "every matrix": lambda name: ("weight" in name or "proj" in name) and "norm" not in name,
}
SHORT = ((1,), (1, 1), (8, 1))
"""Rows of the launches of short prompts."""


def write_model(folder: Path, tokens: int, zero: Callable[[str], bool] = lambda _: False) -> Path:
    """A tiny checkpoint with a context of `tokens`, some of its tensors zeros."""
    folder.mkdir(parents=True)
    config = tiny_config()
    config["text_config"]["max_position_embeddings"] = tokens
    write_json(folder / "config.json", config)
    write_tokenizer(folder)
    tensors = {}
    for name, values in tiny_tensors(config).items():
        kept = np.zeros_like(values) if zero(name) else values
        whole = values.dtype == np.int64
        tensors[name] = ("I64", kept) if whole else ("BF16", to_bf16(kept))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def ids_of(tokens: int) -> list[int]:
    return np.random.default_rng(3).integers(0, 256, tokens).tolist()


def write_reference(args: argparse.Namespace, folder: Path) -> int:
    trunk = trunk_of(check_checkpoint(write_model(folder / "m", args.tokens)), torch.float32, "cpu")
    ids = ids_of(args.tokens)
    rows = np.unique(np.linspace(0, args.tokens - 1, KEPT_ROWS).astype(int))
    logits = logits_in_cuts(trunk, ids, edges_of(args.tokens, 1024))
    np.savez(
        args.file, rows=rows, tokens=args.tokens, logits=logits[torch.from_numpy(rows)].numpy()
    )
    return 0


def cuts_of(tokens: int) -> dict[str, list[int]]:
    """Edges of the launches that must give one answer."""
    cuts = {f"batch {n}": edges_of(tokens, n) for n in (512, 4096)}
    return {**cuts, "last 40 by one": edges_of(tokens, 4096, 40)}


def long_prompt(data: Any, dtype: torch.dtype, folder: Path, device: str) -> dict[str, Any]:
    tokens = int(data["tokens"])
    ids = ids_of(tokens)
    trunk = trunk_of(check_checkpoint(folder), dtype, device)
    cuts = cuts_of(tokens)
    found = {name: logits_in_cuts(trunk, ids, edges) for name, edges in cuts.items()}
    trunk.close()
    whole = found["batch 4096"]
    hashes = {name: digest(logits) for name, logits in found.items()}
    want = torch.from_numpy(data["logits"])
    return {
        "one_answer": len(set(hashes.values())) == 1,
        "finite": bool(whole.isfinite().all()),
        "hashes": hashes,
        **distance(whole[torch.from_numpy(data["rows"])], want),
    }


def extremes(folder: Path, device: str) -> dict[str, bool]:
    """Whether every logit is finite, by what is zero and how long the launches are."""
    found = {}
    for name, zero in {"nothing": lambda _: False, **ZEROED}.items():
        checked = check_checkpoint(write_model(folder / name.replace(" ", "-"), 640, zero))
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            trunk = trunk_of(checked, dtype, device)
            for cuts in (*SHORT, (640,), (512, 127, 1)):
                edges = [0, *np.cumsum(cuts).tolist()]
                logits = logits_in_cuts(trunk, ids_of(sum(cuts)), edges)
                found[f"{name} zero, {str(dtype)[6:]}, {cuts}"] = bool(logits.isfinite().all())
            trunk.close()
    return found


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh tensors are full of NaN (numbers) or of large values (integers) while the block runs."""
    makers = {name: getattr(torch, name) for name in ("empty", "empty_like")}

    def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **named: Any) -> torch.Tensor:
            x = make(*args, **named)
            return x.fill_(
                float("nan") if x.is_floating_point() else 1 << 30 if x.dtype.itemsize > 2 else 99
            )

        return run

    for name, make in makers.items():
        setattr(torch, name, filled(make))
    try:
        yield
    finally:
        for name, make in makers.items():
            setattr(torch, name, make)


def fresh_memory(folder: Path, device: str) -> dict[str, bool]:
    """Whether logits stay what they are when fresh memory is poisoned, by dtype."""
    checked, found = check_checkpoint(write_model(folder, 640)), {}
    edges = [0, 300, 600, 608, 617, 618, 619, 620, 640]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        digests = []
        for around in (nullcontext, poisoned):
            with around():
                trunk = trunk_of(checked, dtype, device)
                digests.append(digest(logits_in_cuts(trunk, ids_of(640), edges)))
                trunk.close()
        found[str(dtype)[6:]] = digests[0] == digests[1]
    return found


def where(args: argparse.Namespace, folder: Path) -> int:
    """The first row and op at which a cut differs from batches of 4096, or from itself."""
    checked, ids = check_checkpoint(write_model(folder / "m", args.tokens)), ids_of(args.tokens)
    differing = 0
    for name in args.dtypes.split(","):
        trunk = trunk_of(checked, getattr(torch, name), args.device)
        if args.device != "cpu":
            sizes = {b - a for edges in cuts_of(args.tokens).values() for a, b in pairwise(edges)}
            compile_ahead(lambda: [logits_in_cuts(trunk, ids, [0, n]) for n in sorted(sizes)])  # noqa: B023 - called at once
        cuts = cuts_of(args.tokens)
        whole = trace(trunk, ids, cuts["batch 4096"])
        for cut, edges in {"batch 4096 again": cuts.pop("batch 4096"), **cuts}.items():
            found = difference(whole, trace(trunk, ids, edges))
            differing += found is not None
            print(name, cut, json.dumps(found, indent=1), flush=True)
        logits = logits_in_cuts(trunk, ids, cuts["last 40 by one"]).to(whole.rows[-1].device)
        rows = (logits != whole.rows[-1]).any(1).nonzero().flatten().tolist()
        differing += bool(rows)
        print(name, "last 40 by one, captured: rows whose logits differ", rows[:8], flush=True)
        trunk.close()
    print(f"{differing} comparisons differ")
    return 1 if differing else 0


def touch(args: argparse.Namespace, folder: Path) -> int:
    """Launches of odd sizes without graphs; whether all logits are finite."""
    checked, ids = check_checkpoint(write_model(folder / "m", 1400)), ids_of(1397)
    finite = True
    for name in args.dtypes.split(","):
        trunk = trunk_of(checked, getattr(torch, name), args.device)
        assert isinstance(trunk, GpuTrunk)
        with trunk.without_graphs():
            for edges in ([0, 1291, 1358, 1366, 1371, 1372, 1389, 1397], [0, 1, 2, 79]):
                logits = logits_in_cuts(trunk, ids[: edges[-1]], edges)
                finite &= bool(logits.isfinite().all())
            store = trunk.store(sessions=3, context_tokens=256)
            sessions = [store.open() for _ in range(3)]
            for counts in ((67, 1, 130), (1, 3, 7), (1, 1, 1)):
                pieces = [
                    Piece(session=session, ids=ids[:n], rows="all")
                    for session, n in zip(sessions, counts, strict=True)
                ]
                finite &= bool(trunk.forward_pieces(pieces).isfinite().all())
        trunk.close()
        print(name, "finite" if finite else "NOT FINITE", flush=True)
    return 0 if finite else 1


def check(args: argparse.Namespace, folder: Path) -> int:
    report: dict[str, Any] = {}
    with np.load(args.file) as data:
        model = write_model(folder / "m", int(data["tokens"]))
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            report[str(dtype)[6:]] = long_prompt(data, dtype, model, args.device)
    report["extremes"] = found = extremes(folder / "extremes", args.device)
    report["fresh memory"] = fresh = fresh_memory(folder / "fresh", args.device)
    missed = [name for name, finite in found.items() if not finite]
    missed += [f"{dtype}: poisoned memory shows" for dtype, same in fresh.items() if not same]
    for dtype in ("float32", "float16", "bfloat16"):
        missed += [f"{dtype} {key}" for key in ("one_answer", "finite") if not report[dtype][key]]
    if not report["float32"]["relative_error"] <= 1e-3:
        missed.append(f"float32 is {report['float32']['relative_error']:.3g} from the CPU")
    print(json.dumps({k: v for k, v in report.items() if k != "extremes"}, indent=1))
    print(f"{len(found)} extreme launches, {sum(found.values())} finite")
    print("MISSED:" if missed else "all bounds kept", *missed, sep="\n  ")
    if args.save:
        Path(args.save).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("reference", "check", "where", "touch"))
    parser.add_argument("file", nargs="?")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", default="float32,float16,bfloat16")
    parser.add_argument("--save")
    args = parser.parse_args()
    if args.file is None and args.what not in {"where", "touch"}:
        parser.error(f"{args.what} needs a file")
    with tempfile.TemporaryDirectory() as folder:
        commands = {"check": check, "where": where, "touch": touch, "reference": write_reference}
        run = commands[args.what]
        return run(args, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
