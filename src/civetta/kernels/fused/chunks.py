"""Chunks of the gated delta rule: the triangular system of 64 rows, the walk with the state, the norm.

What each kernel computes, and where the rows lie: delta.py. The inverse comes from doubling blocks: T
of 2s rows is T - T L T, T the inverse of blocks of s and L what couples them. No power of L is
formed, so nothing grows when keys repeat.
"""

from __future__ import annotations

import triton
import triton.language as tl

from civetta.kernels.fused.launch import BASE, FIRST, FIRST_ROW, NEW_BASE, ROWS, SESSION, STATE
from civetta.kernels.ops import GDN_CHUNK
from civetta.kernels.residual.triton import sigmoid32

CHUNK = tl.constexpr(GDN_CHUNK)


@triton.jit
def placed(state, AT, TYPE: tl.constexpr):
    """Pointer to a part of a state; every part begins at a multiple of 16, so loads may be wide."""
    return tl.multiple_of((state + AT).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def unit(x):
    """Rows of unit length."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@triton.jit
def _doubled(inverse, system, row, col, bits, EXACT: tl.constexpr):
    """The inverse of blocks of 2 << bits rows from that of blocks of 1 << bits."""
    couples = (row >> bits != col >> bits) & (row >> (bits + 1) == col >> (bits + 1))
    inner = tl.dot(inverse, tl.where(couples, system, 0.0), input_precision=EXACT)
    return inverse - tl.dot(inner, inverse, input_precision=EXACT)


@triton.jit
def _inverse(system, r, rows, EXACT: tl.constexpr):
    """(1 + system)^-1 for a strictly lower triangular [64, 64]: blocks of 16, then of 64.

    From row `rows` on the system must be zero: there the inverse is one, and blocks that only such
    rows would couple are left out, which changes no bit (x - +0 is x).
    """
    i = tl.arange(0, 16)
    own = (tl.arange(0, 4)[:, None] == tl.arange(0, 4)[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(own, tl.reshape(system, (4, 16, 4, 16)), 0.0), axis=2)
    row, col = i[None, :, None], i[None, None, :]
    small = (row == col).to(tl.float32) - tl.where(row >> 1 == col >> 1, blocks, 0.0)
    for bits in range(1, 4):
        small = _doubled(small, blocks, row, col, bits, EXACT)
    inverse = tl.reshape(tl.where(own, small[:, :, None, :], 0.0), (64, 64))
    for bits in range(4, 4 + (rows > 16).to(tl.int32) + (rows > 32).to(tl.int32)):
        inverse = _doubled(inverse, system, r[:, None], r[None, :], bits, EXACT)
    return inverse


@triton.jit
def _pairs(decay, r):
    """Decay from row j to row i of a chunk, zero above the diagonal."""
    lower = r[:, None] >= r[None, :]
    return tl.exp(tl.where(lower, decay[:, None] - decay[None, :], float("-inf")))


@triton.jit
def _coupling(k_beta, k_t, pair, r, EXACT: tl.constexpr):
    """The strictly lower triangular system of a chunk."""
    system = tl.dot(k_beta, k_t, input_precision=EXACT) * pair
    return tl.where(r[:, None] > r[None, :], system, 0.0)


@triton.jit
def _read(q, p, v, state, decay, EXACT: tl.constexpr):
    """What the rows of a chunk read: of the state before it, then of the chunk."""
    o = tl.dot(q * tl.exp(decay)[:, None], state, input_precision=EXACT)
    o += tl.dot(p, v, input_precision=EXACT)
    return o


@triton.jit
def _moved(state, k, v, decay, end, EXACT: tl.constexpr):
    """The state behind a chunk."""
    to_end = k * tl.exp(end - decay)[:, None]
    state = state * tl.exp(end)
    state += tl.dot(to_end.trans(1, 0), v, input_precision=EXACT)
    return state


@triton.jit
def _keys(p_old, p_new, old, new):
    """Unit keys [64, A] that lie at p_old or, the launch's own, at p_new."""
    k = tl.load(p_old, mask=old[:, None], other=0.0)
    k += tl.load(p_new, mask=new[:, None], other=0.0)
    return unit(k.to(tl.float32))


@triton.jit(do_not_specialize=["B"])
def prepare_kernel(
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
    p_k = placed(state, K_AT, mixed.dtype.element_ty)
    p_v = placed(state, V_AT, mixed.dtype.element_ty)
    p_decay = (state + DECAY_AT).to(tl.pointer_type(tl.float32))
    p_beta = (state + BETA_AT).to(tl.pointer_type(tl.float32))
    row = t[:, None] * C + a[None, :]
    b_g = tl.load(p_decay + place * V + i_v, mask=old, other=0.0)
    b_beta = tl.load(p_beta + place * V + i_v, mask=old, other=0.0)
    b_g += tl.load(log_decay + t * V + i_v, mask=new, other=0.0)
    b_beta += tl.load(beta + t * V + i_v, mask=new, other=0.0)
    at_k = (place * H + i_h)[:, None] * A + a[None, :]
    b_q = tl.load(mixed + row + i_h * A, mask=new[:, None], other=0.0)
    b_k = _keys(p_k + at_k, mixed + row + (H + i_h) * A, old, new)
    chunk = (b.to(tl.int64) * V + i_v) * tl.num_programs(0) + i_c
    b_decay = tl.cumsum(b_g, axis=0)
    tl.store(decay + chunk * CHUNK + r, b_decay)
    pair = _pairs(b_decay, r)
    k_t = b_k.trans(1, 0)
    unit_q = unit(b_q.to(tl.float32)) * (A**-0.5)
    b_p = tl.dot(unit_q, k_t, input_precision=EXACT) * pair
    tl.store(p + (chunk * CHUNK + r)[:, None] * CHUNK + r[None, :], b_p)
    at_v = (place * V + i_v)[:, None] * A + a[None, :]
    k_beta = b_k * b_beta[:, None]
    system = _coupling(k_beta, k_t, pair, r, EXACT)
    inverse = _inverse(system, r, total - i_c * CHUNK, EXACT)
    at = (chunk * CHUNK + r)[:, None] * A + a[None, :]
    b_w = tl.dot(inverse, k_beta * tl.exp(b_decay)[:, None], input_precision=EXACT)
    tl.store(w + at, b_w)
    b_v = tl.load(p_v + at_v, mask=old[:, None], other=0.0)
    b_v += tl.load(mixed + row + (2 * H + i_v) * A, mask=new[:, None], other=0.0)
    b_u = tl.dot(inverse, b_v.to(tl.float32) * b_beta[:, None], input_precision=EXACT)
    tl.store(u + at, b_u)


@triton.jit
def _scale(x):
    """What makes rows of unit length: `unit` without the product."""
    return tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)


@triton.jit(do_not_specialize=["B"])
def prepare_few_kernel(
    mixed, u, w, p, decay, sessions, B, K_AT, V_AT, DECAY_AT, BETA_AT,
    H: tl.constexpr, V: tl.constexpr, A: tl.constexpr, PART: tl.constexpr, TILED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """`prepare` for few rows, which lie in the state already, with the same numbers in the same order.

    Keys are read again where they are needed, and u and w made by PART columns: so a program has few
    registers, and more of them run at a time. p of a chunk without new rows is not asked for.
    """
    C: tl.constexpr = (2 * H + V) * A
    i_c, i_v, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = tl.load(sessions + BASE * B + b)
    opened = tl.load(sessions + FIRST * B + b) - base
    total = opened + tl.load(sessions + ROWS * B + b)
    if i_c * CHUNK >= total:
        return
    first_row = tl.load(sessions + FIRST_ROW * B + b)
    state = tl.load(sessions + STATE * B + b)
    i_h = i_v % H if TILED else i_v // (V // H)
    r = tl.arange(0, CHUNK)
    a = tl.arange(0, A)
    c = tl.arange(0, PART)
    i = (r + i_c * CHUNK).to(tl.int32)
    there = i < total
    new = there & (i >= opened)
    place = (base % (2 * CHUNK)).to(tl.int32) + i
    t = (first_row - opened).to(tl.int32) + i
    p_k = placed(state, K_AT, mixed.dtype.element_ty) + i_h * A
    p_v = placed(state, V_AT, mixed.dtype.element_ty) + i_v * A
    p_decay = (state + DECAY_AT).to(tl.pointer_type(tl.float32)) + i_v
    p_beta = (state + BETA_AT).to(tl.pointer_type(tl.float32)) + i_v
    at_k = place[:, None] * (H * A)
    at_v = place[:, None] * (V * A)
    b_g = tl.load(p_decay + place * V, mask=there, other=0.0)
    b_beta = tl.load(p_beta + place * V, mask=there, other=0.0)
    b_k = tl.load(p_k + at_k + a[None, :], mask=there[:, None], other=0.0).to(tl.float32)
    b_q = tl.load(
        mixed + t.to(tl.int64)[:, None] * C + i_h * A + a[None, :], mask=new[:, None], other=0.0
    )
    chunk = (b.to(tl.int64) * V + i_v) * tl.num_programs(0) + i_c
    b_decay = tl.cumsum(b_g, axis=0)
    tl.store(decay + chunk * CHUNK + r, b_decay)
    scale = _scale(b_k)
    b_k = b_k * scale[:, None]
    k_t = b_k.trans(1, 0)
    system = _coupling(b_k * b_beta[:, None], k_t, _pairs(b_decay, r), r, EXACT)
    if (i_c + 1) * CHUNK > opened:
        unit_q = unit(b_q.to(tl.float32)) * (A**-0.5)
        b_p = tl.dot(unit_q, k_t, input_precision=EXACT) * _pairs(b_decay, r)
        tl.store(
            p + chunk * (CHUNK * CHUNK) + (r[:, None] * CHUNK + r[None, :]), b_p, mask=new[:, None]
        )
    inverse = _inverse(system, r, total - i_c * CHUNK, EXACT)
    for j in tl.static_range(A // PART):
        at = chunk * (CHUNK * A) + (r[:, None] * A + (c + j * PART)[None, :])
        b_v = tl.load(p_v + at_v + (c + j * PART)[None, :], mask=there[:, None], other=0.0)
        k_j = tl.load(p_k + at_k + (c + j * PART)[None, :], mask=there[:, None], other=0.0)
        k_j = k_j.to(tl.float32) * scale[:, None]
        k_j = (k_j * b_beta[:, None]) * tl.exp(b_decay)[:, None]
        b_w = tl.dot(inverse, k_j, input_precision=EXACT)
        tl.store(w + at, b_w, mask=there[:, None])
        b_u = tl.dot(inverse, b_v.to(tl.float32) * b_beta[:, None], input_precision=EXACT)
        tl.store(u + at, b_u, mask=there[:, None])


@triton.jit(do_not_specialize=["B", "chunks"])
def walk_kernel(
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
    # wide loads would be staged, for which the shared memory has no room
    p_k = (address + K_AT).to(tl.pointer_type(mixed.dtype.element_ty))
    p_state = placed(address, S_AT, tl.float32)
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
        p_old = p_k + (place * H + i_h)[:, None] * A + a[None, :]
        p_new = mixed + row + (H + i_h) * A
        b_k = _keys(p_old, p_new, old, new)
        b_decay = tl.load(decay + chunk * CHUNK + r)
        end = tl.load(decay + chunk * CHUNK + CHUNK - 1)
        b_w = tl.load(w + at_row * A + a[None, :])
        b_u = tl.load(u + at_row * A + part[None, :])
        b_v = b_u - tl.dot(b_w, b_state, input_precision=EXACT)
        b_q = tl.load(mixed + row + i_h * A, mask=new[:, None], other=0.0)
        unit_q = unit(b_q.to(tl.float32)) * (A**-0.5)
        b_p = tl.load(p + at_row * CHUNK + r[None, :])
        b_o = _read(unit_q, b_p, b_v, b_state, b_decay, EXACT)
        p_o = o + (t * V + i_v)[:, None] * A + part[None, :]
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=new[:, None])
        b_state = _moved(b_state, b_k, b_v, b_decay, end, EXACT)
        if (i_c + 1) * CHUNK == fold:
            tl.store(p_state, b_state)


@triton.jit(do_not_specialize=["B", "chunks"])
def walk_few_kernel(
    mixed, u, w, p, decay, moved, o, sessions, B, chunks, S_AT, K_AT,
    H: tl.constexpr, V: tl.constexpr, A: tl.constexpr, BA: tl.constexpr, TILED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """`walk` for few rows, which lie in the state already, with the same numbers in the same order.

    Most launches end within a chunk: its end is computed only if something needs it, what it reads
    only if it has new rows. moved [B, V, A, A]: the state behind a chunk, for the one that follows.
    """
    C: tl.constexpr = (2 * H + V) * A
    i_b, i_v, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = tl.load(sessions + BASE * B + b)
    fold = tl.load(sessions + NEW_BASE * B + b) - base
    opened = tl.load(sessions + FIRST * B + b) - base
    total = opened + tl.load(sessions + ROWS * B + b)
    first_row = tl.load(sessions + FIRST_ROW * B + b)
    address = tl.load(sessions + STATE * B + b)
    i_h = i_v % H if TILED else i_v // (V // H)
    r = tl.arange(0, CHUNK)
    a = tl.arange(0, A)
    part = i_b * BA + tl.arange(0, BA)
    p_k = placed(address, K_AT, mixed.dtype.element_ty) + i_h * A
    p_state = placed(address, S_AT, tl.float32) + i_v * A * A
    p_moved = moved + (b.to(tl.int64) * V + i_v) * A * A
    p_from = p_state
    at_s = a[:, None] * A + part[None, :]
    for i_c in range((total + CHUNK - 1) // CHUNK):
        chunk = (b.to(tl.int64) * V + i_v) * chunks + i_c
        i = (r + i_c * CHUNK).to(tl.int32)
        there = i < total
        b_state = tl.load(p_from + at_s)
        at_row = (chunk * CHUNK).to(tl.int64) * A
        b_w = tl.load(w + at_row + (r[:, None] * A + a[None, :]), mask=there[:, None], other=0.0)
        b_u = tl.load(u + at_row + (r[:, None] * A + part[None, :]), mask=there[:, None], other=0.0)
        new = there & (i >= opened)
        t = (first_row - opened).to(tl.int32) + i
        b_q = tl.load(
            mixed + t.to(tl.int64)[:, None] * C + i_h * A + a[None, :], mask=new[:, None], other=0.0
        )
        b_p = tl.load(
            p + chunk * (CHUNK * CHUNK) + (r[:, None] * CHUNK + r[None, :]), mask=new[:, None],
            other=0.0,
        )  # fmt: skip
        b_decay = tl.load(decay + chunk * CHUNK + r)
        b_v = b_u - tl.dot(b_w, b_state, input_precision=EXACT)
        if (i_c + 1) * CHUNK > opened:
            unit_q = unit(b_q.to(tl.float32)) * (A**-0.5)
            b_o = _read(unit_q, b_p, b_v, b_state, b_decay, EXACT)
            p_o = o + (t.to(tl.int64) * V + i_v)[:, None] * A + part[None, :]
            tl.store(p_o, b_o.to(o.dtype.element_ty), mask=new[:, None])
        if (i_c + 1) * CHUNK <= tl.maximum(fold, total - 1):
            end = tl.load(decay + chunk * CHUNK + CHUNK - 1)
            place = base % (2 * CHUNK) + i
            b_k = tl.load(
                p_k + place[:, None] * (H * A) + a[None, :], mask=there[:, None], other=0.0
            )
            b_k = unit(b_k.to(tl.float32))
            b_state = _moved(tl.load(p_from + at_s), b_k, b_v, b_decay, end, EXACT)
            tl.store(p_moved + at_s, b_state)
            if (i_c + 1) * CHUNK == fold:
                tl.store(p_state + at_s, b_state)
            tl.debug_barrier()  # the next chunk's threads may load what others have stored
        p_from = p_moved


@triton.jit(do_not_specialize=["T"])
def gated_norm_kernel(o, z, gain, y, rows, T, z_stride, eps, V: tl.constexpr, A: tl.constexpr,
                      HEADS: tl.constexpr):  # fmt: skip
    """HEADS heads of one row: gain * rms(o) * sigmoid(z); zeros in rows of no session.

    HEADS is the same for few rows and many, so that a head is always added up in one order.
    """
    t = tl.program_id(0).to(tl.int64)
    v, a = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, A)
    ok = (v < V)[:, None] & (a < A)[None, :]
    there = tl.where(ok, tl.load(rows + SESSION * T + t), -1) >= 0
    at = (t * V + v)[:, None] * A + a[None, :]
    b_o = tl.load(o + at, mask=there, other=0.0).to(tl.float32)
    b_z = tl.load(z + t * z_stride + v[:, None] * A + a[None, :], mask=ok, other=0.0).to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_o * b_o, axis=1) / A + eps)
    b_o = b_o * b_scale[:, None] * tl.load(gain + a)[None, :]
    tl.store(y + at, (b_o * sigmoid32(b_z)).to(y.dtype.element_ty), mask=ok)
