"""The delta rule's chunks in float32, for few rows and many: what chunks.py does, in an older form.

A tiny checkpoint's float32 was wrong on an H200 (Triton 3.6) after chunks.py had changed, and right
with this form (docs/measurements/h200.md tells what is known of it).
"""

from __future__ import annotations

import triton
import triton.language as tl

from civetta.kernels.fused.chunks import CHUNK, unit
from civetta.kernels.fused.launch import BASE, FIRST, FIRST_ROW, NEW_BASE, ROWS, STATE


@triton.jit
def _inverse(system, r, EXACT: tl.constexpr):
    """(1 + system)^-1 for a strictly lower triangular [64, 64]: blocks of 16, then of 64."""
    i = tl.arange(0, 16)
    own = (tl.arange(0, 4)[:, None] == tl.arange(0, 4)[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(own, tl.reshape(system, (4, 16, 4, 16)), 0.0), axis=2)
    row, col = i[None, :, None], i[None, None, :]
    small = (row == col).to(tl.float32) - tl.where(row // 2 == col // 2, blocks, 0.0)
    for doubling in tl.static_range(3):
        s = 2 << doubling
        couples = tl.where((row // (2 * s) == col // (2 * s)) & (row // s != col // s), blocks, 0.0)
        small -= tl.dot(tl.dot(small, couples, input_precision=EXACT), small, input_precision=EXACT)
    inverse = tl.reshape(tl.where(own, small[:, :, None, :], 0.0), (64, 64))
    for doubling in tl.static_range(2):
        s = 16 << doubling
        same = (r[:, None] // (2 * s)) == (r[None, :] // (2 * s))
        couples = tl.where(same & ((r[:, None] // s) != (r[None, :] // s)), system, 0.0)
        inner = tl.dot(inverse, couples, input_precision=EXACT)
        inverse -= tl.dot(inner, inverse, input_precision=EXACT)
    return inverse


@triton.jit(do_not_specialize=["B"])
def prepare_float32_kernel(
    mixed, log_decay, beta, u, w, p, decay, sessions, B, K_AT, V_AT, DECAY_AT, BETA_AT,
    H: tl.constexpr, V: tl.constexpr, A: tl.constexpr, TILED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: u, w [64, A], p [64, 64] and the running decay [64]."""
    C: tl.constexpr = (2 * H + V) * A
    i_c, i_v, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = tl.load(sessions + BASE * B + b)
    opened = tl.load(sessions + FIRST * B + b) - base
    total = opened + tl.load(sessions + ROWS * B + b)
    if i_c * CHUNK >= total:
        return
    i_h = i_v % H if TILED else i_v // (V // H)
    state = tl.load(sessions + STATE * B + b)
    r = tl.arange(0, CHUNK)
    a = tl.arange(0, A)
    i = i_c * CHUNK + r
    old, new = i < opened, (i >= opened) & (i < total)
    place = base % (2 * CHUNK) + i
    t = tl.load(sessions + FIRST_ROW * B + b) + i - opened
    p_k = (state + K_AT).to(tl.pointer_type(mixed.dtype.element_ty))
    p_v = (state + V_AT).to(tl.pointer_type(mixed.dtype.element_ty))
    p_decay = (state + DECAY_AT).to(tl.pointer_type(tl.float32))
    p_beta = (state + BETA_AT).to(tl.pointer_type(tl.float32))
    row = t[:, None] * C + a[None, :]
    b_k = tl.load(p_k + (place * H + i_h)[:, None] * A + a[None, :], mask=old[:, None], other=0.0)
    b_k += tl.load(mixed + row + (H + i_h) * A, mask=new[:, None], other=0.0)
    b_v = tl.load(p_v + (place * V + i_v)[:, None] * A + a[None, :], mask=old[:, None], other=0.0)
    b_v += tl.load(mixed + row + (2 * H + i_v) * A, mask=new[:, None], other=0.0)
    b_q = tl.load(mixed + row + i_h * A, mask=new[:, None], other=0.0)
    b_g = tl.load(p_decay + place * V + i_v, mask=old, other=0.0)
    b_g += tl.load(log_decay + t * V + i_v, mask=new, other=0.0)
    b_beta = tl.load(p_beta + place * V + i_v, mask=old, other=0.0)
    b_beta += tl.load(beta + t * V + i_v, mask=new, other=0.0)
    b_decay = tl.cumsum(b_g, axis=0)
    b_k = unit(b_k.to(tl.float32))
    b_q = unit(b_q.to(tl.float32)) * (A**-0.5)
    b_v = b_v.to(tl.float32)
    lower = r[:, None] >= r[None, :]
    pair = tl.exp(tl.where(lower, b_decay[:, None] - b_decay[None, :], float("-inf")))
    k_beta = b_k * b_beta[:, None]
    k_t = b_k.trans(1, 0)
    system = tl.dot(k_beta, k_t, input_precision=EXACT) * pair
    system = tl.where(r[:, None] > r[None, :], system, 0.0)
    inverse = _inverse(system, r, EXACT)
    b_u = tl.dot(inverse, b_v * b_beta[:, None], input_precision=EXACT)
    b_w = tl.dot(inverse, k_beta * tl.exp(b_decay)[:, None], input_precision=EXACT)
    b_p = tl.dot(b_q, k_t, input_precision=EXACT) * pair
    chunk = (b.to(tl.int64) * V + i_v) * tl.num_programs(0) + i_c
    at = (chunk * CHUNK + r)[:, None] * A + a[None, :]
    tl.store(u + at, b_u)
    tl.store(w + at, b_w)
    tl.store(p + (chunk * CHUNK + r)[:, None] * CHUNK + r[None, :], b_p)
    tl.store(decay + chunk * CHUNK + r, b_decay)


@triton.jit(do_not_specialize=["B", "chunks"])
def walk_float32_kernel(
    mixed, u, w, p, decay, o, sessions, B, chunks, S_AT, K_AT,
    H: tl.constexpr, V: tl.constexpr, A: tl.constexpr, BA: tl.constexpr, TILED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """All chunks of BA columns of one value head's state, in order; the state moves on in place."""
    C: tl.constexpr = (2 * H + V) * A
    i_b, i_v, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = tl.load(sessions + BASE * B + b)
    fold = tl.load(sessions + NEW_BASE * B + b) - base
    opened = tl.load(sessions + FIRST * B + b) - base
    total = opened + tl.load(sessions + ROWS * B + b)
    first_row = tl.load(sessions + FIRST_ROW * B + b)
    i_h = i_v % H if TILED else i_v // (V // H)
    address = tl.load(sessions + STATE * B + b)
    r = tl.arange(0, CHUNK)
    a = tl.arange(0, A)
    part = i_b * BA + tl.arange(0, BA)
    p_k = (address + K_AT).to(tl.pointer_type(mixed.dtype.element_ty))
    p_state = (address + S_AT).to(tl.pointer_type(tl.float32))
    p_state += (i_v * A + a)[:, None] * A + part[None, :]
    b_state = tl.load(p_state)
    for i_c in range((total + CHUNK - 1) // CHUNK):
        chunk = (b.to(tl.int64) * V + i_v) * chunks + i_c
        at_row = (chunk * CHUNK + r)[:, None]
        i = i_c * CHUNK + r
        old, new = i < opened, (i >= opened) & (i < total)
        place = base % (2 * CHUNK) + i
        t = first_row + i - opened
        row = t[:, None] * C + a[None, :]
        at_k = (place * H + i_h)[:, None] * A + a[None, :]
        b_k = tl.load(p_k + at_k, mask=old[:, None], other=0.0)
        b_k += tl.load(mixed + row + (H + i_h) * A, mask=new[:, None], other=0.0)
        b_k = unit(b_k.to(tl.float32))
        b_q = tl.load(mixed + row + i_h * A, mask=new[:, None], other=0.0)
        b_q = unit(b_q.to(tl.float32)) * (A**-0.5)
        b_decay = tl.load(decay + chunk * CHUNK + r)
        end = tl.load(decay + chunk * CHUNK + CHUNK - 1)
        b_w = tl.load(w + at_row * A + a[None, :])
        b_u = tl.load(u + at_row * A + part[None, :])
        b_v = b_u - tl.dot(b_w, b_state, input_precision=EXACT)
        b_o = tl.dot(b_q * tl.exp(b_decay)[:, None], b_state, input_precision=EXACT)
        b_p = tl.load(p + at_row * CHUNK + r[None, :])
        b_o += tl.dot(b_p, b_v, input_precision=EXACT)
        p_o = o + (t * V + i_v)[:, None] * A + part[None, :]
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=new[:, None])
        to_end = b_k * tl.exp(end - b_decay)[:, None]
        b_state = b_state * tl.exp(end)
        b_state += tl.dot(to_end.trans(1, 0), b_v, input_precision=EXACT)
        if (i_c + 1) * CHUNK == fold:
            tl.store(p_state, b_state)
