"""Gated delta rule over the sequences of a launch, with their state in place (model.md E.2).

Convolution and gates make the new rows; `prepare` inverts the triangular system of every chunk of
64 rows; `walk` carries the state through a head's chunks (both in chunks.py, in float32 in
chunks_float32.py). Chunks begin at
multiples of 64 of the sequence, so a row re-enters the chunk that it would have had in any other
launch (design.md section 2). Rows since the state's position are kept: row p of a sequence whose
state stands at B lies in place B mod 128 + p - B. When the state moves on by a chunk the rows behind
it need not move: what lies behind place 127 is also kept 128 places before.

Legend: T rows, H key heads, V value heads, A head width, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.fused.chunks import (
    gated_norm_kernel,
    prepare_few_kernel,
    prepare_kernel,
    walk_few_kernel,
    walk_kernel,
)
from civetta.kernels.fused.chunks_float32 import prepare_float32_kernel, walk_float32_kernel
from civetta.kernels.fused.launch import (
    BASE,
    FIRST,
    FIRST_ROW,
    NEW_BASE,
    POSITION,
    ROWS,
    SESSION,
    STATE,
)
from civetta.kernels.matmul.tiling import precision
from civetta.kernels.ops import GDN_CHUNK
from civetta.kernels.residual.triton import sigmoid32

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.kernels.fused.launch import Batch

CHUNK = tl.constexpr(GDN_CHUNK)
STATE_COLS = 32
"""Columns of the state that one program carries in float32."""

LONG_STATE_COLS = 64
"""The same through many chunks: what all programs of a head read is then read half as often."""

FEW_STATE_COLS = {True: 32, False: 64}
"""The same for launches of few rows, by whether it has at most two sessions."""

NORM_HEADS = 8
"""Heads of a program of the norm; two a warp, so that a thread takes 16 bytes."""

FEW_PART = 64
"""Columns of u and w that `prepare` makes at a time when rows are few."""

CONV_ROWS = 16
"""Rows of a tile of the convolution when rows are many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPlaces:
    """Byte offsets of one layer's parts from a session's state address.

    PLACES: two chunks, and what is written twice (state/device_state.py).
    """

    state: int  # float32 [V, A, A]
    k: int  # operands' dtype [PLACES, H, A]
    v: int  # [PLACES, V, A]
    log_decay: int  # float32 [PLACES, V]
    beta: int
    conv: int  # operands' dtype [ring, C]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """Heads, their width, taps and ring of the convolution; `tiled` as in `Ops.gdn_chunks`."""

    key_heads: int
    value_heads: int
    width: int
    taps: int
    ring: int
    tiled: bool

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return (2 * self.key_heads + self.value_heads) * self.width


@triton.jit
def _tapped(x, w, total):
    """total + x times one tap a channel. x is a row's channel plus zero: so no zero is negative."""
    return tl.fma(x.to(tl.float32), tl.load(w)[None, :] + tl.zeros(x.shape, tl.float32), total)


