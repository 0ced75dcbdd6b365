"""What a layer launches for few rows: microseconds of a call.

    python benchmarks/kernels/gpu_few.py [--rows 1,8] [--only qkvz,gate_up]

Graph replays that go through 200 MB of weights, the better of two medians, beside bytes over 4.2 TB/s.
Then, of every product, whether 1, 8 and 16 rows have the bits of 2,048 (or of sorted rows), and
whether two products in one launch have those of two launches.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from gpu_ahead import compile_ahead
from gpu_ops import timed

from civetta.kernels.fused import streams
from civetta.kernels.matmul.triton import Product, counters, product, two_products
from civetta.kernels.moe.triton import group_rows, route
from civetta.kernels.packed import PackedHyper, PackedWeight
from civetta.kernels.random_planes import random_packed

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = "cuda"
COLD = 200e6
EXPERTS, SLOTS, D = 512, 10, 2560
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DENSE = (
    ("qkvz", "Q8_0", 16384, D, False),
    ("out", "Q8_0", D, 6144, False),
    ("down", "Q8_0", 320, 10240, False),
    ("gates", "F32", 96, D, False),
    ("index", "BF16", 640, D, False),
    ("router", "F32", 513, D, False),
    ("shared", "Q8_0", 1280, D, True),
    ("sdown", "Q8_0", D, 640, False),
)


@dataclass(kw_only=True)
class Case:
    """A launch, cycled over copies of its weights; `floor` in microseconds."""

    name: str
    rows: int
    calls: list[Callable[[], object]]
    floor: float

    def run(self) -> None:
        for call in self.calls:
            call()


class Weights:
    """Random weights, as many of each as are more than the card's cache."""

    def __init__(self) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(0)
        self.counts = counters(torch.device(DEVICE))
        self.of: dict[str, list[PackedWeight]] = {}
        for name, fmt, n, k, pair in DENSE:
            first = random_packed(fmt, n, k, self.generator, pair=pair)
            copies = max(2, min(48, round(COLD / first.nbytes)))
            rest = (random_packed(fmt, n, k, self.generator, pair=pair) for _ in range(copies - 1))
            self.of[name] = [first, *rest]
        self.gate_up = random_packed("Q4_K", 1280, D, self.generator, experts=EXPERTS, pair=True)
        self.edown = random_packed("Q5_1", D, 640, self.generator, experts=EXPERTS)
        self.hypers = [
            PackedHyper(
                gain_SD=torch.ones(4, D, device=DEVICE),
                down=random_packed("Q8_0", 320, 4 * D, self.generator),
                up=random_packed("Q8_0", D, 320, self.generator, experts=4),
                inject=torch.randn(4, 4 * D, device=DEVICE) * 1e-3,
            )
            for _ in range(28)
        ]


def operands(name: str, rows: int, cols: int) -> torch.Tensor:
    return torch.randn(
        rows, cols, device=DEVICE, dtype=BF16 if name.endswith("down") and cols == 640 else F16
    )


