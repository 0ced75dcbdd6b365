"""Time of every Triton op at the real model's shapes, beside its floor.

    python benchmarks/kernels/gpu_ops.py [--rows 1,8,4096] [--save FILE.json]

Prints median microseconds, the bytes and FLOP an op cannot avoid, and the share of the card's
measured copy bandwidth or matrix rate that they come to. Needs a GPU; random weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kernels"))

from triton_inputs import Random

from civetta.kernels.gdn import triton as gdn
from civetta.kernels.matmul.triton import matmul
from civetta.kernels.moe import triton as moe
from civetta.kernels.packed import PackedExperts, PackedHyper, PackedWeight, pack, pack_stack
from civetta.kernels.qsa import triton as qsa
from civetta.kernels.residual import triton as residual

BF16, F32 = torch.bfloat16, torch.float32
D, STREAMS, RANK = 2560, 4, 320
EXPERTS, SLOTS, WIDTH = 512, 10, 640


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    run: Callable[[], object]
    nbytes: float
    flop: float


def timed(run: Callable[[], object], repeats: int = 9, calls: int = 4) -> float:
    """Median microseconds a call, from replays of a captured graph of `calls` calls."""
    for _ in range(2):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    times = []
    for _ in range(repeats + 1):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / calls)
    return sorted(times[1:])[repeats // 2]


def weight(fmt: str, n: int, k: int, seed: int) -> PackedWeight:
    if fmt == "BF16":
        return pack(Random(seed).normal(n, k, dtype=BF16), BF16, "cuda")
    return pack(Random(seed).stored(fmt, n, k), BF16, "cuda")


def experts(fmt: str, n: int, k: int, seed: int) -> PackedWeight:
    one = [Random(seed + i).stored(fmt, n, k) for i in range(4)]
    return pack_stack([one[i % 4] for i in range(EXPERTS)], BF16, "cuda")


def product_cases(rows: int) -> list[Case]:
    cases = []
    for fmt, n, k in (
        ("Q8_0", 16384, D),
        ("Q8_0", D, 6144),
        ("Q4_K", 16384, D),
        ("Q6_K", 16384, D),
        ("BF16", 16384, D),
        ("Q8_0", RANK, STREAMS * D),
        ("Q8_0", STREAMS * D, RANK),
    ):
        w = weight(fmt, n, k, 1)
        x = torch.randn(rows, k, device="cuda", dtype=BF16)
        cases.append(
            Case(
                name=f"matmul {fmt} [{rows},{k}]x[{k},{n}]",
                run=lambda x=x, w=w: matmul(x, w, BF16),
                nbytes=w.nbytes + 2 * rows * (n + k),
                flop=2.0 * rows * n * k,
            )
        )
    return cases


def mixture_cases(rows: int) -> list[Case]:
    w = PackedExperts(
        gate=experts("Q4_K", WIDTH, D, 10),
        up=experts("Q4_K", WIDTH, D, 20),
        down=experts("Q5_0", D, WIDTH, 30),
    )
    h = torch.randn(rows, D, device="cuda", dtype=BF16)
    logits = torch.randn(rows, EXPERTS, device="cuda")
    ids, weights = moe.route(logits, SLOTS)
    used = len(ids.unique())
    share = used / EXPERTS
    nbytes = share * (w.gate.nbytes + w.up.nbytes + w.down.nbytes) + 6 * rows * D
    return [
        Case(
            name=f"route [{rows},{EXPERTS}]",
            run=lambda: moe.route(logits, SLOTS),
            nbytes=4.0 * rows * EXPERTS,
            flop=0,
        ),
        Case(
            name=f"experts [{rows}] {used} used",
            run=lambda: moe.experts(h, ids, weights, w),
            nbytes=nbytes,
            flop=6.0 * rows * SLOTS * D * WIDTH,
        ),
    ]


def stream_cases(rows: int) -> list[Case]:
    w = PackedHyper(
        gain_SD=torch.randn(STREAMS, D, device="cuda"),
        down=weight("Q8_0", RANK, STREAMS * D, 2),
        up=weight("Q8_0", STREAMS * D, RANK, 3),
        inject=pack(torch.randn(STREAMS, STREAMS * D), F32, "cuda"),
    )
    x = torch.randn(rows, STREAMS, D, device="cuda")
    y, inject = torch.randn(rows, D, device="cuda"), torch.rand(rows, STREAMS, device="cuda")
    wide = 4.0 * rows * STREAMS * D
    return [
        Case(
            name=f"hyper_read [{rows}]",
            run=lambda: residual.hyper_read(x, w, 1e-6, BF16),
            nbytes=w.down.nbytes + w.up.nbytes + wide,
            flop=4.0 * rows * STREAMS * D * RANK,
        ),
        Case(
            name=f"hyper_write [{rows}]",
            run=lambda: residual.hyper_write(x, y, inject),
            nbytes=2 * wide,
            flop=0,
        ),
    ]


def delta_cases(rows: int) -> list[Case]:
    opened = 40 if rows < 64 else 0
    total = opened + rows
    q, k = (torch.randn(total, 16, 128, device="cuda", dtype=BF16) for _ in range(2))
    v = torch.randn(total, 48, 128, device="cuda", dtype=BF16)
    decay, beta = -torch.rand(total, 48, device="cuda"), torch.rand(total, 48, device="cuda")
    state = torch.randn(48, 128, 128, device="cuda")
    return [
        Case(
            name=f"gdn_chunks [{rows}]",
            run=lambda: gdn.gdn_chunks(q, k, v, decay, beta, state, True, opened, total // 64 * 64),
            nbytes=48 * 128 * 128 * 4 + total * 128 * 2.0 * 112,
            flop=48.0 * -(-total // 64) * (6 * 64 * 128 * 128 + 6 * 64 * 64 * 128),
        )
    ]


def attention_cases(rows: int) -> list[Case]:
    cases = []
    for depth in (4096, 131072):
        pages = -(-(depth + rows) // 64)
        k, v = (torch.randn(pages, 64, 2, 256, device="cuda", dtype=BF16) for _ in range(2))
        table = torch.randperm(pages, device="cuda")
        keys = torch.randn(pages, 16, 128, device="cuda", dtype=BF16)
        q = torch.randn(rows, 24, 256, device="cuda", dtype=BF16)
        iq = torch.randn(rows, 4, 128, device="cuda", dtype=BF16)
        blocks = (torch.arange(rows, device="cuda") + depth + 1) // 4
        kept = qsa.index_select(iq, keys, table, blocks, 512)
        tokens = (kept[:, :, None] * 4 + torch.arange(4, device="cuda")).flatten(1)
        tokens = torch.nn.functional.pad(tokens, (0, 3), value=-1)
        cases += [
            Case(
                name=f"index_select [{rows}] depth {depth}",
                run=lambda iq=iq, keys=keys, t=table, b=blocks: qsa.index_select(
                    iq, keys, t, b, 512
                ),
                nbytes=256.0 * depth / 4,
                flop=2.0 * rows * 4 * 128 * depth / 4,
            ),
            Case(
                name=f"attend_sparse [{rows}] depth {depth}",
                run=lambda q=q, k=k, v=v, t=table, s=tokens: qsa.attend_sparse(q, k, v, t, s),
                nbytes=2048.0 * min(depth + rows, 2048 * rows),
                flop=4.0 * rows * 24 * 256 * 2051,
            ),
        ]
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,4096")
    parser.add_argument("--save")
    args = parser.parse_args()
    big = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(big)
    copied = timed(lambda: copy.copy_(big))
    square = torch.randn(8192, 8192, device="cuda", dtype=BF16)
    out = torch.empty_like(square)
    product = timed(lambda: torch.matmul(square, square, out=out))
    bytes_us, flop_us = 2 * big.numel() / copied, 2 * 8192**3 / product
    print(f"copy {bytes_us / 1e6:.2f} TB/s, bf16 {flop_us / 1e6:.0f} TFLOP/s")
    results = []
    for rows in map(int, args.rows.split(",")):
        for make in (product_cases, mixture_cases, stream_cases, delta_cases, attention_cases):
            for case in make(rows):
                us = timed(case.run)
                floor = max(case.nbytes / bytes_us, case.flop / flop_us)
                print(f"{case.name:48} {us:10.1f} us  floor {floor:8.1f}  {floor / us:6.1%}")
                results.append({"name": case.name, "us": us, "floor_us": floor})
    if args.save:
        Path(args.save).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
