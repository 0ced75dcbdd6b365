"""The residual streams between two layers in three kernels (model.md A.6).

`enter` writes the last layer's output into the streams, norms them and begins the strengths of the
next write; a product squeezes them; `mix` makes the next layer's input. Nothing of [T, S, D] passes
through memory but the streams themselves and their norm in the operands' dtype.

Legend: T rows, S streams, D width, M expert slots a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.matmul.product import part_sum
from civetta.kernels.matmul.tiling import (
    FEW_ROWS,
    last_rows,
    precision,
    recipe_on,
    tile_rows_for,
    warps_without_copies,
)
from civetta.kernels.matmul.triton import planes_of, product
from civetta.kernels.packed import TILE
from civetta.kernels.residual.triton import sigmoid32

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.kernels.packed import PackedHyper

ENTER_ROWS = 8
"""Rows of a program of `enter` when rows are many."""

ENTER_WARPS = 4
"""Warps of a program of `enter`; fewer when a stream has fewer columns than these have threads."""

MIX_STAGES = 6
"""Steps of the short product of `mix` that are asked for at once when rows are few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A layer's output on its way into the streams.

    y float32 [T, D] or [T, M, D] with weights_TM; shared float32 [T, D] with its logit
    shared_mix [T] (strided), or None; inject float32 [T, S, S] as `enter` left it.
    """

    y: Tensor
    inject: Tensor
    weights_TM: Tensor | None = None
    shared: Tensor | None = None
    shared_mix: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """Streams' norm [T, S * D] in the operands' dtype, scales [T, S] float32 of the norm, and the
    strengths' partial sums [T, S, S] (row j: what stream j adds), None at the end."""

    normed: Tensor
    scale: Tensor
    inject: Tensor | None

    def rows(self, rows_N: Tensor) -> Entered:
        """Some rows, packed; for the end, where no strengths are needed."""
        return Entered(normed=self.normed[rows_N], scale=self.scale[rows_N], inject=None)


