"""Tile sizes of the packed products tried against each other, at the real model's shapes.

    python benchmarks/kernels/gpu_tiles.py [--rows 1,4096]

Microseconds of a call (graph replays, median), beside bytes over 4.2 TB/s or FLOP over 700 TFLOP/s.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from gpu_ahead import compile_ahead
from gpu_ops import timed

from civetta.kernels.matmul import triton as matmul
from civetta.kernels.matmul.tiling import Tiling
from civetta.kernels.moe.triton import group_rows
from civetta.kernels.random_planes import random_packed

SHAPES = (
    ("qkvz", "Q8_0", 16384, 2560, 1, False),
    ("out", "Q8_0", 2560, 6144, 1, False),
    ("down", "Q8_0", 320, 10240, 1, False),
    ("router", "F32", 513, 2560, 1, False),
    ("gates", "F32", 96, 2560, 1, False),
    ("shared", "Q8_0", 1280, 2560, 1, True),
    ("index", "BF16", 640, 2560, 1, False),
    ("gate_up", "Q4_K", 1280, 2560, 512, True),
    ("down", "Q5_1", 2560, 640, 512, False),
    ("head", "Q8_0", 248320, 2560, 1, False),
)
Tiles = tuple[int, int, int, int | None, int]
"""Outputs, warps, stages, registers a thread, runs of 64 columns a step."""
FEW: tuple[Tiles, ...] = (
    (64, 4, 1, None, 2),
    (64, 4, 1, 128, 2),
    (64, 4, 1, 96, 2),
    (64, 4, 1, 96, 1),
    (64, 4, 1, 64, 1),
)
MANY: tuple[Tiles, ...] = (
    (128, 8, 3, None, 1),
    (128, 8, 3, None, 2),
    (128, 8, 4, None, 1),
    (64, 4, 2, None, 2),
    (64, 4, 3, None, 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,4096")
    args = parser.parse_args()
    generator = torch.Generator("cuda").manual_seed(0)
    counts = matmul.counters(torch.device("cuda"))
    weights = [random_packed(f, n, k, generator, experts=e) for _, f, n, k, e, _ in SHAPES]
    runs = []
    for rows in map(int, args.rows.split(",")):
        for (name, fmt, n, k, experts, pair), w in zip(SHAPES, weights, strict=True):
            if name == "head" and rows > 64:
                continue
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            outputs = n // 2 if pair else n
            named = {"pair": pair, "wide": fmt == "F32"}
            total = rows
            if experts > 1:
                ids = torch.stack([torch.randperm(512, device="cuda")[:10] for _ in range(rows)])
                total = rows * 10
                if rows <= 16:
                    named["experts_M"] = ids.view(-1)
                else:
                    named["groups"] = group_rows(ids, 512)
                if pair:
                    named["divisor"] = 10
                else:
                    x = torch.randn(total, k, device="cuda", dtype=torch.bfloat16)
            y = torch.empty(total, outputs, device="cuda", dtype=torch.bfloat16)
            used = min(1.0, total / 512) if experts > 1 else 1.0
            floor = max(w.nbytes * used / 4.2e6, 2.0 * total * n * k / 700e6)
            for tiles in FEW if rows <= 16 else MANY:
                runs.append((name, fmt, rows, tiles, floor, x, w, y, named))

    def one(run: tuple) -> None:
        *_, (outputs, warps, stages, registers, steps), _, x, w, y, named = run
        tiles = Tiling(outputs=outputs, warps=warps, stages=stages, registers=registers)
        kept = matmul.tiling, matmul.runs_of
        if not named["wide"]:
            matmul.tiling = lambda *, few, exact: tiles  # noqa: ARG005
            matmul.runs_of = lambda bits, *, few, exact: steps  # noqa: ARG005
        matmul.product(x, w, y, counts, **named)
        matmul.tiling, matmul.runs_of = kept

    print(compile_ahead(lambda: [one(run) for run in runs]), "launches compiled", flush=True)
    for run in runs:
        name, fmt, rows, tiles, floor = run[:5]
        try:
            us = timed(lambda run=run: one(run), 5)
            print(
                f"{name:8}{fmt:6}{rows:6} {tiles!s:24}{us:9.1f} us, floor {floor:7.1f} {floor / us:5.0%}",
                flush=True,
            )
        except Exception as error:  # noqa: BLE001 - a tile that does not fit
            print(f"{name:8}{fmt:6}{rows:6} {tiles!s:24} {str(error)[:60]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
