"""Gated delta rule on a GPU: short convolution, gates, the chunk form (model.md E.2).

Two kernels make a chunk of 64 rows. The first needs no state and runs for all chunks and heads at
once: it inverts the unit lower triangular system and keeps

    u = T (beta v),  w = T (beta k exp(decay)),  p = (q k^T) exp(decay_i - decay_j),  T = (1 + L)^-1.

The second walks the chunks of a head in order with a slice of the state in registers:

    v' = u - w S,   o = q exp(decay) S + p v',   S = S exp(decay_end) + (k exp(decay_end - decay))^T v'.

Rows that are not there are zeros, and a row reads rows before it only, so its bits do not depend on
how many rows follow (design.md section 2). T comes from forward substitution: the powers of L that a
doubling scheme needs overflow when keys repeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.ops import GDN_CHUNK
from civetta.kernels.residual.triton import sigmoid32

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = tl.constexpr(GDN_CHUNK)
STATE_COLS = 32
"""Columns of the state that one program carries."""


@triton.jit
def short_conv_kernel(u, history, w, y, C, J, u_stride, DILATION: tl.constexpr,
                      TAPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One row: taps from the oldest to the newest, then silu."""
    t = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < C
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TAPS):
        row = t + k * DILATION
        past = c < tl.where(row < J, C, 0)
        present = c < tl.where(row < J, 0, C)
        old = tl.load(history + row.to(tl.int64) * C + c, mask=past, other=0.0)
        new = tl.load(u + (row - J).to(tl.int64) * u_stride + c, mask=present, other=0.0)
        tap = tl.load(w + c * TAPS + k, mask=ok, other=0.0)
        total += (old.to(tl.float32) + new.to(tl.float32)) * tap
    b_y = total * sigmoid32(total)
    tl.store(y + t.to(tl.int64) * C + c, b_y.to(y.dtype.element_ty), mask=ok)


