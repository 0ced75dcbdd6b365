"""Kernels beside the products, at the real model's sizes: microseconds of a call.

    python benchmarks/kernels/gpu_parts.py [--parts choose,read,enter] [--rows 1,8,4096]

Graph replays, median. `read` is tried with other partitions, warps and stages too. Times stand
beside bytes over 4.2 TB/s, or FLOP over 700 TFLOP/s where that is longer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from gpu_ahead import compile_ahead
from gpu_ops import timed

from civetta.kernels.fused import attend, choice, streams
from civetta.kernels.fused.attention import AttentionSizes
from civetta.kernels.fused.launch import ROW_FIELDS, SESSION_FIELDS, Batch
from civetta.kernels.matmul.triton import counters
from civetta.kernels.packed import PackedHyper, pack
from civetta.kernels.random_planes import random_packed

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = AttentionSizes(
    heads=24, kv_heads=2, width=256, index_heads=4, index_width=128, ratio=4, keep=512
)
DTYPE = torch.float16
READS = ((64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3), (32, 4, 2), (32, 4, 3),
         (32, 4, 4), (32, 8, 3))  # fmt: skip
"""Keys of a partition, warps, stages."""
Run = tuple[str, "Callable[[], object]", float]


class Place:
    """One sequence of `depth` tokens and `rows` new ones, with random pages."""

    def __init__(self, rows: int, depth: int) -> None:
        self.rows, self.depth = rows, depth
        pages = (depth + rows) // 64 + 1
        self.table = torch.randperm(pages, device="cuda")
        shape = (pages, 64, SIZES.kv_heads, SIZES.width)
        self.k, self.v = (torch.randn(shape, device="cuda", dtype=DTYPE) for _ in range(2))
        self.key = torch.randn(pages, 16, SIZES.index_width, device="cuda", dtype=DTYPE)
        rows_FT = torch.zeros(len(ROW_FIELDS), rows, dtype=torch.int64)
        rows_FT[ROW_FIELDS.index("position")] = torch.arange(depth, depth + rows)
        session = dict.fromkeys(SESSION_FIELDS, 0)
        session |= {"rows": rows, "first": depth, "table": self.table.data_ptr()}
        sessions = torch.tensor([[session[name]] for name in SESSION_FIELDS])
        self.batch = Batch(
            rows_FT=rows_FT.cuda(),
            sessions_FB=sessions.cuda(),
            rows=rows,
            sessions=1,
            most_rows=rows,
            in_place=rows <= 8,
            table_tokens=max(4096, 1 << (depth + rows - 1).bit_length()),
            counts=counters(torch.device("cuda")),
        )


def choose_runs(rows: int, depth: int) -> list[Run]:
    place = Place(rows, depth)
    iq = torch.randn(rows, SIZES.index_heads, SIZES.index_width, device="cuda", dtype=DTYPE)
    blocks = depth / SIZES.ratio
    flop = rows * blocks * SIZES.index_heads * SIZES.index_width * 2
    floor = max(place.key.nbytes / 4.2e6, flop / 7e8)
    return [
        (
            f"choose, {rows} rows at {depth}",
            lambda: choice.choose(place.batch, place.key, iq, SIZES.ratio, SIZES.keep),
            floor,
        )
    ]


def read_runs(rows: int, depth: int) -> list[Run]:
    place = Place(rows, depth)
    q = torch.randn(rows, SIZES.heads, SIZES.width, device="cuda", dtype=DTYPE)
    proj = torch.randn(rows, SIZES.heads * 2 * SIZES.width, device="cuda", dtype=DTYPE)
    y = torch.empty(rows, SIZES.heads * SIZES.width, device="cuda", dtype=DTYPE)
    most = (depth + rows) // SIZES.ratio
    kept = torch.randint(0, max(most - rows, 1), (rows, SIZES.keep), device="cuda").int()
    kept = kept.sort(1).values
    pages = attend.Pages(k=place.k, v=place.v, raw=place.key, key=place.key)
    keys = sum(min(depth + r, 2051) for r in range(rows))
    floor = max(
        min(place.k.nbytes * 2, keys * SIZES.kv_heads * SIZES.width * 4) / 4.2e6,
        keys * SIZES.heads * SIZES.width * 4 / 7e8,
    )

    def run(tiles: tuple[int, int, int]) -> None:
        attend.PARTITION, attend.WARPS, attend.STAGES = tiles
        attend._read(place.batch, SIZES, pages, q, kept, proj, y)

    tries = READS if rows > 64 else READS[1:7:4]
    return [
        (f"read {tiles}, {rows} rows at {depth}", lambda tiles=tiles: run(tiles), floor)
        for tiles in tries
    ]


def stream_runs(rows: int) -> list[Run]:
    x = torch.randn(rows, 4, 2560, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    hyper = PackedHyper(
        gain_SD=torch.ones(4, 2560, device="cuda"),
        down=random_packed("Q8_0", 320, 10240, generator),
        up=random_packed("Q8_0", 10240, 320, generator),
        inject=pack(torch.randn(4, 10240) * 1e-3, torch.float32, "cuda"),
    )
    written = streams.Written(
        y=torch.randn(rows, 2560, device="cuda") * 1e-3,
        inject=torch.zeros(rows, 4, 4, device="cuda"),
    )
    entered = streams.enter(x, hyper, 1e-6, DTYPE, written)
    counts = counters(torch.device("cuda"))
    return [
        (
            f"enter, {rows} rows",
            lambda: streams.enter(x, hyper, 1e-6, DTYPE, written),
            (x.nbytes * 2.75 + 5e5) / 4.2e6,
        ),
        (
            f"squeeze and mix, {rows} rows",
            lambda: streams.mix(x, entered, hyper, counts),
            max((x.nbytes * 1.65 + 7e6) / 4.2e6, rows * 10240 * 320 * 4 / 7e8),
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="choose,read,enter")
    parser.add_argument("--rows", default="1,8,4096")
    args = parser.parse_args()
    parts, runs = args.parts.split(","), []
    for rows in map(int, args.rows.split(",")):
        if "choose" in parts:
            runs += choose_runs(rows, 8192) + choose_runs(rows, 131072)
        if "read" in parts:
            runs += read_runs(rows, 0) + read_runs(rows, 131072)
        if "enter" in parts:
            runs += stream_runs(rows)
    compile_ahead(lambda: [run() for _, run, _ in runs])
    for name, run, floor in runs:
        print(f"{name:36s} {timed(run):9.1f} us, floor {floor:8.1f}", flush=True)


if __name__ == "__main__":
    main()
