"""Tilings of the packed products tried against each other, at the real model's shapes.

    python benchmarks/kernels/gpu_tiles.py [--rows 1,8,4096] [--only qkvz,out] [--save FILE.json]

Microseconds of a call (graph replays over as many weights as exceed the card's cache, median), beside
bytes over 4.2 TB/s or FLOP over 700 TFLOP/s; then whether the rows' bits are those of every other
number of rows and tiling.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from gpu_ahead import compile_ahead
from gpu_ops import timed

from civetta.kernels.matmul import tiling
from civetta.kernels.matmul import triton as matmul
from civetta.kernels.matmul.tiling import Tiling
from civetta.kernels.moe.triton import group_rows
from civetta.kernels.random_planes import random_packed

COLD = 200e6
"""Bytes that one graph goes through, more than the card's cache."""
SLOTS, EXPERTS = 10, 512
SHAPES = (
    ("qkvz", "Q8_0", 16384, 2560, 1, False),
    ("out", "Q8_0", 2560, 6144, 1, False),
    ("down", "Q8_0", 320, 10240, 1, False),
    ("router", "F32", 513, 2560, 1, False),
    ("gates", "F32", 96, 2560, 1, False),
    ("shared", "Q8_0", 1280, 2560, 1, True),
    ("index", "BF16", 640, 2560, 1, False),
    ("gate_up", "Q4_K", 1280, 2560, EXPERTS, True),
    ("edown", "Q5_1", 2560, 640, EXPERTS, False),
    ("head", "Q8_0", 248320, 2560, 1, False),
)
Try = tuple[int, int, int, int, int | None]
"""Tiles of a program and a step, warps, stages, registers a thread."""
FEW: tuple[Try, ...] = (
    (1, 2, 4, 1, None),
    (1, 2, 4, 3, None),
    (1, 2, 4, 4, None),
    (1, 1, 4, 4, None),
    (1, 4, 4, 2, None),
    (1, 4, 4, 3, None),
)
MANY: tuple[Try, ...] = (
    (2, 1, 8, 3, None),
    (2, 1, 8, 4, None),
    (1, 1, 4, 3, None),
    (4, 1, 8, 3, None),
    (2, 2, 8, 2, None),
)


@dataclass(kw_only=True)
class Case:
    name: str
    fmt: str
    rows: int
    total: int
    weights: list[Any]
    xs: list[torch.Tensor]
    y: torch.Tensor
    named: list[dict[str, Any]]
    floor: float
    counts: torch.Tensor
    results: dict[str, float] = field(default_factory=dict)

    def run(self, tried: Try, calls: int | None = None) -> None:
        tiles, steps, warps, stages, registers = tried
        chosen = Tiling(tiles=tiles, steps=steps, warps=warps, stages=stages, registers=registers)
        kept = matmul.tiling
        if not self.named[0]["wide"]:
            matmul.tiling = lambda w, *, rows, exact, wide: chosen  # noqa: ARG005
        try:
            for i in range(calls or len(self.named)):
                w = self.weights[i % len(self.weights)]
                matmul.product(self.xs[0], w, self.y, self.counts, **self.named[i])
        finally:
            matmul.tiling = kept


def cases(rows_list: list[int], only: set[str]) -> list[Case]:
    generator = torch.Generator("cuda").manual_seed(0)
    counts = matmul.counters(torch.device("cuda"))
    found = []
    for name, fmt, n, k, experts, pair in SHAPES:
        if only and name not in only:
            continue
        first = random_packed(fmt, n, k, generator, experts=experts, pair=pair)
        copies = 1 if experts > 1 else max(1, min(32, round(COLD / first.nbytes)))
        weights = [first] + [
            random_packed(fmt, n, k, generator, pair=pair) for _ in range(copies - 1)
        ]
        for rows in rows_list:
            if name == "head" and rows > 64:
                continue
            x = torch.randn(rows, k, device="cuda", dtype=torch.float16)
            total, used = rows, 1.0
            calls = copies if rows <= 64 else 2
            named = [{"wide": fmt == "F32"} for _ in range(calls)]
            if experts > 1:
                total, named = rows * SLOTS, []
                used = min(1.0, total / EXPERTS)
                for _ in range(8 if rows <= 64 else 2):
                    ids = torch.rand(rows, EXPERTS, device="cuda").topk(SLOTS).indices
                    own: dict[str, Any] = {"wide": False, "divisor": SLOTS if pair else 1}
                    if rows <= 16:
                        own["experts_M"] = ids.flatten()
                    else:
                        own["groups"] = group_rows(ids, EXPERTS)
                    named.append(own)
                if not pair:
                    x = torch.randn(total, k, device="cuda", dtype=torch.bfloat16)
            outputs = n // 2 if pair else n
            y = torch.empty(total, outputs, device="cuda", dtype=torch.bfloat16)
            floor = max(first.nbytes * used / 4.2e6, 2.0 * total * n * k / 700e6)
            found.append(
                Case(name=name, fmt=fmt, rows=rows, total=total, weights=weights, xs=[x], y=y,
                     named=named, floor=floor, counts=counts)
            )  # fmt: skip
    return found


