"""Sparse attention over the sequences of a launch (model.md E.1).

`place_rows` norms and rotates a row's heads and writes its keys; `pool` makes index keys of the
blocks that these rows complete; choice.py takes the best blocks; `attend` reads the keys.
A query that sees at most the budget reads all its keys in the same list form, so that one kernel
serves every row. Its list is cut into partitions of PARTITION keys from the start; each starts a
fresh softmax and they are merged in order, beside each other when rows are few, one after another
when rows are many (design.md section 2).

Legend: T rows, Q query heads, G key/value heads, A head width, I indexer heads, X indexer width.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from civetta.kernels.fused.launch import (
    FIRST,
    POSITION,
    ROPE_AT,
    ROPE_STRIDE,
    ROWS,
    SESSION,
    TABLE,
)
from civetta.kernels.ops import PAGE_TOKENS
from civetta.kernels.residual.triton import sigmoid32

PAGE = tl.constexpr(PAGE_TOKENS)
PARTITION = 64
"""Keys of one softmax partition."""

FEW_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Heads and widths; `keep` blocks of `ratio` tokens are read."""

    heads: int
    kv_heads: int
    width: int
    index_heads: int
    index_width: int
    ratio: int
    keep: int

    @property
    def listed(self) -> int:
        """Most tokens of a query's list: the kept blocks and the tail."""
        return self.keep * self.ratio + self.ratio - 1


@triton.jit
def _turned(x, gain, mate_x, mate_gain, cos, sin, c, eps, A: tl.constexpr, HALF: tl.constexpr):
    """RMS norm of a row [A] and rotation of its first 2 * HALF columns, float32."""
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / A + eps)
    x = x * scale * gain
    mate_x = mate_x * scale * mate_gain
    turned = c < 2 * HALF
    mate = tl.where(c < HALF, -mate_x, mate_x)
    return tl.where(turned, x * cos + mate * sin, x)


