"""The exact search of the best of some scores, by their bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def taken_of(bits, keep):
    """Which of some scores, by their bits (-1: none), are the `keep` best, and their places.

    Equal ones are taken from below. Scores are not negative: their bits order as they do. The
    search ends early when as many scores as wanted lie at or above its value.
    """
    value = keep * 0
    bit = value + (1 << 30)
    while bit > 0:
        trial = value | bit
        count = tl.sum((bits >= trial).to(tl.int32), axis=0)
        value = tl.where(count >= keep, trial, value)
        bit = tl.where(count == keep, 0, bit >> 1)
    above = bits > value
    need = keep - tl.sum(above.to(tl.int32), axis=0)
    level = bits == value
    # running counts: of equal scores in 17 bits, of better ones above them
    ranks = tl.cumsum(level.to(tl.int32) + (above.to(tl.int32) << 17), axis=0)
    level_rank = ranks & ((1 << 17) - 1)
    taken = above | (level & (level_rank <= need))
    return taken, (ranks >> 17) + tl.minimum(level_rank, need) - 1
