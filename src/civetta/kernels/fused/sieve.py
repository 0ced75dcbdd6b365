"""Which blocks a row reads, when rows are many: one program a row, and few scores to search.

The exact search of choice.py looks at all scores some thirty times. Here a row's scores go into
groups, place by place, and only the groups' maxima are searched: where `keep` of them are as high as
a value, so are `keep` scores at least, and few more. What lies at or above that value is taken out
in one pass and searched exactly. Scores that crowd at one value (many zeros, say) leave more than
there is room for; they are searched in passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.fused.launch import POSITION, SESSION, TABLE
from civetta.kernels.fused.searches import level_of, scored_rows, taken_of
from civetta.kernels.ops import PAGE_TOKENS
from civetta.kernels.qsa.triton import keep_best

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.kernels.fused.launch import Batch

PAGE = tl.constexpr(PAGE_TOKENS)

GROUPS_A_KEPT = 4
"""Groups for each block that is taken: of 32 scores a group and more, 1.15 times `keep` remain."""

ROOM = 2
"""Scores that may remain, for each block that is taken."""

QUERIES, BLOCKS, SPAN = 128, 64, 32
"""Rows and blocks of a tile of scores, and tiles of blocks that one program goes through."""

SCORES_BYTES = 200_000
"""Shared memory that it takes: the queries of four heads, and two tiles of blocks."""


@triton.jit(do_not_specialize=["B", "start", "stop", "most"])
def row_scores_kernel(
    iq, key_pages, scores, sessions, B, start, stop, most, scale, keep,
    N: tl.constexpr, I: tl.constexpr, X: tl.constexpr, BQ: tl.constexpr, BB: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Scores of BQ rows of one session for SPAN tiles of blocks; the rows' queries stay at hand."""
    b = tl.program_id(2)
    t, ok_t, seen = scored_rows(sessions, B, b, start, stop, tl.program_id(0), N, BQ)
    most_seen = seen.to(tl.int32)
    low = tl.program_id(1) * (BB * SPAN)
    if most_seen <= keep:
        return
    if low >= most_seen:
        return
    table = tl.load(sessions + TABLE * B + b).to(tl.pointer_type(tl.int64))
    IN_PAGE: tl.constexpr = PAGE // N
    x = tl.arange(0, X)
    queries = ()
    for h in tl.static_range(I):
        p_q = iq + (t * I + h)[:, None] * X + x[None, :]
        queries += (tl.load(p_q, mask=ok_t[:, None], other=0.0),)  # type: ignore[assignment]
    for from_block in range(low, tl.minimum(low + BB * SPAN, most_seen), BB):
        block = from_block + tl.arange(0, BB)
        ok_b = block < most_seen
        page = tl.load(table + block // IN_PAGE, mask=ok_b, other=0)
        p_k = key_pages + (page * IN_PAGE + block % IN_PAGE)[None, :] * X + x[:, None]
        k_t = tl.load(p_k, mask=ok_b[None, :], other=0.0)
        total = tl.zeros((BQ, BB), dtype=tl.float32)
        for h in tl.static_range(I):
            dots = tl.dot(queries[h], k_t)
            total += tl.where(dots > 0.0, dots, 0.0)
        p_s = scores + (t - start)[:, None] * most + block[None, :]
        tl.store(p_s, total * scale, mask=ok_t[:, None] & ok_b[None, :])


@triton.jit(do_not_specialize=["T", "start", "most", "keep"])
def sieve_kernel(
    scores, kept, values, blocks, rows, T, start, most, keep, N: tl.constexpr,
    GROUPS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The best blocks of one row; values, blocks int32 [rows, ROOM] hold what remains of it."""
    i = tl.program_id(0).to(tl.int64)
    if tl.load(rows + SESSION * T + start + i) < 0:
        return
    seen = ((tl.load(rows + POSITION * T + start + i) + 1) // N).to(tl.int32)
    if seen <= keep:
        return
    lane = tl.arange(0, GROUPS)
    p_score = scores + i * most
    highest = tl.full((GROUPS,), -1, dtype=tl.int32)
    for first in range(0, seen, GROUPS):
        inside = first + lane < seen
        b = tl.load(p_score + first + lane, mask=inside, other=0.0).to(tl.int32, bitcast=True)
        highest = tl.maximum(highest, tl.where(inside, b, -1))
    # a value that at least `keep` maxima reach, and not many more if that can be
    value = level_of(highest, keep, keep + keep // 8)
    left = keep * 0
    own = i * ROOM
    for first in range(0, seen, GROUPS):
        inside = first + lane < seen
        b = tl.load(p_score + first + lane, mask=inside, other=0.0).to(tl.int32, bitcast=True)
        stays = inside & (b >= value)
        place = left + tl.cumsum(stays.to(tl.int32), axis=0) - 1
        fits = stays & (place < ROOM)
        tl.store(values + own + place, b, mask=fits)
        tl.store(blocks + own + place, first + lane, mask=fits)
        left += tl.sum(stays.to(tl.int32), axis=0)
    p_kept = kept + (start + i) * keep
    if left > ROOM:
        keep_best(p_score, p_kept, seen, keep, GROUPS)
        return
    tl.debug_barrier()
    c = tl.arange(0, ROOM)
    b = tl.load(values + own + c, mask=c < left, other=-1, cache_modifier=".cg")
    block = tl.load(blocks + own + c, mask=c < left, other=0, cache_modifier=".cg")
    taken, place = taken_of(b, keep)
    tl.store(p_kept + place, block, mask=taken)


def row_scores(
    batch: Batch,
    key_pages: Tensor,
    iq_TIX: Tensor,
    scores: Tensor,
    start: int,
    ratio: int,
    keep: int,
) -> None:
    """Scores [rows, most] of the rows from `start` on for all complete blocks that they see."""
    count, most = scores.shape
    heads, width = iq_TIX.shape[1:]
    tiles = -(-min(batch.most_rows, count) // QUERIES)
    row_scores_kernel[(tiles, -(-most // (BLOCKS * SPAN)), batch.sessions)](
        iq_TIX, key_pages, scores, batch.sessions_FB, batch.sessions, start, start + count, most,
        width**-0.5, keep, N=ratio, I=heads, X=width, BQ=QUERIES, BB=BLOCKS, SPAN=SPAN,
        num_warps=8, num_stages=2,
    )  # fmt: skip


def sift(batch: Batch, scores: Tensor, kept: Tensor, start: int, ratio: int) -> None:
    """Fill the rows of `kept` [T, keep] from `start` on that the scores [rows, most] belong to."""
    count, most = scores.shape
    keep = kept.shape[1]
    room = ROOM * triton.next_power_of_2(keep)
    left = torch.empty((2, count, room), dtype=torch.int32, device=kept.device)
    sieve_kernel[(count,)](
        scores, kept, left[0], left[1], batch.rows_FT, batch.rows, start, most, keep, N=ratio,
        GROUPS=GROUPS_A_KEPT * triton.next_power_of_2(keep), ROOM=room, num_warps=4,
    )  # fmt: skip