@triton.jit(do_not_specialize=["T", "B"])
def rows_kernel(
    proj, index, q_gain, k_gain, iq_gain, cos, sin, q, iq, k_pages, v_pages, raw_pages,
    rows, sessions, T, B, proj_stride, index_stride, eps,
    Q: tl.constexpr, G: tl.constexpr, A: tl.constexpr, I: tl.constexpr, X: tl.constexpr,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one row: a query (then its norm and rope), a key, a value, an index row."""
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = tl.load(rows + SESSION * T + t)
    if b < 0:
        return
    p = tl.load(rows + POSITION * T + t)
    table = tl.load(sessions + TABLE * B + b).to(tl.pointer_type(tl.int64))
    page = tl.load(table + p // PAGE) * PAGE + p % PAGE
    c = tl.arange(0, BLOCK)
    partner = tl.where(c < R, c + R, c - R)
    turned = c < 2 * R
    b_cos = tl.load(cos + t * R + c % R, mask=turned, other=1.0)
    b_sin = tl.load(sin + t * R + c % R, mask=turned, other=0.0)
    if head < Q + G:
        ok = c < A
        if head < Q:
            p_x = proj + t * proj_stride + head * 2 * A
            gain = q_gain
            p_y = q + (t * Q + head) * A
        else:
            p_x = proj + t * proj_stride + Q * 2 * A + (head - Q) * A
            gain = k_gain
            p_y = k_pages + (page * G + head - Q) * A
        x = tl.load(p_x + c, mask=ok, other=0.0).to(tl.float32)
        mate = tl.load(p_x + partner, mask=turned, other=0.0).to(tl.float32)
        b_gain = tl.load(gain + c, mask=ok, other=0.0)
        mate_gain = tl.load(gain + partner, mask=turned, other=0.0)
        y = _turned(x, b_gain, mate, mate_gain, b_cos, b_sin, c, eps, A, R)
        tl.store(p_y + c, y.to(q.dtype.element_ty), mask=ok)
    elif head < Q + 2 * G:
        ok = c < A
        raw = tl.load(proj + t * proj_stride + Q * 2 * A + (head - Q) * A + c, mask=ok, other=0.0)
        tl.store(v_pages + (page * G + head - Q - G) * A + c, raw, mask=ok)
    elif head < Q + 2 * G + I:
        ok = c < X
        p_x = index + t * index_stride + (head - Q - 2 * G) * X
        x = tl.load(p_x + c, mask=ok, other=0.0).to(tl.float32)
        mate = tl.load(p_x + partner, mask=turned, other=0.0).to(tl.float32)
        b_gain = tl.load(iq_gain + c, mask=ok, other=0.0)
        mate_gain = tl.load(iq_gain + partner, mask=turned, other=0.0)
        y = _turned(x, b_gain, mate, mate_gain, b_cos, b_sin, c, eps, X, R)
        tl.store(iq + (t * I + head - Q - 2 * G) * X + c, y.to(iq.dtype.element_ty), mask=ok)
    else:
        ok = c < X
        raw = tl.load(index + t * index_stride + I * X + c, mask=ok, other=0.0)
        tl.store(raw_pages + page * X + c, raw, mask=ok)


@triton.jit(do_not_specialize=["B"])
def pool_kernel(
    raw_pages, key_pages, gain, inverse, axis, sessions, B, eps,
    N: tl.constexpr, X: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block that the launch completes: mean of its raw keys, norm, rope at its first token."""
    b = tl.program_id(1)
    first = tl.load(sessions + FIRST * B + b)
    block = first // N + tl.program_id(0)
    if block >= (first + tl.load(sessions + ROWS * B + b)) // N:
        return
    table = tl.load(sessions + TABLE * B + b).to(tl.pointer_type(tl.int64))
    places = tl.load(sessions + ROPE_AT * B + b).to(tl.pointer_type(tl.int64))
    stride = tl.load(sessions + ROPE_STRIDE * B + b)
    c = tl.arange(0, BLOCK)
    ok = c < X
    partner = tl.where(c < R, c + R, c - R)
    turned = c < 2 * R
    page = tl.load(table + block * N // PAGE)
    at = page * PAGE + block * N % PAGE
    mean = tl.zeros((BLOCK,), dtype=tl.float32)
    mate = tl.zeros((BLOCK,), dtype=tl.float32)
    for n in tl.static_range(N):
        mean += tl.load(raw_pages + (at + n) * X + c, mask=ok, other=0.0).to(tl.float32)
        mate += tl.load(raw_pages + (at + n) * X + partner, mask=turned, other=0.0).to(tl.float32)
    mean = (mean / N).to(key_pages.dtype.element_ty).to(tl.float32)
    mate = (mate / N).to(key_pages.dtype.element_ty).to(tl.float32)
    which = tl.load(axis + c % R, mask=turned, other=0)
    place = tl.load(places + which * stride + block * N, mask=turned, other=0)
    angle = place.to(tl.float32) * tl.load(inverse + c % R, mask=turned, other=0.0)
    b_gain = tl.load(gain + c, mask=ok, other=0.0)
    mate_gain = tl.load(gain + partner, mask=turned, other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    y = _turned(mean, b_gain, mate, mate_gain, cos, sin, c, eps, X, R)
    p_y = key_pages + (page * (PAGE // N) + block % (PAGE // N)) * X
    tl.store(p_y + c, y.to(key_pages.dtype.element_ty), mask=ok)


@triton.jit
def _merged(top, total, value, new_top, new_total, new_value):
    """Two partial softmaxes joined, the first one first; fused products are written out."""
    best = tl.maximum(top, new_top)
    shift = tl.where(best == float("-inf"), 0.0, best)
    fade, share = tl.exp(top - shift), tl.exp(new_top - shift)
    total = tl.fma(total, fade, new_total * share)
    wide = tl.zeros(value.shape, dtype=tl.float32)
    value = tl.fma(value, fade[:, None] + wide, new_value * (share[:, None] + wide))
    return best, total, value


@triton.jit(do_not_specialize=["T", "B"])
def attend_kernel(
    q, k_pages, v_pages, kept, proj, y, best, weight, partial, rows, sessions, T, B,
    proj_stride, scale, keep, N: tl.constexpr, G: tl.constexpr, R: tl.constexpr, A: tl.constexpr,
    BM: tl.constexpr, PARTITION: tl.constexpr, PARTS: tl.constexpr, BESIDE: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """The R heads of one row that share keys: one partition (BESIDE), or all of them merged."""
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = tl.load(rows + SESSION * T + t)
    if b < 0:
        return
    seen = (tl.load(rows + POSITION * T + t) + 1).to(tl.int32)
    table = tl.load(sessions + TABLE * B + b).to(tl.pointer_type(tl.int64))
    # the list: `listed` tokens of chosen blocks, then those from `tail` on; all keys are a tail from 0
    chosen = seen // N > keep
    listed = tl.where(chosen, keep * N, 0)
    tail = tl.where(chosen, seen - seen % N, 0)
    limit = listed + seen - tail
    lane = tl.arange(0, BM)
    a = tl.arange(0, A)
    n = tl.arange(0, PARTITION)
    ok = lane < R
    at = (t * G + g) * R + lane
    b_q = tl.load(q + at[:, None] * A + a[None, :], mask=ok[:, None], other=0.0)
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    value = tl.zeros((BM, A), dtype=tl.float32)
    low, high = 0, (limit + PARTITION - 1) // PARTITION
    if BESIDE:
        low = tl.program_id(2)
        high = tl.minimum(low + 1, high)
    for part in range(low, high):
        j = part * PARTITION + n
        known = j < limit
        block = tl.load(kept + t * keep + j // N, mask=j < listed, other=0)
        token = tl.where(j < listed, block * N + j % N, tail + j - listed)
        place = tl.load(table + token // PAGE, mask=known, other=0) * PAGE + token % PAGE
        k_t = tl.load(k_pages + (place * G + g)[None, :] * A + a[:, None],
                      mask=known[None, :], other=0.0)  # fmt: skip
        if PRECISE == "":
            scores = tl.dot(b_q, k_t) * scale
        else:
            scores = tl.dot(b_q, k_t, input_precision=PRECISE) * scale
        scores = tl.where(known[None, :] & ok[:, None], scores, float("-inf"))
        part_top = tl.max(scores, axis=1)
        shift = tl.where(part_top == float("-inf"), 0.0, part_top)
        weights = tl.exp(scores - shift[:, None])
        part_total = tl.sum(weights, axis=1)
        b_v = tl.load(v_pages + (place * G + g)[:, None] * A + a[None, :],
                      mask=known[:, None], other=0.0)  # fmt: skip
        if PRECISE == "":
            part_value = tl.dot(weights.to(b_v.dtype), b_v)
        else:
            part_value = tl.dot(weights, b_v, input_precision=PRECISE)
        top, total, value = _merged(top, total, value, part_top, part_total, part_value)
    if BESIDE:
        out = at * PARTS + tl.program_id(2)
        tl.store(best + out, top, mask=ok)
        tl.store(weight + out, total, mask=ok)
        tl.store(partial + out[:, None] * A + a[None, :], value, mask=ok[:, None])
    else:
        head = g * R + lane
        gate = tl.load(proj + t * proj_stride + (head * 2 * A + A)[:, None] + a[None, :],
                       mask=ok[:, None], other=0.0).to(tl.float32)  # fmt: skip
        out = value / total[:, None] * sigmoid32(gate)
        tl.store(y + at[:, None] * A + a[None, :], out.to(y.dtype.element_ty), mask=ok[:, None])


@triton.jit(do_not_specialize=["T"])
def merge_kernel(best, weight, partial, proj, y, rows, T, proj_stride, PARTS: tl.constexpr,
                 HEADS: tl.constexpr, A: tl.constexpr):  # fmt: skip
    """One head of one row: its partitions in order, then its gate."""
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    a = tl.arange(0, A)
    at = t * HEADS + head
    if tl.load(rows + SESSION * T + t) < 0:
        tl.store(y + at * A + a, tl.zeros((A,), dtype=tl.float32).to(y.dtype.element_ty))
        return
    top = tl.full((1,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((1,), dtype=tl.float32)
    value = tl.zeros((1, A), dtype=tl.float32)
    one = tl.arange(0, 1)
    for part in range(PARTS):
        out = at * PARTS + part
        p_value = partial + out * A + one[:, None] + a[None, :]
        top, total, value = _merged(
            top, total, value, tl.load(best + out + one), tl.load(weight + out + one),
            tl.load(p_value),
        )  # fmt: skip
    gate = tl.load(proj + t * proj_stride + head * 2 * A + A + one[:, None] + a[None, :])
    out = value / total[:, None] * sigmoid32(gate.to(tl.float32))
    tl.store(y + at * A + one[:, None] + a[None, :], out.to(y.dtype.element_ty))
