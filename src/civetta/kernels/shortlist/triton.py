"""What choosing a token needs of a row of logits, on the GPU: 250,000 logits become one kilobyte.

`best_of_segment_kernel` lists the best of a segment of a row and sums its exponentials,
`best_of_row_kernel` those of the row. Sums run in one order, whatever the rows beside this one are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.fused.searches import first_of
from civetta.kernels.shortlist.reference import SUMS

if TYPE_CHECKING:
    from torch import Tensor

SEGMENT = 8192
"""Logits that one program searches in registers."""


@triton.jit
def _ordered(x):
    """Whole numbers that order as finite numbers do, both zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _level(keys, keep):
    """The key of the last of the `keep` highest."""
    value = tl.where(tl.sum((keys >= 0).to(tl.int32), axis=0) >= keep, 0, -(2**31)).to(tl.int32)
    bit = keep * 0 + (1 << 30)
    while bit > 0:
        trial = value | bit
        count = tl.sum((keys >= trial).to(tl.int32), axis=0)
        value = tl.where(count >= keep, trial, value)
        bit = bit >> 1
    return value


@triton.jit
def _uniform(low, high):
    """A number in (0, 1) of two words; see philox.py."""
    bits = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 12
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ** -52


@triton.jit
def _noise(seed, position, token):
    """Gumbel noise of tokens, float64; philox.gumbel to a rounding of the logarithms."""
    half = (token >> 1).to(tl.uint32)
    zero = half * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + (position >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, half, low, high, zero)
    odd = (token & 1) == 1
    return -tl.log(-tl.log(_uniform(tl.where(odd, c, a), tl.where(odd, d, b))))


@triton.jit(do_not_specialize=["T", "V", "stride", "keep"])
def best_of_segment_kernel(
    logits, temperature, drawn, lists, tops, sums, T, V, stride, keep,
    SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """One segment of one row: keys, logits and ids int32 [3, T, SEGMENTS, keep]; its maximum and sums."""
    t, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = segment * SEGMENT + tl.arange(0, SEGMENT)
    ok = c < V
    x = tl.load(logits + t * stride + c, mask=ok, other=float("-inf"))
    bad = ok & ((x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000)
    x = tl.where(bad, 0.0, x)  # such a row means nothing; its sums raise no flags
    at = t * SEGMENTS + segment
    top = tl.max(x, axis=0)
    gap = x.to(tl.float64) - top.to(tl.float64)
    hot = tl.load(temperature + t)
    tl.store(tops + at, top)
    tl.store(sums + at * 3, tl.sum(tl.where(ok, tl.exp(gap / hot), 0.0), axis=0))
    tl.store(sums + at * 3 + 1, tl.sum(tl.where(ok, tl.exp(gap), 0.0), axis=0))
    tl.store(sums + at * 3 + 2, tl.sum(bad.to(tl.float64), axis=0))
    score = x
    if tl.load(drawn + t * 3) != 0:
        seed, position = tl.load(drawn + t * 3 + 1), tl.load(drawn + t * 3 + 2)
        score = (tl.where(ok, x, 0.0).to(tl.float64) / hot + _noise(seed, position, c)).to(
            tl.float32
        )
    key = tl.where(ok, _ordered(score), -(2**31))
    taken, place = first_of(key, _level(key, keep), keep)
    out, step = lists + at * keep + place, T.to(tl.int64) * SEGMENTS * keep
    tl.store(out, key, mask=taken)
    tl.store(out + step, tl.where(ok, x, float("-inf")).to(tl.int32, bitcast=True), mask=taken)
    tl.store(out + 2 * step, tl.minimum(c, V), mask=taken)


@triton.jit(do_not_specialize=["T", "keep", "wide"])
def best_of_row_kernel(
    lists, tops, sums, temperature, words, totals, T, keep, wide,
    SEGMENTS: tl.constexpr, FINAL: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One row: the best of its segments, and their sums added in order."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, FINAL)
    own, step = lists + t * SEGMENTS * keep + c, T.to(tl.int64) * SEGMENTS * keep
    there = c < SEGMENTS * keep
    key = tl.load(own, mask=there, other=-(2**31))
    level = _level(key, keep)
    taken, place = first_of(key, level, keep)
    out = words + t * 2 * wide + 2 * SUMS + place
    tl.store(out, tl.load(own + 2 * step, mask=there, other=0), mask=taken)
    tl.store(out + keep, tl.load(own + step, mask=there, other=0), mask=taken)
    first = t * SEGMENTS
    top = tl.load(tops + first)
    for s in range(1, SEGMENTS):
        top = tl.maximum(top, tl.load(tops + first + s))
    hot = tl.load(temperature + t)
    tempered, plain, bad = hot * 0.0, hot * 0.0, hot * 0.0
    for s in range(SEGMENTS):
        gap = tl.load(tops + first + s).to(tl.float64) - top.to(tl.float64)
        part = sums + (first + s) * 3
        tempered += tl.load(part) * tl.exp(gap / hot)
        plain += tl.load(part + 1) * tl.exp(gap)
        bad += tl.load(part + 2)
    bar = (level ^ ((level >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(totals + t * wide, tempered)
    tl.store(totals + t * wide + 1, plain)
    tl.store(totals + t * wide + 2, bad)
    tl.store(totals + t * wide + 3, bar.to(tl.float64))


def shortlists(logits_TV: Tensor, temperature_T: Tensor, drawn_T3: Tensor, keep: int) -> Tensor:
    """As reference.shortlists; `keep` is at most SEGMENT."""
    rows, vocab = logits_TV.shape
    device = logits_TV.device
    assert logits_TV.stride(1) == 1
    assert drawn_T3.is_contiguous()
    segment = max(triton.next_power_of_2(keep), min(SEGMENT, triton.next_power_of_2(vocab)))
    segments = -(-vocab // segment)
    lists = torch.empty((3, rows, segments, keep), dtype=torch.int32, device=device)
    tops = torch.empty((rows, segments), dtype=torch.float32, device=device)
    sums = torch.empty((rows, segments, 3), dtype=torch.float64, device=device)
    best_of_segment_kernel[(rows, segments)](
        logits_TV, temperature_T, drawn_T3, lists, tops, sums, rows, vocab, logits_TV.stride(0),
        keep, SEGMENTS=segments, SEGMENT=segment, num_warps=max(4, min(16, segment // 512)),
    )  # fmt: skip
    found = torch.empty((rows, SUMS + keep), dtype=torch.float64, device=device)
    final = triton.next_power_of_2(segments * keep)
    best_of_row_kernel[(rows,)](
        lists, tops, sums, temperature_T, found.view(torch.int32), found, rows, keep,
        SUMS + keep, SEGMENTS=segments, FINAL=final, SUMS=SUMS,
        num_warps=max(4, min(16, final // 512)),
    )  # fmt: skip
    return found
