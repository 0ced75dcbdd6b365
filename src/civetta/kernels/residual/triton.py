"""Norms, rotary positions and hyper-connections on a GPU (model.md A.6, E.1).

One program a row: every sum runs over one row in one order, whatever the launch holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.matmul.triton import matmul

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.kernels.packed import PackedHyper


@triton.jit
def sigmoid32(x):
    """1 / (1 + exp(-x)), float32; below -80 it is 0 to float32's eye and exp must not overflow."""
    return 1.0 / (1.0 + tl.exp(tl.minimum(-x, 80.0)))


@triton.jit
def rms_norm_kernel(x, gain, y, y32, eps, groups, x_stride,
                    A: tl.constexpr, BLOCK: tl.constexpr, BOTH: tl.constexpr):  # fmt: skip
    """One row of A values, gain row i % groups; BOTH also keeps the float32 result."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    ok = c < A
    b_x = tl.load(x + i * x_stride + c, mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / A + eps)
    b_y = b_x * scale * tl.load(gain + (i % groups) * A + c, mask=ok, other=0.0)
    tl.store(y + i * A + c, b_y.to(y.dtype.element_ty), mask=ok)
    if BOTH:
        tl.store(y32 + i * A + c, b_y, mask=ok)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / rms(x) * gain over the last dimension, float32 inside, x's dtype out; see `Ops`."""
    x = _rows_of(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, gain, eps, y, None)
    return y