def short_conv(u_TC: Tensor, history_JC: Tensor, w_CK: Tensor, dilation: int) -> Tensor:
    """silu of a causal depthwise convolution over history and u; see `Ops.short_conv`."""
    u, history = u_TC.contiguous(), history_JC.contiguous()
    rows, channels = u.shape
    y = torch.empty_like(u)
    short_conv_kernel[(rows, -(-channels // 512))](
        u, history, w_CK.contiguous(), y, channels, history.shape[0], channels,
        DILATION=dilation, TAPS=w_CK.shape[1], BLOCK=512,
    )  # fmt: skip
    return y


@triton.jit
def gates_kernel(a, b, decay_scale, dt_bias, log_decay, beta, count, V, BLOCK: tl.constexpr):
    """decay_scale * softplus(a + dt_bias) and sigmoid(b)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < count
    head = i % V
    x = tl.load(a + i, mask=ok, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=ok, other=0.0)
    e = tl.exp(-tl.abs(x))
    # log(1 + e) loses a small e; its series does not
    small = e * (1.0 - e * (0.5 - e * (0.33333334 - 0.25 * e)))
    soft = tl.maximum(x, 0.0) + tl.where(e < 1e-2, small, tl.log(1.0 + e))
    tl.store(log_decay + i, tl.load(decay_scale + head, mask=ok, other=0.0) * soft, mask=ok)
    tl.store(beta + i, sigmoid32(tl.load(b + i, mask=ok, other=0.0).to(tl.float32)), mask=ok)


def gdn_gates(
    a_TV: Tensor, b_TV: Tensor, decay_scale_V: Tensor, dt_bias_V: Tensor
) -> tuple[Tensor, Tensor]:
    """Log decay and write strength of each head; see `Ops.gdn_gates`."""
    a, b = a_TV.contiguous(), b_TV.contiguous()
    log_decay = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    beta = torch.empty_like(log_decay)
    gates_kernel[(-(-a.numel() // 256),)](
        a, b, decay_scale_V, dt_bias_V, log_decay, beta, a.numel(), a.shape[1], BLOCK=256
    )
    return log_decay, beta


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@triton.jit
def prepare_kernel(q, k, v, log_decay, beta, u, w, p, decay, rows, H, V,
                   A: tl.constexpr, TILED: tl.constexpr):  # fmt: skip
    """One chunk of one value head: u, w [64, A], p [64, 64] and the running decay [64]."""
    i_c, i_v = tl.program_id(0), tl.program_id(1)
    if TILED:
        i_h = i_v % H
    else:
        i_h = i_v // (V // H)
    r = tl.arange(0, CHUNK)
    col = tl.arange(0, A)
    t = i_c * CHUNK + r
    ok = t < rows
    at_k = (t.to(tl.int64) * H + i_h)[:, None] * A + col[None, :]
    at_v = (t.to(tl.int64) * V + i_v)[:, None] * A + col[None, :]
    b_k = _unit(tl.load(k + at_k, mask=ok[:, None], other=0.0).to(tl.float32))
    b_q = _unit(tl.load(q + at_k, mask=ok[:, None], other=0.0).to(tl.float32)) * (A**-0.5)
    b_v = tl.load(v + at_v, mask=ok[:, None], other=0.0).to(tl.float32)
    b_beta = tl.load(beta + t * V + i_v, mask=ok, other=0.0)
    b_decay = tl.cumsum(tl.load(log_decay + t * V + i_v, mask=ok, other=0.0), axis=0)
    lower = r[:, None] >= r[None, :]
    pair = tl.exp(tl.where(lower, b_decay[:, None] - b_decay[None, :], float("-inf")))
    k_beta = b_k * b_beta[:, None]
    system = tl.dot(k_beta, b_k.trans(1, 0), input_precision="ieee") * pair
    system = tl.where(r[:, None] > r[None, :], system, 0.0)
    inverse = (r[:, None] == r[None, :]).to(tl.float32)
    for i in range(1, CHUNK):
        row = tl.sum(tl.where(r[:, None] == i, system, 0.0), axis=0)
        known = tl.sum(row[:, None] * inverse, axis=0)
        inverse -= tl.where(r[:, None] == i, known[None, :], 0.0)
    b_u = tl.dot(inverse, b_v * b_beta[:, None], input_precision="ieee")
    b_w = tl.dot(inverse, k_beta * tl.exp(b_decay)[:, None], input_precision="ieee")
    b_p = tl.dot(b_q, b_k.trans(1, 0), input_precision="ieee") * pair
    chunk = i_v.to(tl.int64) * tl.num_programs(0) + i_c
    at = (chunk * CHUNK + r)[:, None] * A + col[None, :]
    tl.store(u + at, b_u)
    tl.store(w + at, b_w)
    tl.store(p + (chunk * CHUNK + r)[:, None] * CHUNK + r[None, :], b_p)
    tl.store(decay + chunk * CHUNK + r, b_decay)


@triton.jit
def walk_kernel(q, k, u, w, p, decay, state, after, o, rows, first_new, fold, chunks, H, V,
                A: tl.constexpr, BV: tl.constexpr, TILED: tl.constexpr):  # fmt: skip
    """All chunks of BV columns of one value head's state, in order."""
    i_b, i_v = tl.program_id(0), tl.program_id(1)
    if TILED:
        i_h = i_v % H
    else:
        i_h = i_v // (V // H)
    r = tl.arange(0, CHUNK)
    col = tl.arange(0, A)
    part = i_b * BV + tl.arange(0, BV)
    at_state = (i_v.to(tl.int64) * A + col)[:, None] * A + part[None, :]
    b_state = tl.load(state + at_state)
    if fold == 0:
        tl.store(after + at_state, b_state)
    for i_c in range(chunks):
        chunk = i_v.to(tl.int64) * chunks + i_c
        at_row = (chunk * CHUNK + r)[:, None]
        t = i_c * CHUNK + r
        ok = t < rows
        at_k = (t.to(tl.int64) * H + i_h)[:, None] * A + col[None, :]
        b_k = _unit(tl.load(k + at_k, mask=ok[:, None], other=0.0).to(tl.float32))
        b_q = _unit(tl.load(q + at_k, mask=ok[:, None], other=0.0).to(tl.float32)) * (A**-0.5)
        b_decay = tl.load(decay + chunk * CHUNK + r)
        end = tl.load(decay + chunk * CHUNK + CHUNK - 1)
        b_w = tl.load(w + at_row * A + col[None, :])
        b_u = tl.load(u + at_row * A + part[None, :])
        b_v = b_u - tl.dot(b_w, b_state, input_precision="ieee")
        b_o = tl.dot(b_q * tl.exp(b_decay)[:, None], b_state, input_precision="ieee")
        b_p = tl.load(p + at_row * CHUNK + r[None, :])
        b_o += tl.dot(b_p, b_v, input_precision="ieee")
        p_o = o + ((t - first_new).to(tl.int64) * V + i_v)[:, None] * A + part[None, :]
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=(ok & (t >= first_new))[:, None])
        to_end = b_k * tl.exp(end - b_decay)[:, None]
        b_state = b_state * tl.exp(end)
        b_state += tl.dot(to_end.trans(1, 0), b_v, input_precision="ieee")
        if (i_c + 1) * CHUNK == fold:
            tl.store(after + at_state, b_state)


def gdn_chunks(
    q_THA: Tensor,
    k_THA: Tensor,
    v_TVA: Tensor,
    log_decay_TV: Tensor,
    beta_TV: Tensor,
    state_VAA: Tensor,
    tiled: bool,
    first_new: int,
    fold: int,
) -> tuple[Tensor, Tensor]:
    """Outputs of the new rows and the state after row `fold`; see `Ops.gdn_chunks`."""
    rows, value_heads, width = v_TVA.shape
    key_heads, chunks = k_THA.shape[1], -(-rows // GDN_CHUNK)
    device = v_TVA.device
    q, k, v = q_THA.contiguous(), k_THA.contiguous(), v_TVA.contiguous()
    u = torch.empty((value_heads, chunks, GDN_CHUNK, width), device=device)
    w = torch.empty_like(u)
    p = torch.empty((value_heads, chunks, GDN_CHUNK, GDN_CHUNK), device=device)
    decay = torch.empty((value_heads, chunks, GDN_CHUNK), device=device)
    prepare_kernel[(chunks, value_heads)](
        q, k, v, log_decay_TV.contiguous(), beta_TV.contiguous(), u, w, p, decay,
        rows, key_heads, value_heads, A=width, TILED=tiled, num_warps=8,
    )  # fmt: skip
    o = torch.empty((rows - first_new, value_heads, width), dtype=v.dtype, device=device)
    after = torch.empty_like(state_VAA)
    cols = min(STATE_COLS, width)
    walk_kernel[(width // cols, value_heads)](
        q, k, u, w, p, decay, state_VAA.contiguous(), after, o, rows, first_new, fold, chunks,
        key_heads, value_heads, A=width, BV=cols, TILED=tiled, num_warps=4,
    )  # fmt: skip
    return o, after


@triton.jit
def gdn_norm_kernel(o, z, gain, y, eps, A: tl.constexpr, BLOCK: tl.constexpr):
    """One head of one row: gain * rms(o) * sigmoid(z)."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    ok = c < A
    b_o = tl.load(o + i * A + c, mask=ok, other=0.0).to(tl.float32)
    b_z = tl.load(z + i * A + c, mask=ok, other=0.0).to(tl.float32)
    b_y = b_o * tl.rsqrt(tl.sum(b_o * b_o, axis=0) / A + eps)
    b_y = b_y * tl.load(gain + c, mask=ok, other=0.0) * sigmoid32(b_z)
    tl.store(y + i * A + c, b_y.to(y.dtype.element_ty), mask=ok)


def gdn_norm(o_TVA: Tensor, z_TVA: Tensor, gain_A: Tensor, eps: float) -> Tensor:
    """gain * rms(o) * sigmoid(z); see `Ops.gdn_norm`."""
    o, z = o_TVA.contiguous(), z_TVA.contiguous()
    rows, heads, width = o.shape
    y = torch.empty_like(o)
    gdn_norm_kernel[(rows * heads,)](
        o, z, gain_A, y, eps, A=width, BLOCK=triton.next_power_of_2(width), num_warps=1
    )
    return y
