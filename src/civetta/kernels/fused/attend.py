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
)
from civetta.kernels.fused.choice import choose
from civetta.kernels.matmul.tiling import precision

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.kernels.fused.launch import Batch

WARPS, STAGES = 4, 3
"""Of the reading kernel when rows are many; float32 has room for two stages."""


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
    kept = choose(batch, pages.key, iq, s.ratio, s.keep)
    y = torch.empty((t, s.heads * s.width), dtype=dtype, device=device)
    _read(batch, sizes, pages, q, kept, proj_TN, y)
    return y


def _read(
    batch: Batch,
    sizes: AttentionSizes,
    pages: Pages,
    q: Tensor,
    kept: Tensor,
    proj_TN: Tensor,
    y: Tensor,
) -> None:
    exact = precision(q.dtype, q.device)
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
        BESIDE=beside, PRECISE=exact, num_warps=WARPS,
        num_stages=1 if beside else 2 if exact else STAGES,
    )  # fmt: skip
    if beside:
        merge_kernel[(t, s.heads)](
            best, weight, partial, proj_TN, y, batch.rows_FT, t, proj_TN.stride(0),
            PARTS=parts, HEADS=s.heads, A=s.width, num_warps=2,
        )  # fmt: skip
