"""Compiled CPU products against torch, interleaved (A B A B ...), medians.

    python benchmarks/kernels/matmul_cpu.py [--threads 2] [--seconds 1.0] [--only decode]

Columns: time and rate of torch.nn.functional.linear with float32 weights of the same shape, time
and rate of civetta with the stored format, and how many times faster civetta is. GB/s counts the
stored bytes of the weights.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from civetta.checkpoint import formats
from civetta.checkpoint.quant import QuantTensor, Weight
from civetta.kernels import cpu
from civetta.kernels.ops import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Callable

HALF_FIELDS = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    **dict.fromkeys(("IQ1_M", "MXFP4", "GGML_NVFP4"), ()),
}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FORMATS = (
    *PLAIN,
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    *("Q2_K", "Q3_K", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"),
    *("TQ1_0", "TQ2_0", "MXFP4", "GGML_NVFP4", "F8_E4M3", "NVFP4"),
)
LARGE, MIDDLE, SMALL = (10240, 2560), (2560, 2560), (256, 640)


def weight(name: str, rows: int, cols: int) -> Weight:
    """Random numbers in a format; the values do not matter, only that they are finite."""
    if name in PLAIN:
        return torch.randn(rows, cols).to(PLAIN[name])
    fmt = formats.by_name(name)
    assert fmt is not None
    data = np.random.default_rng(0).integers(0, 120, (rows, fmt.row_bytes(cols)), dtype=np.uint8)
    if name in {"F8_E4M3", "NVFP4"}:
        shape = (-(-rows // 128), -(-cols // 128)) if name == "F8_E4M3" else (rows, cols // 16)
        scale = torch.ones(shape) if name == "F8_E4M3" else torch.full(shape, 56).byte()
        return QuantTensor(format=fmt, data_RB=torch.from_numpy(data), cols=cols, scale=scale)
    blocks = data.reshape(-1, fmt.block_bytes)
    for place in HALF_FIELDS.get(name, (0,)):
        blocks[:, place : place + 2] = np.float16(0.01).reshape(1).view(np.uint8)
    return QuantTensor(format=fmt, data_RB=torch.from_numpy(data), cols=cols)


def interleave(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """Median seconds of each call, run in turn."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for call, kept in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            kept.append(time.perf_counter() - begin)
    return [statistics.median(kept) for kept in times]


def compare(
    products: cpu.CpuProducts, name: str, rows: int, shape: tuple[int, int], seconds: float
) -> None:
    n, k = shape
    x, plain = torch.randn(rows, k), torch.randn(n, k)
    w = plain if name == "F32" else weight(name, n, k)
    theirs, ours = interleave(
        [
            lambda: torch.nn.functional.linear(x, plain),
            lambda: products.matmul(x, w, torch.float32),
        ],
        seconds,
    )
    flop = 2e-9 * rows * n * k
    stored = w.nbytes
    print(
        f"{name:8} T {rows:5} {n:6}x{k:<6} torch {theirs * 1e6:10.1f} us {flop / theirs:6.1f} GF/s"
        f" | civetta {ours * 1e6:10.1f} us {flop / ours:6.1f} GF/s {stored / ours / 1e9:6.1f} GB/s"
        f" | {theirs / ours:5.2f} x",
        flush=True,
    )


def decode(products: cpu.CpuProducts, seconds: float) -> None:
    for shape in (LARGE, SMALL):
        for name in FORMATS:
            fmt = formats.by_name(name)
            assert fmt is not None
            if shape[1] % fmt.block_values == 0:
                compare(products, name, 1, shape, seconds)


def drafts(products: cpu.CpuProducts, seconds: float) -> None:
    for name in ("F32", "BF16", "Q8_0", "Q4_K"):
        for rows in (1, 2, 3, 4, 6, 8, 12, 16):
            compare(products, name, rows, MIDDLE, seconds)


def prefill(products: cpu.CpuProducts, seconds: float) -> None:
    for name in ("F32", "BF16", "Q8_0", "Q4_K"):
        for rows, shape in ((64, MIDDLE), (512, MIDDLE), (2048, MIDDLE), (2048, (640, 2560))):
            compare(products, name, rows, shape, seconds)


def experts(products: cpu.CpuProducts, seconds: float) -> None:
    """One layer of the real widths with fewer experts; no torch counterpart."""
    count, width, hidden, slots = 32, 2560, 640, 10
    w = ExpertWeights(
        gate=tuple(weight("Q4_K", hidden, width) for _ in range(count)),
        up=tuple(weight("Q4_K", hidden, width) for _ in range(count)),
        down=tuple(weight("Q5_1", width, hidden) for _ in range(count)),
    )
    for rows in (1, 4, 8, 64, 512):
        h = torch.randn(rows, width)
        ids = torch.stack([torch.randperm(count)[:slots] for _ in range(rows)])
        mix = torch.rand(rows, slots)
        call = lambda h=h, ids=ids, mix=mix: products.experts(h, ids, mix, w)  # noqa: E731
        (ours,) = interleave([call], seconds)
        flop = 6e-9 * rows * slots * width * hidden
        print(f"experts  T {rows:5} {ours * 1e6:10.1f} us {flop / ours:6.1f} GF/s", flush=True)


PARTS = {"decode": decode, "drafts": drafts, "prefill": prefill, "experts": experts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=1.0, help="a comparison")
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    products = cpu.CpuProducts(options.threads)
    print(f"{cpu.instructions()}, {options.threads} threads, torch {torch.__version__}")
    for name, part in PARTS.items():
        if options.only in {None, name}:
            part(products, options.seconds)


if __name__ == "__main__":
    main()
