"""Sparse attention on a GPU: pooled index keys, exact block choice, paged attention (model.md E.1).

Attention is one kernel for every use. A program takes one partition of 512 keys for one tile of
query rows and keeps its maximum, weight and values; a second kernel merges the partitions of a row in
order. Tile height and warps are fixed for each of the two forms (all keys; own list), so prefill and
decode run the same code over the same numbers (design.md section 2).

The best blocks come from a radix search over the score's bits: exact, with ties to the lower block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.ops import ATTENTION_PARTITION, PAGE_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

PART = tl.constexpr(ATTENTION_PARTITION)
PAGE = tl.constexpr(PAGE_TOKENS)
DENSE_ROWS = 32
"""Query rows (token and head) of a tile when all keys are read."""

SCRATCH_VALUES = 1 << 26
"""Float32 values of partial results, or of block scores, held at one time."""

SELECT_BLOCK = 1024


@triton.jit
def index_pool_kernel(raw, gain, cos, sin, y, eps, N: tl.constexpr, X: tl.constexpr,
                      HALF: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One block: mean of its raw keys, RMS norm, rope at its first token."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    ok = c < X
    partner = tl.where(c < HALF, c + HALF, c - HALF)
    turned = c < 2 * HALF
    mean = tl.zeros((BLOCK,), dtype=tl.float32)
    mate = tl.zeros((BLOCK,), dtype=tl.float32)
    for n in tl.static_range(N):
        mean += tl.load(raw + (i * N + n) * X + c, mask=ok, other=0.0).to(tl.float32)
        mate += tl.load(raw + (i * N + n) * X + partner, mask=turned, other=0.0).to(tl.float32)
    dtype = y.dtype.element_ty
    mean = (mean / N).to(dtype).to(tl.float32)
    mate = (mate / N).to(dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(mean * mean, axis=0) / X + eps)
    b_gain = tl.load(gain + c, mask=ok, other=0.0)
    b_mate_gain = tl.load(gain + partner, mask=turned, other=0.0)
    mean = (mean * scale * b_gain).to(dtype).to(tl.float32)
    mate = (mate * scale * b_mate_gain).to(dtype).to(tl.float32)
    b_cos = tl.load(cos + i * HALF + c % HALF, mask=turned, other=1.0)
    b_sin = tl.load(sin + i * HALF + c % HALF, mask=turned, other=0.0)
    out = mean * b_cos + tl.where(c < HALF, -mate, mate) * b_sin
    tl.store(y + i * X + c, tl.where(turned, out, mean).to(dtype), mask=ok)


def index_pool(
    raw_BNX: Tensor, gain_X: Tensor, eps: float, cos_BR: Tensor, sin_BR: Tensor
) -> Tensor:
    """Mean of a block's raw keys, then norm, then rope at its first token; see `Ops.index_pool`."""
    raw = raw_BNX.contiguous()
    blocks, ratio, width = raw.shape
    y = torch.empty((blocks, width), dtype=raw.dtype, device=raw.device)
    index_pool_kernel[(blocks,)](
        raw, gain_X, cos_BR.contiguous(), sin_BR.contiguous(), y, eps,
        N=ratio, X=width, HALF=cos_BR.shape[-1], BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return y


@triton.jit
def scores_kernel(q, keys, table, blocks, scores, rows, most, scale, IN_PAGE: tl.constexpr,
                  HEADS: tl.constexpr, X: tl.constexpr, BQ: tl.constexpr, BB: tl.constexpr,
                  PRECISE: tl.constexpr):  # fmt: skip
    """Scores of one tile of queries for one tile of blocks; blocks a query does not see get -1."""
    t = tl.program_id(0) * BQ + tl.arange(0, BQ)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    x = tl.arange(0, X)
    ok_t, ok_b = t < rows, b < most
    page = tl.load(table + b // IN_PAGE, mask=ok_b, other=0).to(tl.int64)
    p_k = keys + (page * IN_PAGE + b % IN_PAGE)[None, :] * X + x[:, None]
    k_t = tl.load(p_k, mask=ok_b[None, :], other=0.0)
    total = tl.zeros((BQ, BB), dtype=tl.float32)
    for h in tl.static_range(HEADS):
        p_q = q + (t.to(tl.int64) * HEADS + h)[:, None] * X + x[None, :]
        b_q = tl.load(p_q, mask=ok_t[:, None], other=0.0)
        if PRECISE:
            dots = tl.dot(b_q, k_t, input_precision="ieee")
        else:
            dots = tl.dot(b_q, k_t)
        total += tl.where(dots > 0.0, dots, 0.0)
    seen = tl.load(blocks + t, mask=ok_t, other=0)
    total = tl.where(b[None, :] < seen[:, None], total * scale, -1.0)
    p_s = scores + t.to(tl.int64)[:, None] * most + b[None, :]
    tl.store(p_s, total, mask=ok_t[:, None] & ok_b[None, :])


@triton.jit
def keep_best(p_scores, p_kept, seen, keep, BLOCK: tl.constexpr):
    """The `keep` best of a row's first `seen` scores, ascending, ties to the lower block.

    Threshold by radix, then one pass out. Scores are not negative: their bits order as they do.
    """
    lane = tl.arange(0, BLOCK)
    digit = tl.arange(0, 256)
    need = keep
    prefix = 0
    for step in tl.static_range(4):
        counts = tl.zeros((256,), dtype=tl.int32)
        for start in range(0, seen, BLOCK):
            block = start + lane
            inside = block < seen
            bits = tl.load(p_scores + block, mask=inside, other=0.0).to(tl.int32, bitcast=True)
            if step > 0:
                inside = inside & ((bits >> (32 - 8 * step)) == prefix)
            counts += tl.histogram((bits >> (24 - 8 * step)) & 255, 256, mask=inside)
        at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        # the highest digit that still leaves enough at or above it
        winner = tl.max(tl.where(at_least >= need, digit, 0), axis=0)
        above = tl.sum(tl.where(digit == winner, at_least - counts, 0), axis=0)
        need -= above
        prefix = (prefix << 8) | winner
    out = 0
    level_before = 0
    for start in range(0, seen, BLOCK):
        block = start + lane
        inside = block < seen
        bits = tl.load(p_scores + block, mask=inside, other=0.0).to(tl.int32, bitcast=True)
        level = (inside & (bits == prefix)).to(tl.int32)
        rank = level_before + tl.cumsum(level, axis=0)
        taken = (inside & (bits > prefix)) | ((level == 1) & (rank <= need))
        place = out + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(p_kept + place, block.to(p_kept.dtype.element_ty), mask=taken)
        out += tl.sum(taken.to(tl.int32), axis=0)
        level_before += tl.sum(level, axis=0)


@triton.jit
def select_kernel(scores, blocks, kept, most, keep, BLOCK: tl.constexpr):
    """The `keep` best blocks of one query, ascending."""
    t = tl.program_id(0).to(tl.int64)
    seen = tl.load(blocks + t).to(tl.int32)
    keep_best(scores + t * most, kept + t * keep, seen, keep, BLOCK)


def index_select(
    q_TIX: Tensor, key_pages: Tensor, table_P: Tensor, blocks_T: Tensor, keep: int
) -> Tensor:
    """The `keep` best complete blocks of each query, ascending; see `Ops.index_select`."""
    q, blocks = q_TIX.contiguous(), blocks_T.to(torch.int64).contiguous()
    rows, heads, width = q.shape
    most = key_pages.shape[1] * len(table_P)
    kept = torch.empty((rows, keep), dtype=torch.int64, device=q.device)
    group = max(1, SCRATCH_VALUES // most)
    for start in range(0, rows, group):
        part = slice(start, min(start + group, rows))
        n = part.stop - part.start
        scores = torch.empty((n, most), dtype=torch.float32, device=q.device)
        scores_kernel[(-(-n // 32), -(-most // 64))](
            q[part], key_pages, table_P, blocks[part], scores, n, most, width**-0.5,
            IN_PAGE=key_pages.shape[1], HEADS=heads, X=width, BQ=32, BB=64,
            PRECISE=q.dtype == torch.float32,
        )  # fmt: skip
        select_kernel[(n,)](scores, blocks[part], kept[part], most, keep, BLOCK=SELECT_BLOCK)
    return kept


@triton.jit
def attend_kernel(
    q, k_pages, v_pages, table, tokens, best, weight, value, rows, first, width, scale,
    G: tl.constexpr, R: tl.constexpr, A: tl.constexpr, BM: tl.constexpr,
    SPARSE: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """One partition for one tile of query rows; rows count token by token, head by head.

    SPARSE: the tile holds the R heads of one token, keys are that token's list [width].
    """
    i_m, g, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, BM)
    a = tl.arange(0, A)
    n = tl.arange(0, PAGE)
    if SPARSE:
        t, head, ok = i_m + lane * 0, lane, lane < R
        limit = width
    else:
        row = i_m * BM + lane
        t, head, ok = row // R, row % R, row < rows * R
        limit = first + min(rows - 1, (i_m * BM + BM - 1) // R) + 1
    at = (t.to(tl.int64) * G + g) * R + head
    b_q = tl.load(q + at[:, None] * A + a[None, :], mask=ok[:, None], other=0.0)
    best_m = tl.full((BM,), float("-inf"), dtype=tl.float32)
    weight_m = tl.zeros((BM,), dtype=tl.float32)
    value_ma = tl.zeros((BM, A), dtype=tl.float32)
    for start in range(0, PART, PAGE):
        j = part * PART + start
        if j < limit:
            if SPARSE:
                token = tl.load(tokens + i_m.to(tl.int64) * width + j + n, mask=j + n < width,
                                other=-1)  # fmt: skip
                known = token >= 0
                seen = known[None, :] & ok[:, None]
                page = tl.load(table + tl.where(known, token, 0) // PAGE, mask=known, other=0)
                place = page.to(tl.int64) * PAGE + tl.where(known, token, 0) % PAGE
            else:
                known = n >= 0
                seen = ((j + n)[None, :] <= (first + t)[:, None]) & ok[:, None]
                place = tl.load(table + j // PAGE).to(tl.int64) * PAGE + n
            p_k = k_pages + (place * G + g)[None, :] * A + a[:, None]
            k_t = tl.load(p_k, mask=known[None, :], other=0.0)
            if PRECISE:
                scores = tl.dot(b_q, k_t, input_precision="ieee") * scale
            else:
                scores = tl.dot(b_q, k_t) * scale
            scores = tl.where(seen, scores, float("-inf"))
            top = tl.maximum(best_m, tl.max(scores, axis=1))
            shift = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp(scores - shift[:, None])
            fade = tl.exp(best_m - shift)
            weight_m = weight_m * fade + tl.sum(p, axis=1)
            p_v = v_pages + (place * G + g)[:, None] * A + a[None, :]
            b_v = tl.load(p_v, mask=known[:, None], other=0.0)
            value_ma = value_ma * fade[:, None]
            if PRECISE:
                value_ma = tl.dot(p, b_v, value_ma, input_precision="ieee")
            else:
                value_ma = tl.dot(p.to(b_v.dtype), b_v, value_ma)
            best_m = top
    parts = tl.num_programs(2)
    out = at * parts + part
    tl.store(best + out, best_m, mask=ok)
    tl.store(weight + out, weight_m, mask=ok)
    tl.store(value + out[:, None] * A + a[None, :], value_ma, mask=ok[:, None])


@triton.jit
def merge_kernel(best, weight, value, y, parts, A: tl.constexpr):
    """Partitions of one query row, merged in order."""
    i = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, A)
    top = float("-inf")
    total = 0.0
    sum_a = tl.zeros((A,), dtype=tl.float32)
    for part in range(parts):
        at = i * parts + part
        b_best = tl.load(best + at)
        new = tl.maximum(top, b_best)
        shift = tl.where(new == float("-inf"), 0.0, new)
        fade, share = tl.exp(top - shift), tl.exp(b_best - shift)
        total = total * fade + tl.load(weight + at) * share
        sum_a = sum_a * fade + tl.load(value + at * A + a) * share
        top = new
    tl.store(y + i * A + a, (sum_a / total).to(y.dtype.element_ty))


def attend_dense(
    q_TQA: Tensor, k_pages: Tensor, v_pages: Tensor, table_P: Tensor, first: int
) -> Tensor:
    """Causal attention over all keys; see `Ops.attend_dense`."""
    return _attend(q_TQA, k_pages, v_pages, table_P, None, first)


def attend_sparse(
    q_TQA: Tensor, k_pages: Tensor, v_pages: Tensor, table_P: Tensor, tokens_TK: Tensor
) -> Tensor:
    """Attention over each query's own token list; see `Ops.attend_sparse`."""
    return _attend(q_TQA, k_pages, v_pages, table_P, tokens_TK.contiguous(), 0)


def _attend(
    q_TQA: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table_P: Tensor,
    tokens_TK: Tensor | None,
    first: int,
) -> Tensor:
    """Groups of query rows through both kernels, so that partial results stay bounded."""
    q = q_TQA.contiguous()
    rows, heads, width = q.shape
    y = torch.empty_like(q)
    keys = first + rows if tokens_TK is None else tokens_TK.shape[1]
    parts = -(-keys // ATTENTION_PARTITION)
    group = max(1, SCRATCH_VALUES // (parts * heads * width))
    for start in range(0, rows, group):
        part = slice(start, min(start + group, rows))
        own = None if tokens_TK is None else tokens_TK[part]
        _attend_group(q[part], k_pages, v_pages, table_P, own, first + start, parts, y[part])
    return y


def _attend_group(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table_P: Tensor,
    tokens_TK: Tensor | None,
    first: int,
    parts: int,
    y: Tensor,
) -> None:
    rows, heads, width = q.shape
    groups = k_pages.shape[2]
    shared = heads // groups
    best = torch.empty((rows, heads, parts), dtype=torch.float32, device=q.device)
    weight = torch.empty_like(best)
    value = torch.empty((rows, heads, parts, width), dtype=torch.float32, device=q.device)
    sparse = tokens_TK is not None
    tile = max(16, triton.next_power_of_2(shared)) if sparse else DENSE_ROWS
    tiles = rows if sparse else -(-rows * shared // tile)
    attend_kernel[(tiles, groups, parts)](
        q, k_pages, v_pages, table_P, q if tokens_TK is None else tokens_TK, best, weight, value,
        rows, first, 0 if tokens_TK is None else tokens_TK.shape[1], width**-0.5,
        G=groups, R=shared, A=width, BM=tile, SPARSE=sparse, PRECISE=q.dtype == torch.float32,
        num_warps=4,
    )  # fmt: skip
    merge_kernel[(rows * heads,)](best, weight, value, y, parts, A=width, num_warps=2)