def one_answer(found: list[Case]) -> list[str]:
    """Names of weights whose rows come out differently with another number of rows."""
    differing = []
    for name in dict.fromkeys(c.name for c in found if c.rows > 1):
        case = max((c for c in found if c.name == name), key=lambda c: c.rows)
        w, x = case.weights[0], case.xs[0]
        wide = case.named[0]["wide"]
        groups = w.experts > 1
        ids = torch.rand(len(x), EXPERTS, device="cuda").topk(1).indices
        answers = []
        for rows in (len(x), *(r for r in (1, 5, 30, 50, 100) if r < len(x))):
            y = torch.full((rows, case.y.shape[1]), float("nan"), device="cuda")
            kw: dict[str, Any] = {"wide": wide}
            if groups and rows <= 16:
                kw["experts_M"] = ids[:rows].flatten().contiguous()
            elif groups:
                kw["groups"] = group_rows(ids[:rows].contiguous(), EXPERTS)
            matmul.product(x[:rows], w, y, case.counts, **kw)
            answers.append(y)
        for y in answers[1:]:
            least = min(len(y), len(answers[0]))
            if not torch.equal(y[:least], answers[0][:least]):
                differing.append(f"{name} {len(y)}")
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,4096")
    parser.add_argument("--only", default="")
    parser.add_argument("--few", help="tilings to try, as tiles,steps,warps,stages;...")
    parser.add_argument("--many")
    parser.add_argument("--programs", default=str(tiling.PROGRAMS))
    parser.add_argument("--save")
    args = parser.parse_args()

    def tries(text: str | None, default: tuple[Try, ...]) -> tuple[Try, ...]:
        if not text:
            return default
        parts = [[int(v) for v in one.split(",")] for one in text.split(";")]
        return tuple((*p[:4], p[4] if len(p) > 4 else None) for p in parts)  # type: ignore[misc]

    few, many = tries(args.few, FEW), tries(args.many, MANY)
    found = cases([int(r) for r in args.rows.split(",")], set(filter(None, args.only.split(","))))
    runs = [
        (c, t, int(p))
        for c in found
        for t in (few if c.rows <= 64 else many)[: 1 if c.named[0]["wide"] else None]
        for p in args.programs.split(",")
        if p == args.programs.split(",")[0] or (c.rows <= 64 and c.weights[0].experts == 1)
    ]

    def everything() -> None:
        for c, t, p in runs:
            tiling.PROGRAMS = p
            c.run(t, 1)
        one_answer(found)

    print(compile_ahead(everything), "launches compiled", flush=True)
    lines = []
    for c, t, p in runs:
        tiling.PROGRAMS = p
        try:
            us = timed(lambda c=c, t=t: c.run(t), 5, 1) / len(c.named)
        except Exception as error:  # noqa: BLE001 - a tiling that does not fit
            print(f"{c.name:8}{c.rows:5} {t!s:22} {p} {str(error)[:70]}", flush=True)
            continue
        lines.append(
            {"name": c.name, "rows": c.rows, "try": t, "programs": p, "us": us, "floor": c.floor}
        )
        print(
            f"{c.name:8}{c.rows:5} {t!s:22} {p:4} {us:9.1f} us, floor {c.floor:7.1f} {c.floor / us:5.0%}",
            flush=True,
        )
    differing = one_answer(found)
    print("one answer" if not differing else f"DIFFERENT: {differing}", flush=True)
    if args.save:
        Path(args.save).write_text(json.dumps(lines, indent=1) + "\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