def cases(w: Weights, rows: int) -> list[Case]:
    found = []
    for name, fmt, n, k, pair in DENSE:
        x = operands(name, rows, k)
        y = torch.empty(rows, n // 2 if pair else n, device=DEVICE, dtype=F32)
        found.append(Case(
            name=name, rows=rows, floor=w.of[name][0].nbytes / 4.2e6,
            calls=[lambda x=x, v=v, y=y, wide=fmt == "F32": product(x, v, y, w.counts, wide=wide)
                   for v in w.of[name]],
        ))  # fmt: skip
    h = operands("", rows, D)
    ids = [
        torch.rand(rows, EXPERTS, device=DEVICE).topk(SLOTS).indices.flatten() for _ in range(16)
    ]
    used = rows * SLOTS / EXPERTS
    hidden, inner = operands("edown", rows * SLOTS, 640), operands("sdown", rows, 640)
    gated = torch.empty(rows * SLOTS, 640, device=DEVICE, dtype=BF16)
    flat = torch.empty(rows * SLOTS, D, device=DEVICE, dtype=F32)
    shared = torch.empty(rows, D, device=DEVICE, dtype=F32)
    gate = torch.empty(rows, 640, device=DEVICE, dtype=BF16)
    logits = torch.empty(rows, 513, device=DEVICE, dtype=F32)
    down, up = w.edown.nbytes * used, w.gate_up.nbytes * used
    found += [
        Case(name="gate_up", rows=rows, floor=up / 4.2e6,
             calls=[lambda i=i: product(h, w.gate_up, gated, None, experts_M=i, divisor=SLOTS)
                    for i in ids]),
        Case(name="edown", rows=rows, floor=down / 4.2e6,
             calls=[lambda i=i: product(hidden, w.edown, flat, None, experts_M=i) for i in ids]),
        Case(name="edown+sdown", rows=rows, floor=(down + w.of["sdown"][0].nbytes) / 4.2e6,
             calls=[lambda i=i, v=v: two_products(
                        Product(x_TK=hidden, w=w.edown, y_MN=flat, experts_M=i),
                        Product(x_TK=inner, w=v, y_MN=shared), w.counts)
                    for i, v in zip(ids, w.of["sdown"], strict=False)]),
        Case(name="router+shared", rows=rows,
             floor=(w.of["router"][0].nbytes + w.of["shared"][0].nbytes) / 4.2e6,
             calls=[lambda a=a, b=b: two_products(
                        Product(x_TK=h, w=a, y_MN=logits, wide=True),
                        Product(x_TK=h, w=b, y_MN=gate), w.counts)
                    for a, b in zip(w.of["router"], w.of["shared"], strict=False)]),
        Case(name="route", rows=rows, floor=0.0,
             calls=[lambda: route(torch.zeros_like(logits)[:, :EXPERTS], SLOTS)] * 16),
    ]  # fmt: skip
    chosen = torch.randn(rows, 513, device=DEVICE)
    found[-1].calls = [lambda: route(chosen[:, :EXPERTS], SLOTS)] * 16
    x_TSD = torch.randn(rows, 4, D, device=DEVICE)
    entered = streams.enter(x_TSD, w.hypers[0], 1e-6, F16, None)
    found.append(Case(
        name="down, mix", rows=rows,
        floor=(w.hypers[0].down.nbytes + w.hypers[0].up.nbytes) / 4.2e6,
        calls=[lambda v=v: streams.mix(x_TSD, entered, v, w.counts) for v in w.hypers],
    ))  # fmt: skip
    return found


def answers(w: Weights) -> dict[str, list[torch.Tensor]]:
    """Each product's first rows: of 1, 8, 16 and many rows."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, fmt, n, k, pair in DENSE:
        x, v = operands(name, 2048, k), w.of[name][0]
        found[name] = []
        for rows in (2048, 16, 8, 1):
            y = torch.full((rows, n // 2 if pair else n), float("nan"), device=DEVICE)
            product(x[:rows], v, y, w.counts, wide=fmt == "F32")
            found[name].append(y)
    ids = torch.arange(160, device=DEVICE)[:, None] * 3
    for name, v, k, n in (("gate_up", w.gate_up, D, 640), ("edown", w.edown, 640, D)):
        x = operands(name, 160, k)
        y = torch.full((160, n), float("nan"), device=DEVICE)
        z = torch.full((16, n), float("nan"), device=DEVICE)
        product(x, v, y, None, groups=group_rows(ids, EXPERTS))
        product(x[:16], v, z, None, experts_M=ids[:16].flatten())
        found[name] = [y, z]
    x, both = operands("", 8, D), operands("edown", 16, 640)
    first, second = (torch.full((8, n), float("nan"), device=DEVICE) for n in (513, 640))
    a, b = w.of["router"][0], w.of["shared"][0]
    two_products(
        Product(x_TK=x, w=a, y_MN=first, wide=True), Product(x_TK=x, w=b, y_MN=second), w.counts
    )
    for name, v, y in (("router", a, first), ("shared", b, second)):
        alone = torch.full_like(y, float("nan"))
        product(x, v, alone, w.counts, wide=name == "router")
        found[f"{name}, two"] = [alone, y]
    first = torch.full((16, D), float("nan"), device=DEVICE)
    second = torch.full((8, D), float("nan"), device=DEVICE)
    a, b, own = w.edown, w.of["sdown"][0], ids[:16].flatten()
    two_products(Product(x_TK=both, w=a, y_MN=first, experts_M=own),
                 Product(x_TK=both[:8], w=b, y_MN=second), w.counts)  # fmt: skip
    alone = [torch.full_like(y, float("nan")) for y in (first, second)]
    product(both, a, alone[0], None, experts_M=own)
    product(both[:8], b, alone[1], w.counts)
    return found | {"edown, two": [alone[0], first], "sdown, two": [alone[1], second]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    w, only = Weights(), set(filter(None, args.only.split(",")))
    found = [
        c for r in args.rows.split(",") for c in cases(w, int(r)) if not only or c.name in only
    ]

    def everything() -> None:
        for c in found:
            c.calls[0]()
        answers(w)

    print(compile_ahead(everything), "launches compiled", flush=True)
    for c in found:
        us = min(timed(c.run, 7, 1) for _ in range(2)) / len(c.calls)
        print(f"{c.name:16}{c.rows:5}{us:9.1f} us, floor {c.floor:.1f}", flush=True)
    torch.manual_seed(1)
    differing = [
        f"{what}, {len(y)} rows"
        for what, ys in answers(w).items()
        for y in ys[1:]
        if not torch.equal(y, ys[0][: len(y)])
    ]
    print("counters zero" if not w.counts.any() else "COUNTERS NOT ZERO")
    print("one answer" if not differing else f"DIFFERENT: {differing}", flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
