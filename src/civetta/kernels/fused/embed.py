"""Rows of the embedding table into all streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from civetta.kernels.dequant.reference import dequantize_in_runs
from civetta.kernels.fused.launch import ROW_FIELDS

if TYPE_CHECKING:
    from civetta.checkpoint.quant import Weight
    from civetta.kernels.fused.launch import Batch

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable:
    """A table read row by row: numbers [N, K], or bytes of Q8_0 with d float16 [N, K / 32]."""

    codes: Tensor
    d: Tensor | None = None

    @property
    def numbers(self) -> int:
        """Numbers that the planes stand for."""
        return self.codes.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of both planes."""
        return self.codes.nbytes + (0 if self.d is None else self.d.nbytes)


def embedding_table(w: Weight, dtype: torch.dtype, device: torch.device | str) -> EmbeddingTable:
    """The table on `device`; formats other than Q8_0 and plain numbers become numbers of `dtype`."""
    if isinstance(w, Tensor):
        return EmbeddingTable(codes=w.to(device).contiguous())
    if w.format.name != "Q8_0":
        return EmbeddingTable(codes=dequantize_in_runs(w, dtype).to(device).contiguous())
    blocks = w.data_RB.to(device).view(w.rows, -1, w.format.block_bytes)
    d = blocks[:, :, :2].contiguous().view(torch.float16).view(w.rows, -1)
    return EmbeddingTable(codes=blocks[:, :, 2:].flatten(1).contiguous(), d=d)


def embed(batch: Batch, table: EmbeddingTable, x_TSD: Tensor, like: Tensor) -> None:
    """x float32 [T, S, D]: the tokens' rows, rounded to the dtype of `like`, in every stream."""
    rows, streams, width = x_TSD.shape
    embed_kernel[(rows, -(-width // 1024))](
        batch.rows_FT, table.codes, like if table.d is None else table.d, x_TSD, like, rows, width,
        S=streams, KP=table.codes.shape[-1], INT8=table.d is not None, BLOCK=1024,
    )  # fmt: skip
