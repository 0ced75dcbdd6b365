"""What the ways to choose blocks share: which rows a tile scores, and the search of scores by bits."""

from __future__ import annotations

import triton
import triton.language as tl

from civetta.kernels.fused.launch import FIRST, FIRST_ROW, ROWS


@triton.jit
def scored_rows(sessions, B, b, start, stop, tile, N: tl.constexpr, BQ: tl.constexpr):
    """Rows of a tile of session `b` within [start, stop), which of them there are, and the complete
    blocks that the newest one sees."""
    first_row = tl.load(sessions + FIRST_ROW * B + b)
    count = tl.load(sessions + ROWS * B + b)
    first = tl.load(sessions + FIRST * B + b)
    t = tl.maximum(first_row, start) + tile * BQ + tl.arange(0, BQ)
    end = tl.minimum(first_row + count, stop)
    newest = first + tl.minimum(tl.max(t, axis=0), end - 1) - first_row
    return t, t < end, (newest + 1) // N


@triton.jit
def level_of(bits, keep, most):
    """A value that at least `keep` of some scores reach, by their bits (-1: none).

    The search ends early when no more than `most` reach it; with `most` = `keep` it is the value of
    the last score that is taken.
    """
    value = keep * 0
    bit = value + (1 << 30)
    while bit > 0:
        trial = value | bit
        count = tl.sum((bits >= trial).to(tl.int32), axis=0)
        value = tl.where(count >= keep, trial, value)
        bit = tl.where((count >= keep) & (count <= most), 0, bit >> 1)
    return value


@triton.jit
def taken_of(bits, keep):
    """Which of some scores, by their bits (-1: none), are the `keep` best, and their places.

    Equal ones are taken from below. Scores are not negative: their bits order as they do.
    """
    return first_of(bits, level_of(bits, keep, keep), keep)


@triton.jit
def first_of(keys, value, keep):
    """Which keys are the `keep` highest, `value` being the last of them, and their places in order.

    Equal ones are taken from below.
    """
    above = keys > value
    need = keep - tl.sum(above.to(tl.int32), axis=0)
    level = keys == value
    # running counts: of equal keys in 17 bits, of better ones above them
    ranks = tl.cumsum(level.to(tl.int32) + (above.to(tl.int32) << 17), axis=0)
    level_rank = ranks & ((1 << 17) - 1)
    taken = above | (level & (level_rank <= need))
    return taken, (ranks >> 17) + tl.minimum(level_rank, need) - 1