def _norm(x: Tensor, gain: Tensor, eps: float, y: Tensor, y32: Tensor | None) -> None:
    width = x.shape[-1]
    groups = gain.numel() // width
    rms_norm_kernel[(x.numel() // width,)](
        x, gain, y, y if y32 is None else y32, eps, groups, width,
        A=width, BLOCK=triton.next_power_of_2(width), BOTH=y32 is not None,
        num_warps=4 if width <= 1024 else 8,
    )  # fmt: skip


def _rows_of(x: Tensor) -> Tensor:
    return x.contiguous()


@triton.jit
def rope_kernel(x, cos, sin, y, heads, A: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """One head of one token: columns i and i + HALF rotated, the rest copied."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    ok = c < A
    turned = c < 2 * HALF
    angle = (i // heads) * HALF + c % HALF
    b_cos = tl.load(cos + angle, mask=turned, other=1.0)
    b_sin = tl.load(sin + angle, mask=turned, other=0.0)
    partner = tl.where(c < HALF, c + HALF, c - HALF)
    b_x = tl.load(x + i * A + c, mask=ok, other=0.0).to(tl.float32)
    b_p = tl.load(x + i * A + partner, mask=turned, other=0.0).to(tl.float32)
    b_y = b_x * b_cos + tl.where(c < HALF, -b_p, b_p) * b_sin
    tl.store(y + i * A + c, tl.where(turned, b_y, b_x).to(y.dtype.element_ty), mask=ok)


def rope(x_THA: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first 2R columns, pairing column i with i + R; see `Ops.rope`."""
    x = _rows_of(x_THA)
    rows, heads, width = x.shape
    y = torch.empty_like(x)
    rope_kernel[(rows * heads,)](
        x, cos_TR.contiguous(), sin_TR.contiguous(), y, heads,
        A=width, HALF=cos_TR.shape[-1], BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return y


@triton.jit
def squeeze_kernel(x, y, count, divisor, BLOCK: tl.constexpr):
    """silu(x / divisor)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < count
    b = tl.load(x + i, mask=ok, other=0.0) / divisor
    tl.store(y + i, (b * sigmoid32(b)).to(y.dtype.element_ty), mask=ok)


@triton.jit
def mix_kernel(normed, gate, y, D, S: tl.constexpr, BLOCK: tl.constexpr):
    """Mean over streams of sigmoid(gate) * normed, streams in order."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < D
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(S):
        at = (t * S + j) * D + c
        b_gate = tl.load(gate + at, mask=ok, other=0.0)
        total += sigmoid32(b_gate) * tl.load(normed + at, mask=ok, other=0.0)
    tl.store(y + t * D + c, (total / S).to(y.dtype.element_ty), mask=ok)


@triton.jit
def inject_kernel(normed, w, y, D, S: tl.constexpr, BLOCK: tl.constexpr):
    """2 * sigmoid(w normed / S): one strength of one token, stream after stream."""
    t, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    ok = c < D
    raw = 0.0
    for j in tl.static_range(S):
        b = tl.load(normed + (t * S + j) * D + c, mask=ok, other=0.0)
        raw += tl.sum(b * tl.load(w + (i * S + j) * D + c, mask=ok, other=0.0), axis=0)
    tl.store(y + t * S + i, 2.0 * sigmoid32(raw / S))


def hyper_read(
    x_TSD: Tensor, w: PackedHyper, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Mix the streams into one row and say how strongly to write back; see `Ops.hyper_read`."""
    x = _rows_of(x_TSD)
    rows, streams, width = x.shape
    device = x.device
    normed32 = torch.empty((rows, streams * width), dtype=torch.float32, device=device)
    normed = normed32 if dtype == torch.float32 else torch.empty_like(normed32, dtype=dtype)
    _norm(x, w.gain_SD, eps, normed, None if normed is normed32 else normed32)
    down = matmul(normed, w.down, torch.float32)
    mix = torch.empty(down.shape, dtype=dtype, device=device)
    squeeze_kernel[(-(-down.numel() // 1024),)](down, mix, down.numel(), streams, BLOCK=1024)
    gate = matmul(mix, w.up, torch.float32)
    h_TD = torch.empty((rows, width), dtype=dtype, device=device)
    mix_kernel[(rows, -(-width // 1024))](
        normed32, gate, h_TD, width, S=streams, BLOCK=min(1024, triton.next_power_of_2(width))
    )
    if w.inject is None:
        return h_TD, None
    inject_TS = torch.empty((rows, streams), dtype=torch.float32, device=device)
    inject_kernel[(rows, streams)](
        normed32, w.inject, inject_TS, width, S=streams, BLOCK=triton.next_power_of_2(width)
    )
    return h_TD, inject_TS


@triton.jit
def hyper_write_kernel(x, y, inject, out, D, S: tl.constexpr, BLOCK: tl.constexpr):
    """x + inject * y for every stream of one token."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < D
    b_y = tl.load(y + t * D + c, mask=ok, other=0.0).to(tl.float32)
    for j in tl.static_range(S):
        at = (t * S + j) * D + c
        b_x = tl.load(x + at, mask=ok, other=0.0) + tl.load(inject + t * S + j) * b_y
        tl.store(out + at, b_x, mask=ok)


def hyper_write(x_TSD: Tensor, y_TD: Tensor, inject_TS: Tensor) -> Tensor:
    """Add the layer's output to every stream with its own strength; see `Ops.hyper_write`."""
    rows, streams, width = x_TSD.shape
    x, out = _rows_of(x_TSD), torch.empty_like(x_TSD, memory_format=torch.contiguous_format)
    block = min(1024, triton.next_power_of_2(width))
    hyper_write_kernel[(rows, -(-width // block))](
        x, y_TD.contiguous(), inject_TS.contiguous(), out, width, S=streams, BLOCK=block
    )
    return out


@triton.jit
def swiglu_kernel(gate, up, y, count, BLOCK: tl.constexpr):
    """silu(gate) * up, float32 inside."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = i < count
    b_gate = tl.load(gate + i, mask=ok, other=0.0).to(tl.float32)
    b_up = tl.load(up + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + i, (b_gate * sigmoid32(b_gate) * b_up).to(y.dtype.element_ty), mask=ok)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in float32, gate's dtype out."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    swiglu_kernel[(-(-gate.numel() // 1024),)](gate, up, y, gate.numel(), BLOCK=1024)
    return y
