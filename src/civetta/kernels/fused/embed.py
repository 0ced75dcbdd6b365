"""Rows of the embedding table into all streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from civetta.kernels.fused.launch import ROW_FIELDS

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.kernels.fused.launch import Batch
    from civetta.kernels.packed import PackedWeight

TOKEN = tl.constexpr(ROW_FIELDS.index("token"))


@triton.jit(do_not_specialize=["T"])
def embed_kernel(rows, codes, d, x, like, T, D, S: tl.constexpr, KP: tl.constexpr,
                 INT8: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Some columns of one row: numbers as stored, or bytes times the step of their 32."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < D
    token = tl.load(rows + TOKEN * T + t)
    b = tl.load(codes + token * KP + c, mask=ok, other=0)
    if INT8:
        b = b.to(tl.int8, bitcast=True).to(tl.float32)
        b = b * tl.load(d + token * (KP // 32) + c // 32, mask=ok, other=0.0).to(tl.float32)
    b = b.to(like.dtype.element_ty).to(tl.float32)
    for j in tl.static_range(S):
        tl.store(x + (t * S + j) * D + c, b, mask=ok)


def can_embed(table: PackedWeight) -> bool:
    """Whether `embed` reads this format."""
    return table.recipe.bits == 0 or (table.recipe.code == "int8" and table.recipe.span == 32)


def embed(batch: Batch, table: PackedWeight, x_TSD: Tensor, like: Tensor) -> None:
    """x float32 [T, S, D]: the tokens' rows, rounded to the dtype of `like`, in every stream."""
    rows, streams, width = x_TSD.shape
    embed_kernel[(rows, -(-width // 1024))](
        batch.rows_FT, table.codes, like if table.d is None else table.d, x_TSD, like, rows, width,
        S=streams, KP=table.codes.shape[-1], INT8=table.recipe.bits == 8, BLOCK=1024,
    )  # fmt: skip