@triton.jit(do_not_specialize=["T", "B"])
def conv_kernel(
    u, w, gates, decay_scale, dt_bias, mixed, log_decay, beta, rows, sessions, T, B,
    u_stride, gate_stride, K_AT, V_AT, DECAY_AT, BETA_AT, CONV_AT,
    H: tl.constexpr, V: tl.constexpr, A: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
    APPEND: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One head's channels of BT rows, or (last program) their gates."""
    C: tl.constexpr = (2 * H + V) * A
    head = tl.program_id(1)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    ok_t = t < T
    b = tl.load(rows + SESSION * T + t, mask=ok_t, other=-1)
    ok_t = ok_t & (b >= 0)
    b = tl.where(ok_t, b, 0)
    p = tl.load(rows + POSITION * T + t, mask=ok_t, other=0)
    first_row = tl.load(sessions + FIRST_ROW * B + b)
    base = tl.load(sessions + BASE * B + b)
    state = tl.load(sessions + STATE * B + b)
    place = base % (2 * CHUNK) + p - base
    again = place - 2 * CHUNK
    if head == 2 * H + V:
        v = tl.arange(0, BV)
        ok = ok_t[:, None] & (v < V)[None, :]
        x = tl.load(gates + t[:, None] * gate_stride + v[None, :], mask=ok, other=0.0)
        x += tl.load(dt_bias + v, mask=v < V, other=0.0)[None, :]
        e = tl.exp(-tl.abs(x))
        # log(1 + e) loses a small e; its series does not
        small = e * (1.0 - e * (0.5 - e * (0.33333334 - 0.25 * e)))
        soft = tl.maximum(x, 0.0) + tl.where(e < 1e-2, small, tl.log(1.0 + e))
        b_decay = tl.load(decay_scale + v, mask=v < V, other=0.0)[None, :] * soft
        raw = tl.load(gates + t[:, None] * gate_stride + V + v[None, :], mask=ok, other=0.0)
        b_beta = sigmoid32(raw)
        at = t[:, None] * V + v[None, :]
        tl.store(log_decay + at, b_decay, mask=ok)
        tl.store(beta + at, b_beta, mask=ok)
        if APPEND:
            p_decay = (state + DECAY_AT).to(tl.pointer_type(tl.float32))
            p_beta = (state + BETA_AT).to(tl.pointer_type(tl.float32))
            own = place[:, None] * V + v[None, :]
            twice = again[:, None] * V + v[None, :]
            tl.store(p_decay[:, None] + own, b_decay, mask=ok)
            tl.store(p_beta[:, None] + own, b_beta, mask=ok)
            ok_again = ok & (again >= 0)[:, None]
            tl.store(p_decay[:, None] + twice, b_decay, mask=ok_again)
            tl.store(p_beta[:, None] + twice, b_beta, mask=ok_again)
        return
    a = tl.arange(0, A)
    c = head * A + a
    ring = (state + CONV_AT).to(tl.pointer_type(u.dtype.element_ty))
    inside = False
    if BT > 1:  # the usual tile: all of its rows, and those before, are one session's new ones
        t_0 = tl.program_id(0) * BT
        b_0 = tl.load(rows + SESSION * T + t_0)
        if t_0 + BT <= T:  # noqa: SIM102 - Triton wants scalars nested
            if b_0 >= 0:
                same = tl.load(rows + SESSION * T + t_0 + BT - 1) == b_0
                inside = same & (t_0 - (TAPS - 1) >= tl.load(sessions + FIRST_ROW * B + b_0))
    total = tl.zeros((BT, A), dtype=tl.float32)
    if inside:
        p_u = u + t.to(tl.int64)[:, None] * u_stride + c[None, :]
        for k in tl.static_range(TAPS):
            new = tl.load(p_u - (TAPS - 1 - k) * u_stride)
            total = _tapped(new + tl.zeros(new.shape, new.dtype), w + c * TAPS + k, total)
    else:
        for k in tl.static_range(TAPS):
            back = TAPS - 1 - k
            here = ok_t & (t - back >= first_row)
            then = ok_t & (t - back < first_row) & (p - back >= 0)
            new = tl.load(u + (t - back).to(tl.int64)[:, None] * u_stride + c[None, :],
                          mask=here[:, None], other=0.0)  # fmt: skip
            slot = (p - back + RING) % RING
            old = tl.load(ring[:, None] + slot[:, None] * C + c[None, :],
                          mask=then[:, None], other=0.0)  # fmt: skip
            total = _tapped(new + old, w + c * TAPS + k, total)
    y = (total * sigmoid32(total)).to(mixed.dtype.element_ty)
    tl.store(mixed + t.to(tl.int64)[:, None] * C + c[None, :], y, mask=ok_t[:, None])
    if APPEND:
        raw = tl.load(u + t.to(tl.int64)[:, None] * u_stride + c[None, :], mask=ok_t[:, None])
        tl.store(ring[:, None] + (p % RING)[:, None] * C + c[None, :], raw, mask=ok_t[:, None])
        if head >= H:
            if head < 2 * H:
                p_new = (state + K_AT).to(tl.pointer_type(u.dtype.element_ty))
                heads, own = H, head - H
            else:
                p_new = (state + V_AT).to(tl.pointer_type(u.dtype.element_ty))
                heads, own = V, head - 2 * H
            at = (place[:, None] * heads + own) * A + a[None, :]
            tl.store(p_new[:, None] + at, y, mask=ok_t[:, None])
            at = (again[:, None] * heads + own) * A + a[None, :]
            tl.store(p_new[:, None] + at, y, mask=(ok_t & (again >= 0))[:, None])


@triton.jit(do_not_specialize=["B"])
def keep_kernel(
    mixed, log_decay, beta, sessions, B, K_AT, V_AT, DECAY_AT, BETA_AT,
    H: tl.constexpr, V: tl.constexpr, A: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One place behind the new base: its row, if this launch made it, into the state."""
    C: tl.constexpr = (2 * H + V) * A
    b = tl.program_id(1)
    new_base = tl.load(sessions + NEW_BASE * B + b)
    first = tl.load(sessions + FIRST * B + b)
    p = new_base + tl.program_id(0)
    if p < first:
        return
    if p >= first + tl.load(sessions + ROWS * B + b):
        return
    t = tl.load(sessions + FIRST_ROW * B + b) + p - first
    state = tl.load(sessions + STATE * B + b)
    place = new_base % (2 * CHUNK) + p - new_base
    p_k = (state + K_AT).to(tl.pointer_type(mixed.dtype.element_ty))
    p_v = (state + V_AT).to(tl.pointer_type(mixed.dtype.element_ty))
    p_decay = (state + DECAY_AT).to(tl.pointer_type(tl.float32))
    p_beta = (state + BETA_AT).to(tl.pointer_type(tl.float32))
    a = tl.arange(0, A)
    v = tl.arange(0, BV)
    b_decay = tl.load(log_decay + t * V + v, mask=v < V, other=0.0)
    b_beta = tl.load(beta + t * V + v, mask=v < V, other=0.0)
    for copy in tl.static_range(2):
        at = place - 2 * CHUNK * copy
        ok_a, ok_v = tl.where(a < A, at, -1) >= 0, tl.where(v < V, at, -1) >= 0
        for h in range(H):
            row = tl.load(mixed + t * C + (H + h) * A + a)
            tl.store(p_k + (at * H + h) * A + a, row, mask=ok_a)
        for h in range(V):
            row = tl.load(mixed + t * C + (2 * H + h) * A + a)
            tl.store(p_v + (at * V + h) * A + a, row, mask=ok_a)
        tl.store(p_decay + at * V + v, b_decay, mask=ok_v)
        tl.store(p_beta + at * V + v, b_beta, mask=ok_v)


@triton.jit(do_not_specialize=["B"])
def push_kernel(x, sessions, B, x_stride, C, RING_AT, RING: tl.constexpr, BLOCK: tl.constexpr):
    """The newest rows of a launch into a ring of the state: one slot, some channels."""
    b = tl.program_id(1)
    first = tl.load(sessions + FIRST * B + b)
    stop = first + tl.load(sessions + ROWS * B + b)
    p = stop - 1 - tl.program_id(0)
    if p < first:
        return
    t = tl.load(sessions + FIRST_ROW * B + b) + p - first
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(sessions + STATE * B + b) + RING_AT
    ring = address.to(tl.pointer_type(x.dtype.element_ty))
    row = tl.load(x + t * x_stride + c, mask=c < C, other=0.0)
    tl.store(ring + (p % RING) * C + c, row, mask=c < C)


def delta(
    batch: Batch,
    sizes: DeltaSizes,
    at: DeltaPlaces,
    u_TC: Tensor,
    z_TX: Tensor,
    gates_TG: Tensor,
    conv_CK: Tensor,
    decay_scale_V: Tensor,
    dt_bias_V: Tensor,
    gain_A: Tensor,
    eps: float,
) -> Tensor:
    """The mixer between its projections: y [T, V * A] in u's dtype. Moves every session's state on.

    u [T, C], z [T, V * A] and gates float32 [T, 2 * V] (decay, then strength) may have strided rows.
    """
    h, v, a = sizes.key_heads, sizes.value_heads, sizes.width
    device, dtype = u_TC.device, u_TC.dtype
    rows, sessions, t, b = batch.rows_FT, batch.sessions_FB, batch.rows, batch.sessions
    wide = triton.next_power_of_2(v)
    mixed = torch.empty((t, sizes.channels), dtype=dtype, device=device)
    log_decay = torch.empty((t, v), dtype=torch.float32, device=device)
    beta = torch.empty_like(log_decay)
    tile = 1 if batch.in_place else CONV_ROWS
    conv_kernel[(-(-t // tile), 2 * h + v + 1)](
        u_TC, conv_CK, gates_TG, decay_scale_V, dt_bias_V, mixed, log_decay, beta, rows, sessions,
        t, b, u_TC.stride(0), gates_TG.stride(0), at.k, at.v, at.log_decay, at.beta, at.conv,
        H=h, V=v, A=a, TAPS=sizes.taps, RING=sizes.ring, APPEND=batch.in_place, BT=tile, BV=wide,
        num_warps=1 if batch.in_place else 4,
    )  # fmt: skip
    o = _walked(batch, sizes, at, mixed, log_decay, beta)
    if not batch.in_place:
        keep_kernel[(GDN_CHUNK + 16, b)](
            mixed, log_decay, beta, sessions, b, at.k, at.v, at.log_decay, at.beta,
            H=h, V=v, A=a, BV=wide, num_warps=1,
        )  # fmt: skip
        push(batch, u_TC, at.conv, sizes.ring)
    y = torch.empty((t, v * a), dtype=dtype, device=device)
    gated_norm_kernel[(t, -(-v // NORM_HEADS))](
        o, z_TX, gain_A, y, rows, t, z_TX.stride(0), eps, V=v, A=a, HEADS=NORM_HEADS,
        num_warps=max(1, NORM_HEADS // 2),
    )  # fmt: skip
    return y


def _walked(
    batch: Batch,
    sizes: DeltaSizes,
    at: DeltaPlaces,
    mixed: Tensor,
    log_decay: Tensor,
    beta: Tensor,
) -> Tensor:
    """Every row's read of the state [T, V, A], before its norm; what chunks need ends with the call."""
    h, v, a = sizes.key_heads, sizes.value_heads, sizes.width
    device, dtype = mixed.device, mixed.dtype
    sessions, t, b = batch.sessions_FB, batch.rows, batch.sessions
    exact = precision(torch.float32, device)
    if exact == "tf32x3" and dtype != torch.float32:
        exact = "tf32"  # the rows themselves are rounded more coarsely
    o = torch.empty((t, v, a), dtype=dtype, device=device)
    chunks = -(-(GDN_CHUNK + 15 + batch.most_rows) // GDN_CHUNK)
    u = torch.empty((b, v, chunks, GDN_CHUNK, a), dtype=torch.float32, device=device)
    w = torch.empty_like(u)
    p = torch.empty((b, v, chunks, GDN_CHUNK, GDN_CHUNK), dtype=torch.float32, device=device)
    decay = torch.empty((b, v, chunks, GDN_CHUNK), dtype=torch.float32, device=device)
    exactly = dtype == torch.float32
    if batch.in_place and not exactly:
        prepare_few_kernel[(chunks, v, b)](
            mixed, u, w, p, decay, sessions, b, at.k, at.v, at.log_decay, at.beta,
            H=h, V=v, A=a, PART=min(FEW_PART, a), TILED=sizes.tiled, EXACT=exact, num_warps=4,
        )  # fmt: skip
        cols = min(FEW_STATE_COLS[b <= 2], a)
        moved = torch.empty((b, v, a, a), dtype=torch.float32, device=device)
        walk_few_kernel[(a // cols, v, b)](
            mixed, u, w, p, decay, moved, o, sessions, b, chunks, at.state, at.k,
            H=h, V=v, A=a, BA=cols, TILED=sizes.tiled, EXACT=exact, num_warps=4, num_stages=1,
        )  # fmt: skip
        return o
    prepare, walk = prepare_kernel, walk_kernel
    if exactly:
        prepare, walk = prepare_float32_kernel, walk_float32_kernel
    prepare[(chunks, v, b)](
        mixed, log_decay, beta, u, w, p, decay, sessions, b, at.k, at.v, at.log_decay, at.beta,
        H=h, V=v, A=a, TILED=sizes.tiled, EXACT=exact, num_warps=4,
    )  # fmt: skip
    cols = min(STATE_COLS if exactly else LONG_STATE_COLS, a)
    walk[(a // cols, v, b)](
        mixed, u, w, p, decay, o, sessions, b, chunks, at.state, at.k,
        H=h, V=v, A=a, BA=cols, TILED=sizes.tiled, EXACT=exact, num_warps=4,
        num_stages=1 if exact == "tf32x3" else 2,  # three products an operand fill the shared memory
    )  # fmt: skip
    return o


def push(batch: Batch, x_TC: Tensor, place: int, ring: int) -> None:
    """The newest rows of every session into the ring at byte `place` of its state."""
    channels = x_TC.shape[1]
    push_kernel[(ring, batch.sessions, -(-channels // 1024))](
        x_TC, batch.sessions_FB, batch.sessions, x_TC.stride(0), channels, place, RING=ring,
        BLOCK=1024,
    )  # fmt: skip
