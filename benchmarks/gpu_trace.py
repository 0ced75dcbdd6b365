"""Where do a short launch and a long one first differ in bits? Prints every op that does, in order.

python benchmarks/gpu_trace.py
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from gpu_answers import trunk_of
from gpu_watch import Seen, watching

from civetta.model.build import check_checkpoint
from civetta.model.embedded import embedded_model_path
from civetta.model.gpu.trunk import GpuTrunk

if TYPE_CHECKING:
    from collections.abc import Sequence


def launched(trunk: GpuTrunk, ids: Sequence[int], first: int, rows: int) -> Seen:
    """What the ops of one launch of `rows` rows give, `first` tokens being there already."""
    session, seen = trunk.store(sessions=1, context_tokens=1024).open(), Seen()
    with trunk.without_graphs():
        if first:
            trunk.forward(session, ids[:first], "none")
        with watching(seen):
            trunk.forward(session, ids[first : first + rows], "all")
    return seen


def compare(long: Seen, short: Seen, rows: int) -> None:
    """Print the first four ops whose first `rows` rows differ."""
    shown = 0
    for (name, whole), (_, few) in zip(long.ops, short.ops, strict=True):
        a, b = (
            t[: rows * len(t) // seen.rows].float() for t, seen in ((whole, long), (few, short))
        )
        if shown < 4 and not torch.equal(a, b):
            shown += 1
            bad = (a != b).flatten(1).any(1).nonzero().flatten().tolist()
            largest = float((a - b).abs().max() / a.abs().max())
            print("  ", name, tuple(few.shape), largest, len(bad), bad[:6])


def main() -> None:
    checked = check_checkpoint(embedded_model_path())
    ids = [(i * 37) % 6000 for i in range(700)]
    for dtype in (torch.bfloat16, torch.float32):
        trunk = trunk_of(checked, dtype, "cuda")
        assert isinstance(trunk, GpuTrunk)
        for first, rows in ((0, 50), (0, 10), (0, 1), (600, 50), (600, 8), (600, 1)):
            long, short = (launched(trunk, ids, first, n) for n in (100, rows))
            print(f"{dtype}, {rows} rows against 100 at {first}: {len(long.ops)} ops")
            compare(long, short, rows)


if __name__ == "__main__":
    sys.exit(main())
