"""Does a GPU give one answer, and the CPU's? Run on a model with `python benchmarks/gpu_answers.py`.

    python benchmarks/gpu_answers.py [-m MODEL] [--tokens 3000] [--text FILE]

Prints, for float32 and bfloat16 on the GPU: SHA-256 of all logits for several prefill batches, for a
batch of three sessions and for token-by-token decoding (all must be equal), and the distance to the
CPU's plain float32 reference (relative error, mean KL, top-1 agreement where the margin exceeds
0.05 of the logits' spread).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from civetta.engine.load import read_text_side
from civetta.kernels.select import REFERENCE, select
from civetta.model.build import build_trunk, check_checkpoint
from civetta.model.embedded import embedded_model_path
from civetta.model.inputs import Piece

if TYPE_CHECKING:
    from civetta.model.trunk import Trunk

DECODED = 130


def logits_in_cuts(trunk: Trunk, ids: list[int], batch: int, decoded: int = 0) -> torch.Tensor:
    """Logits of all rows: prefill in chunks of `batch`, the last `decoded` tokens one by one."""
    session = trunk.store(sessions=1, context_tokens=len(ids)).open()
    prompt = len(ids) - decoded
    edges = [*range(0, prompt, batch), *range(prompt, len(ids) + 1)]
    parts = [trunk.forward(session, ids[a:b], "all").cpu() for a, b in pairwise(edges)]
    return torch.cat(parts)


def logits_in_company(trunk: Trunk, ids: list[int]) -> torch.Tensor:
    """The same rows with two other sequences in every launch."""
    store = trunk.store(sessions=3, context_tokens=len(ids))
    sessions = [store.open() for _ in range(3)]
    other = ids[::-1]
    parts = []
    for start in range(0, len(ids), 300):
        stop = min(start + 300, len(ids))
        pieces = [
            Piece(session=sessions[0], ids=other[start : start + 7], rows="last"),
            Piece(session=sessions[1], ids=ids[start:stop], rows="all"),
            Piece(session=sessions[2], ids=other[start:stop], rows="last"),
        ]
        parts.append(trunk.forward_pieces(pieces)[1:-1].cpu())
    return torch.cat(parts)


def digest(logits: torch.Tensor) -> str:
    return hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:16]


def distance(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    p = want.double().log_softmax(-1)
    q = got.double().log_softmax(-1)
    best = want.topk(2, dim=-1).values
    clear = (best[:, 0] - best[:, 1]) > 0.05 * want.std(-1)
    agree = got.argmax(-1) == want.argmax(-1)
    return {
        "relative_error": float((got - want).norm() / want.norm()),
        "mean_kl": float((p.exp() * (p - q)).sum(-1).mean()),
        "top1_where_clear": float(agree[clear].double().mean()),
        "top1": float(agree.double().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default=None)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--text", default=str(Path(__file__).parents[1] / "README.md"))
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    checked = check_checkpoint(args.model or embedded_model_path())
    tokenizer, _ = read_text_side(checked)
    assert tokenizer is not None
    text = Path(args.text).read_text()
    ids = list(tokenizer.encode(text))
    ids = (ids * (-(-args.tokens // len(ids))))[: args.tokens]
    reference = build_trunk(checked, dtype=torch.float32, ops=REFERENCE)
    want = logits_in_cuts(reference, ids, 1024)
    device = torch.device(args.device)
    for dtype in (torch.float32, torch.bfloat16):
        trunk = build_trunk(checked, dtype=dtype, ops=select(device), device=device)
        whole = logits_in_cuts(trunk, ids, 4096)
        hashes = {f"batch {n}": digest(logits_in_cuts(trunk, ids, n)) for n in (64, 512, 2048)}
        hashes["batch 4096"] = digest(whole)
        hashes["batch 8192"] = digest(logits_in_cuts(trunk, ids, 8192))
        hashes["decoded"] = digest(logits_in_cuts(trunk, ids, 4096, DECODED))
        hashes["in company"] = digest(logits_in_company(trunk, ids))
        report = {
            "dtype": str(dtype),
            "tokens": len(ids),
            "one_answer": len(set(hashes.values())) == 1,
            "hashes": hashes,
            **distance(whole, want),
        }
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
