"""Which blocks a row reads (model.md E.1): scores of all complete blocks, then the best of them.

Both are exact whatever the form: a choice is a set, ties go to the lower block. A program holds a
segment of a row's scores in registers and searches the bits of the last score that is taken; the
last program of a row to finish chooses among what the segments kept. A context too long for that is
searched in passes (`keep_best`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.fused.launch import POSITION, SESSION, TABLE
from civetta.kernels.fused.searches import scored_rows, taken_of
from civetta.kernels.fused.sieve import SCORES_BYTES, row_scores, sift
from civetta.kernels.matmul.tiling import FEW_ROWS, precision, shared_bytes
from civetta.kernels.ops import PAGE_TOKENS
from civetta.kernels.qsa.triton import SCRATCH_VALUES, keep_best

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.kernels.fused.launch import Batch

PAGE = tl.constexpr(PAGE_TOKENS)

SEGMENT = 8192
"""Scores that one program searches."""

MOST_SEGMENTS = 16
AT_ONCE = 1 << 14
"""Most scores of segments that one program searches in the end; running counts share an int32."""

PASS_BLOCK = 2048
"""Scores of a step when they are searched in passes."""


@triton.jit(do_not_specialize=["B", "start", "stop", "most"])
def scores_kernel(
    iq, key_pages, scores, sessions, B, start, stop, most, scale, keep,
    N: tl.constexpr, I: tl.constexpr, X: tl.constexpr, BQ: tl.constexpr, BB: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """Scores of some rows of one session for one tile of blocks."""
    b = tl.program_id(2)
    t, ok_t, most_seen = scored_rows(sessions, B, b, start, stop, tl.program_id(0), N, BQ)
    block = tl.program_id(1) * BB + tl.arange(0, BB)
    if most_seen <= keep:
        return
    if tl.program_id(1) * BB >= most_seen:
        return
    table = tl.load(sessions + TABLE * B + b).to(tl.pointer_type(tl.int64))
    IN_PAGE: tl.constexpr = PAGE // N
    ok_b = block < most_seen
    x = tl.arange(0, X)
    page = tl.load(table + block // IN_PAGE, mask=ok_b, other=0)
    p_k = key_pages + (page * IN_PAGE + block % IN_PAGE)[None, :] * X + x[:, None]
    k_t = tl.load(p_k, mask=ok_b[None, :], other=0.0)
    total = tl.zeros((BQ, BB), dtype=tl.float32)
    for h in range(I):
        p_q = iq + (t * I + h)[:, None] * X + x[None, :]
        b_q = tl.load(p_q, mask=ok_t[:, None], other=0.0)
        if PRECISE == "":
            dots = tl.dot(b_q, k_t)
        else:
            dots = tl.dot(b_q, k_t, input_precision=PRECISE)
        total += tl.where(dots > 0.0, dots, 0.0)
    p_s = scores + (t - start)[:, None] * most + block[None, :]
    tl.store(p_s, total * scale, mask=ok_t[:, None] & ok_b[None, :])


@triton.jit(do_not_specialize=["T", "start", "most", "keep"])
def select_kernel(
    scores, kept, values, blocks, counters, rows, T, start, most, keep, N: tl.constexpr,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """The best blocks of one segment of one row's scores; of the row, by the last to finish.

    values, blocks [rows, SEGMENTS, keep] hold the segments' best, ascending as the blocks are.
    """
    i, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(rows + SESSION * T + start + i) < 0:
        return
    seen = ((tl.load(rows + POSITION * T + start + i) + 1) // N).to(tl.int32)
    if seen <= keep:
        return
    first = segment * SEGMENT
    if first >= seen:
        return
    block = first + tl.arange(0, SEGMENT)
    p_score = scores + i * most + block
    bits = tl.load(p_score, mask=block < seen, other=0.0).to(tl.int32, bitcast=True)
    taken, place = taken_of(tl.where(block < seen, bits, -1), keep)
    used = (seen + SEGMENT - 1) // SEGMENT
    if used == 1:
        tl.store(kept + (start + i) * keep + place, block, mask=taken)
        return
    own = (i * SEGMENTS + segment) * keep
    tl.store(values + own + place, bits, mask=taken)
    tl.store(blocks + own + place, block, mask=taken)
    tl.debug_barrier()
    done = tl.atomic_add(counters + i, 1)
    if done < used - 1:
        return
    tl.store(counters + i, 0)
    c = tl.arange(0, FINAL)
    there = (c < used * keep) & (c % keep < seen - (c // keep) * SEGMENT)
    at = i * SEGMENTS * keep + c
    best = tl.load(values + at, mask=there, other=-1, cache_modifier=".cg")
    block = tl.load(blocks + at, mask=there, other=0, cache_modifier=".cg")
    taken, place = taken_of(best, keep)
    tl.store(kept + (start + i) * keep + place, block, mask=taken)


@triton.jit(do_not_specialize=["T", "start", "most"])
def passes_kernel(scores, kept, rows, T, start, most, keep, N: tl.constexpr, BLOCK: tl.constexpr):
    """The best blocks of one row, searched in passes over its scores."""
    i = tl.program_id(0).to(tl.int64)
    if tl.load(rows + SESSION * T + start + i) < 0:
        return
    seen = ((tl.load(rows + POSITION * T + start + i) + 1) // N).to(tl.int32)
    if seen <= keep:
        return
    keep_best(scores + i * most, kept + (start + i) * keep, seen, keep, BLOCK)


def choose(batch: Batch, key_pages: Tensor, iq_TIX: Tensor, ratio: int, keep: int) -> Tensor:
    """int32 [T, keep]: the best complete blocks of every row that sees more than `keep`, ascending.

    Other rows' places are not written. key_pages [P, 64 / ratio, X] holds the index keys.
    """
    t, heads, width = iq_TIX.shape
    device = iq_TIX.device
    kept = torch.empty((t, keep), dtype=torch.int32, device=device)
    most = batch.table_tokens // ratio
    if most <= keep:
        return kept
    exact = precision(iq_TIX.dtype, device)
    few = t <= FEW_ROWS or exact != ""
    tile_q, tile_b = 64, 64 if few else 128  # queries not fewer: see FEW_COLS of the products
    group = min(max(1, SCRATCH_VALUES // most), t)
    room = torch.empty((group, most), dtype=torch.float32, device=device)
    for start in range(0, t, group):
        stop = min(start + group, t)
        scores = room[: stop - start]
        if not few and shared_bytes(device) > SCORES_BYTES:
            row_scores(batch, key_pages, iq_TIX, scores, start, ratio, keep)
        else:
            tiles = -(-min(batch.most_rows, stop - start) // tile_q)
            scores_kernel[(tiles, -(-most // tile_b), batch.sessions)](
                iq_TIX, key_pages, scores, batch.sessions_FB, batch.sessions, start, stop, most,
                width**-0.5, keep, N=ratio, I=heads, X=width, BQ=tile_q, BB=tile_b, PRECISE=exact,
                num_warps=4 if few else 8,
            )  # fmt: skip
        _select(batch, scores, kept, start, ratio)
    return kept


def _select(batch: Batch, scores: Tensor, kept: Tensor, start: int, ratio: int) -> None:
    """Fill the rows of `kept` from `start` on that the scores [rows, most] belong to."""
    count, most = scores.shape
    keep, t = kept.shape[1], batch.rows
    if count > FEW_ROWS:
        sift(batch, scores, kept, start, ratio)
        return
    segment = min(SEGMENT, triton.next_power_of_2(most))
    segments = -(-most // segment)
    if segments > MOST_SEGMENTS or segments * keep > AT_ONCE or count > len(batch.counts):
        passes_kernel[(count,)](
            scores, kept, batch.rows_FT, t, start, most, keep, N=ratio, BLOCK=PASS_BLOCK,
            num_warps=8,
        )  # fmt: skip
        return
    best = torch.empty(
        (2, count, segments, keep) if segments > 1 else (2, 0),
        dtype=torch.int32,
        device=kept.device,
    )
    select_kernel[(count, segments)](
        scores, kept, best[0], best[1], batch.counts, batch.rows_FT, t, start, most, keep, N=ratio,
        SEGMENT=segment, SEGMENTS=segments, FINAL=triton.next_power_of_2(segments * keep),
        num_warps=max(4, min(16, max(segment, segments * keep) // 1024)),
    )  # fmt: skip
