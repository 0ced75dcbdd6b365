"""Launches of the attention kernels, in the order that a layer needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from civetta.kernels.fused.attention import (
    FEW_ROWS,
    PARTITION,
    AttentionSizes,
    attend_kernel,
    merge_kernel,
    pool_kernel,
    rows_kernel,
    scores_kernel,
    select_kernel,
)
from civetta.kernels.matmul.tiling import precision
from civetta.kernels.qsa.triton import SCRATCH_VALUES

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.kernels.fused.launch import Batch

SELECT_BLOCK = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """One layer's pages: k, v [P, 64, G, A], raw index keys [P, 64, X], pooled [P, 64 / ratio, X]."""

    k: Tensor
    v: Tensor
    raw: Tensor
    key: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Angles:
    """cos, sin float32 [T, R] of the rows; inverse_R frequencies and axis_R of every angle."""

    cos_TR: Tensor
    sin_TR: Tensor
    inverse_R: Tensor
    axis_R: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """Norms of queries, keys, index queries and index keys, float32."""

    q: Tensor
    k: Tensor
    index_q: Tensor
    index_k: Tensor


def attend(
    batch: Batch,
    sizes: AttentionSizes,
    pages: Pages,
    angles: Angles,
    gains: Gains,
    proj_TN: Tensor,
    index_TN: Tensor,
    eps: float,
) -> Tensor:
    """The mixer between its projections: gated y [T, Q * A] in proj's dtype; writes the pages.

    proj rows: heads of query and gate, then keys, then values. index rows: index queries, then the
    raw index key.
    """
    s, t, b = sizes, batch.rows, batch.sessions
    dtype, device = proj_TN.dtype, proj_TN.device
    q = torch.empty((t, s.heads, s.width), dtype=dtype, device=device)
    iq = torch.empty((t, s.index_heads, s.index_width), dtype=dtype, device=device)
    half = angles.cos_TR.shape[1]
    rows_kernel[(t, s.heads + 2 * s.kv_heads + s.index_heads + 1)](
        proj_TN, index_TN, gains.q, gains.k, gains.index_q, angles.cos_TR, angles.sin_TR, q, iq,
        pages.k, pages.v, pages.raw, batch.rows_FT, batch.sessions_FB, t, b, proj_TN.stride(0),
        index_TN.stride(0), eps, Q=s.heads, G=s.kv_heads, A=s.width, I=s.index_heads,
        X=s.index_width, R=half, BLOCK=triton.next_power_of_2(max(s.width, s.index_width)),
        num_warps=1,
    )  # fmt: skip
    pool_kernel[(batch.most_rows // s.ratio + 1, b)](
        pages.raw, pages.key, gains.index_k, angles.inverse_R, angles.axis_R, batch.sessions_FB,
        b, eps, N=s.ratio, X=s.index_width, R=half,
        BLOCK=triton.next_power_of_2(s.index_width), num_warps=1,
    )  # fmt: skip
    kept = torch.empty((t, s.keep), dtype=torch.int32, device=device)
    if batch.table_tokens // s.ratio > s.keep:
        _choose(batch, sizes, pages, iq, kept)
    y = torch.empty((t, s.heads * s.width), dtype=dtype, device=device)
    _read(batch, sizes, pages, q, kept, proj_TN, y)
    return y


def _choose(batch: Batch, sizes: AttentionSizes, pages: Pages, iq: Tensor, kept: Tensor) -> None:
    """The best blocks of every row that sees more than it may read."""
    s, t, b = sizes, batch.rows, batch.sessions
    most = batch.table_tokens // s.ratio
    group = max(1, SCRATCH_VALUES // most)
    tile = 64  # not fewer: see FEW_COLS of the products
    for start in range(0, t, group):
        stop = min(start + group, t)
        scores = torch.empty((stop - start, most), dtype=torch.float32, device=iq.device)
        tiles = -(-min(batch.most_rows, stop - start) // tile)
        scores_kernel[(tiles, -(-most // 64), b)](
            iq, pages.key, scores, batch.sessions_FB, b, start, stop, most,
            s.index_width**-0.5, s.keep, N=s.ratio, I=s.index_heads, X=s.index_width, BQ=tile,
            BB=64, PRECISE=precision(iq.dtype, iq.device), num_warps=4,
        )  # fmt: skip
        select_kernel[(stop - start,)](
            scores, kept, batch.rows_FT, t, start, most, s.keep, N=s.ratio, BLOCK=SELECT_BLOCK,
            num_warps=8,
        )  # fmt: skip


def _read(
    batch: Batch,
    sizes: AttentionSizes,
    pages: Pages,
    q: Tensor,
    kept: Tensor,
    proj_TN: Tensor,
    y: Tensor,
) -> None:
    s, t, b = sizes, batch.rows, batch.sessions
    shared = s.heads // s.kv_heads
    parts = -(-min(s.listed, batch.table_tokens) // PARTITION)
    beside = t <= FEW_ROWS
    best = weight = partial = y
    if beside:
        best = torch.empty((t, s.heads, parts), dtype=torch.float32, device=q.device)
        weight = torch.empty_like(best)
        partial = torch.empty((t, s.heads, parts, s.width), dtype=torch.float32, device=q.device)
    attend_kernel[(t, s.kv_heads, parts if beside else 1)](
        q, pages.k, pages.v, kept, proj_TN, y, best, weight, partial, batch.rows_FT,
        batch.sessions_FB, t, b, proj_TN.stride(0), s.width**-0.5, s.keep,
        N=s.ratio, G=s.kv_heads, R=shared, A=s.width,
        BM=max(16, triton.next_power_of_2(shared)), PARTITION=PARTITION, PARTS=parts,
        BESIDE=beside, PRECISE=precision(q.dtype, q.device), num_warps=4,
    )  # fmt: skip
    if beside:
        merge_kernel[(t, s.heads)](
            best, weight, partial, proj_TN, y, batch.rows_FT, t, proj_TN.stride(0),
            PARTS=parts, HEADS=s.heads, A=s.width, num_warps=2,
        )  # fmt: skip