@triton.jit
def combine_kernel(y, weights, shared, shared_mix, out, mix_stride, D, M: tl.constexpr,
                   SHARED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One row: its experts' outputs in slot order, then the shared expert's."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = combined(y, weights, shared, shared_mix, t, c, c < D, mix_stride, D, M, SHARED)
    tl.store(out + t * D + c, b, mask=c < D)


@triton.jit
def combined(y, weights, shared, shared_mix, t, c, ok, mix_stride, D, M: tl.constexpr,
             SHARED: tl.constexpr):  # fmt: skip
    """Row t's layer output at columns c."""
    if M == 0:
        total = tl.load(y + t * D + c, mask=ok, other=0.0)
    else:
        total = tl.zeros(c.shape, dtype=tl.float32)
        for j in tl.static_range(M):
            b = tl.load(y + (t * M + j) * D + c, mask=ok, other=0.0)
            total = tl.fma(b, tl.load(weights + t * M + j) + tl.zeros(c.shape, tl.float32), total)
    if SHARED:
        strength = sigmoid32(tl.load(shared_mix + t * mix_stride))
        b = tl.load(shared + t * D + c, mask=ok, other=0.0)
        total = tl.fma(b, strength + tl.zeros(c.shape, tl.float32), total)
    return total


@triton.jit(do_not_specialize=["T"])
def enter_kernel(
    x, y, weights, shared, shared_mix, inject, gain, w_inject, normed, scale, inject_out,
    mix_stride, eps, T, D: tl.constexpr, S: tl.constexpr, M: tl.constexpr, SHARED: tl.constexpr,
    WRITE: tl.constexpr, INJECT: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One stream of ROWS rows: x += strength * y, its norm, its part of the next strengths.

    Gains and the strengths' weights are read once for all rows; LANES >= S is a power of two.
    x is read, written and used further, so no column may have two threads (`warps_without_copies`).
    The streams of a row run beside each other and read y once.
    """
    j = tl.program_id(0)
    i = tl.arange(0, LANES)
    # four columns a thread everywhere: 16-bit stores would want eight, and rows move between threads
    c = tl.max_contiguous(tl.arange(0, BLOCK), 4)
    ok = c < D
    b_gain = tl.load(gain + j * D + c, mask=ok, other=0.0)
    w = b_gain[None, :]
    if INJECT:
        w = tl.load(w_inject + (i[:, None] * S + j) * D + c[None, :],
                    mask=(i < S)[:, None] & ok[None, :], other=0.0)  # fmt: skip
    first = tl.program_id(1).to(tl.int64) * ROWS
    for t in range(first, tl.minimum(first + ROWS, T)):
        at = (t * S + j) * D
        b_x = tl.load(x + at + c, mask=ok, other=0.0)
        if WRITE:
            raw = 0.0
            for n in tl.static_range(S):
                raw += tl.load(inject + (t * S + n) * S + j)
            strength = 2.0 * sigmoid32(raw / S)
            b_y = combined(y, weights, shared, shared_mix, t, c, ok, mix_stride, D, M, SHARED)
            b_x = tl.fma(b_y, strength + tl.zeros(c.shape, tl.float32), b_x)
            tl.store(x + at + c, b_x, mask=ok)
        b_scale = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / D + eps)
        b_n = b_x * b_scale * b_gain
        tl.store(normed + at + c, b_n.to(normed.dtype.element_ty), mask=ok)
        tl.store(scale + t * S + j, b_scale)
        if INJECT:
            tl.store(inject_out + (t * S + j) * S + i, tl.sum(b_n[None, :] * w, axis=1), mask=i < S)


def enter(
    x_TSD: Tensor, w: PackedHyper, eps: float, dtype: torch.dtype, written: Written | None
) -> Entered:
    """Write a layer's output into x in place, and norm the streams for the site `w`."""
    rows, streams, width = x_TSD.shape
    device = x_TSD.device
    normed = torch.empty((rows, streams * width), dtype=dtype, device=device)
    scale = torch.empty((rows, streams), dtype=torch.float32, device=device)
    inject = None
    if w.inject is not None:
        inject = torch.empty((rows, streams, streams), dtype=torch.float32, device=device)
    y, weights, shared, mix, mix_stride, slots = x_TSD, x_TSD, x_TSD, x_TSD, 0, 0
    if written is not None:
        y = written.y
        if written.weights_TM is not None:
            weights, slots = written.weights_TM, written.weights_TM.shape[1]
        if written.shared is not None and written.shared_mix is not None:
            shared, mix = written.shared, written.shared_mix
            mix_stride = mix.stride(0)
    each = 1 if rows <= FEW_ROWS else ENTER_ROWS
    block = triton.next_power_of_2(width)
    enter_kernel[(streams, -(-rows // each))](
        x_TSD, y, weights, shared, mix, x_TSD if written is None else written.inject,
        w.gain_SD, x_TSD if w.inject is None else w.inject, normed, scale,
        scale if inject is None else inject, mix_stride, eps, rows, D=width, S=streams, M=slots,
        SHARED=written is not None and written.shared is not None, WRITE=written is not None,
        INJECT=inject is not None, BLOCK=block, LANES=triton.next_power_of_2(streams), ROWS=each,
        num_warps=warps_without_copies(block, ENTER_WARPS),
    )  # fmt: skip
    return Entered(normed=normed, scale=scale, inject=inject)


def settle(written: Written) -> Written:
    """The same output with experts and shared expert added up once; worth it for many rows."""
    if written.weights_TM is None:
        return written
    rows, slots, width = written.y.shape
    y_TD = torch.empty((rows, width), dtype=torch.float32, device=written.y.device)
    block = min(1024, triton.next_power_of_2(width))
    shared, mix = written.shared, written.shared_mix
    combine_kernel[(rows, -(-width // block))](
        written.y, written.weights_TM, y_TD if shared is None else shared,
        y_TD if mix is None else mix, y_TD, 0 if mix is None else mix.stride(0), width,
        M=slots, SHARED=shared is not None, BLOCK=block,
    )  # fmt: skip
    return Written(y=y_TD, inject=written.inject)


@triton.jit
def _normed(x, scale, gain, at, t, j, c, ok_t, ok_c, D, S: tl.constexpr):
    """What makes the norm of stream j: x [C, T], scales [T], gains [C]."""
    b_x = tl.load(x + at, mask=ok_c[:, None] & ok_t[None, :], other=0.0)
    b_scale = tl.load(scale + t * S + j, mask=ok_t, other=0.0)
    return b_x, b_scale, tl.load(gain + j * D + c, mask=ok_c, other=0.0)


@triton.jit(do_not_specialize=["T"])
def mix_kernel(
    m, x, scale, gain, h, parts, counters, codes, high, step, minimum, d, dmin, table, T, D,
    K: tl.constexpr, S: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, KP: tl.constexpr,
    BITS: tl.constexpr, CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, SPAN: tl.constexpr, LOW: tl.constexpr, PRECISE: tl.constexpr,
    STEPS: tl.constexpr, SPLIT: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """Mean over streams, in order, of sigmoid(up m) * norm: one tile of columns and rows.

    SPLIT: a program takes one stream, and the last to finish adds them for the tile's LAST rows, which
    are all there are.
    """
    i_n = tl.program_id(0)
    c = i_n * 64 + tl.arange(0, 64)
    t = tl.program_id(1) * BM + tl.arange(0, BM)
    ok_c, ok_t = c < D, t < T
    i_m = t.to(tl.int64) * K
    mask = ok_c[:, None] & ok_t[None, :]
    zero = tl.zeros((64, BM), dtype=tl.float32)
    total = zero
    first, last = 0, S
    if SPLIT:
        first = tl.program_id(2)
        last = first + 1
    for j in range(first, last):
        tile = (j * TILES + i_n).to(tl.int64)
        at = (t.to(tl.int64) * S + j)[None, :] * D + c[:, None]
        if SPLIT:  # asked for before the product; many rows have no registers for it
            b_x, b_scale, b_gain = _normed(x, scale, gain, at, t, j, c, ok_t, ok_c, D, S)
            gate = part_sum(
                m, i_m, codes, high, step, minimum, d, dmin, table, tile, 0, K, 1, ok_t, K, 1, BM,
                KP, BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW, PRECISE, False, STEPS,
            )  # fmt: skip
        else:
            gate = part_sum(
                m, i_m, codes, high, step, minimum, d, dmin, table, tile, 0, K, 1, ok_t, K, 1, BM,
                KP, BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW, PRECISE, False, STEPS,
            )  # fmt: skip
            b_x, b_scale, b_gain = _normed(x, scale, gain, at, t, j, c, ok_t, ok_c, D, S)
        # the product is rounded by itself, also where it is added at once
        total += tl.fma(sigmoid32(gate), b_x * b_scale[None, :] * b_gain[:, None], zero)
    own = t.to(tl.int64)[None, :] * D + c[:, None]
    if SPLIT:
        tl.store(parts + tl.program_id(2).to(tl.int64) * T * D + own, total, mask=mask)
        tl.debug_barrier()
        counter = tl.program_id(1) * tl.num_programs(0) + i_n
        done = tl.atomic_add(counters + counter, 1)
        if done < S - 1:
            return
        tl.store(counters + counter, 0)
        t = tl.program_id(1) * BM + tl.arange(0, LAST)
        mask = ok_c[:, None] & (t < T)[None, :]
        own = t.to(tl.int64)[None, :] * D + c[:, None]
        total = tl.zeros((64, LAST), dtype=tl.float32)
        p_part = parts + own
        for _ in tl.static_range(S):
            total += tl.load(p_part, mask=mask, other=0.0, cache_modifier=".cg")
            p_part += T * D
    tl.store(h + own, (total / S).to(h.dtype.element_ty), mask=mask)


def mix(x_TSD: Tensor, entered: Entered, w: PackedHyper, counts: Tensor) -> Tensor:
    """The next layer's input [T, D] in the norm's dtype; w.up holds a matrix a stream."""
    rows, streams, width = x_TSD.shape
    rank, dtype, device = w.down.rows, entered.normed.dtype, x_TSD.device
    m_TR = torch.empty((rows, rank), dtype=dtype, device=device)
    product(entered.normed, w.down, m_TR, counts, act="squeeze", act_divisor=float(streams))
    h_TD = torch.empty((rows, width), dtype=dtype, device=device)
    tile_m = min(64, tile_rows_for(rows))
    split = rows <= FEW_ROWS
    parts = h_TD
    if split:
        parts = torch.empty((streams, rows, width), dtype=torch.float32, device=device)
    r, exact = recipe_on(w.up.recipe, device, dtype), precision(dtype, device)
    assert w.up.experts == streams
    assert w.up.rows == width
    grid = (-(-width // TILE), -(-rows // tile_m), streams if split else 1)
    mix_kernel[grid](
        m_TR, x_TSD, entered.scale, w.gain_SD, h_TD, parts, counts,
        *planes_of(w.up, m_TR), rows, width, K=rank, S=streams, TILES=w.up.tiles, BM=tile_m,
        KP=w.up.padded_cols, BITS=r.bits, CODE=r.code, OFFSET=r.offset, GROUP=r.group,
        SCALE=r.scale, SPAN=r.span, LOW=r.low, PRECISE=exact, STEPS=1, SPLIT=split,
        LAST=last_rows(rows, tile_m), num_warps=4,
        num_stages=MIX_STAGES if split else 1,
    )  # fmt: skip
    return h_TD
