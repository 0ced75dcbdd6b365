"""The n-gram layer over the sequences of a launch (model.md A.5): gate, norm, convolution, sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.fused.delta import push
from civetta.kernels.fused.launch import FIRST_ROW, POSITION, SESSION, STATE
from civetta.kernels.ple.triton import stream_gate
from civetta.kernels.residual.triton import sigmoid32

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.kernels.fused.launch import Batch


@triton.jit
def gate_kernel(x, rows_out, gain_query, gain_key, gain_conv, gated, normed, row_stride, eps, root,
                S: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One stream of one row: sigmoid(signed root of <key, query>) * value, and its norm."""
    t, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    ok = c < D
    at = (t * S + stream) * D + c
    b_x = tl.load(x + at, mask=ok, other=0.0)
    b_k = tl.load(rows_out + t * row_stride + stream * D + c, mask=ok, other=0.0)
    b_v = tl.load(rows_out + t * row_stride + S * D + c, mask=ok, other=0.0)
    b = stream_gate(b_x, b_k, gain_query, gain_key, stream * D + c, ok, eps, root, D) * b_v
    tl.store(gated + at, b, mask=ok)
    b = b * tl.rsqrt(tl.sum(b * b, axis=0) / D + eps)
    b *= tl.load(gain_conv + stream * D + c, mask=ok, other=0.0)
    tl.store(normed + at, b, mask=ok)


@triton.jit(do_not_specialize=["T", "B"])
def add_kernel(x, gated, normed, w, rows, sessions, T, B, C, RING_AT, DILATION: tl.constexpr,
               TAPS: tl.constexpr, RING: tl.constexpr, APPEND: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Some channels of one row: x += gated + silu(conv(normed)); APPEND keeps the row."""
    t = tl.program_id(0).to(tl.int64)
    b = tl.load(rows + SESSION * T + t)
    if b < 0:
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < C
    p = tl.load(rows + POSITION * T + t)
    first_row = tl.load(sessions + FIRST_ROW * B + b)
    address = tl.load(sessions + STATE * B + b) + RING_AT
    ring = address.to(tl.pointer_type(tl.float32))
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TAPS):
        back = (TAPS - 1 - k) * DILATION
        here = tl.where(ok, t - back - first_row, -1) >= 0
        earlier = tl.where(t - back < first_row, p - back, -1)
        then = tl.where(ok, earlier, -1) >= 0
        new = tl.load(normed + (t - back) * C + c, mask=here, other=0.0)
        slot = (p - back + RING) % RING
        old = tl.load(ring + slot * C + c, mask=then, other=0.0)
        total = tl.fma(new + old, tl.load(w + c * TAPS + k, mask=ok, other=0.0), total)
    total = total * sigmoid32(total)
    b_x = tl.load(x + t * C + c, mask=ok, other=0.0) + tl.load(
        gated + t * C + c, mask=ok, other=0.0
    )
    tl.store(x + t * C + c, b_x + total, mask=ok)
    if APPEND:
        row = tl.load(normed + t * C + c, mask=ok, other=0.0)
        tl.store(ring + (p % RING) * C + c, row, mask=ok)


def ngram_layer(
    batch: Batch,
    x_TSD: Tensor,
    projected: Tensor,
    gain_query: Tensor,
    gain_key: Tensor,
    gain_conv: Tensor,
    conv_WK: Tensor,
    eps: float,
    *,
    dilation: int,
    place: int,
    ring: int,
) -> None:
    """Add the n-gram values to the streams in place; keeps the convolution's history.

    projected float32 [T, S * D + D]: keys of every stream, then the value. place: byte offset of
    the history's ring in a session's state.
    """
    rows, streams, width = x_TSD.shape
    gated, normed = torch.empty_like(x_TSD), torch.empty_like(x_TSD)
    gate_kernel[(rows, streams)](
        x_TSD, projected, gain_query, gain_key, gain_conv, gated, normed, projected.stride(0), eps,
        width**0.5, S=streams, D=width, BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    channels = streams * width
    add_kernel[(rows, -(-channels // 512))](
        x_TSD, gated, normed, conv_WK, batch.rows_FT, batch.sessions_FB, rows, batch.sessions,
        channels, place, DILATION=dilation, TAPS=conv_WK.shape[1], RING=ring,
        APPEND=batch.in_place, BLOCK=512,
    )  # fmt: skip
    if not batch.in_place:
        push(batch, normed.view(rows, channels), place, ring)
