"""Products with packed weights on a GPU: one kernel for every format, for one row or thousands.

Legend: M rows of x, N outputs, K inputs; E stacked matrices (experts). The kernel computes
y^T = W x^T so that the decoded weights are the operand held in registers.

The inner dimension is cut into parts of PART_COLS columns. A part starts a fresh accumulator and the
parts are added in order, whether one program walks them all (many rows) or a program each takes one
and a second kernel adds them (few rows). So a row's bits do not depend on how many rows share the
launch (design.md section 2). The tile sizes may follow the batch freely: `tl.dot` adds along K in
one order whatever the tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.packed import HALF_COLS, TILE_COLS, PackedWeight

if TYPE_CHECKING:
    from torch import Tensor

PART_COLS = 1024
"""Columns of one accumulator."""

FEW_ROWS = 64
"""Up to so many rows, the parts of the inner dimension run beside each other."""

TILE_COLS_C = tl.constexpr(TILE_COLS)
HALF_COLS_C = tl.constexpr(HALF_COLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Rows sorted by the matrix they meet, cut into tiles of one matrix each.

    slot_S int32: row numbers in sorted order; tile_expert_I, tile_row_I int32: matrix of each tile
    (-1: no tile) and its first place in slot_S; end_E int32: where each matrix's rows end.
    """

    tile_rows: int
    slot_S: Tensor
    tile_expert_I: Tensor
    tile_row_I: Tensor
    end_E: Tensor


@triton.jit
def _levels(codes, bits_high, table, OFFSET: tl.constexpr, CODE: tl.constexpr):
    """Codes to numbers before the step: float32."""
    whole = codes.to(tl.int32) | bits_high
    if CODE == "levels":
        return tl.load(table + whole)
    return (whole - OFFSET).to(tl.float32)


@triton.jit
def _stepped(
    values, scale, minimum, d, dmin, row, cols, GROUP: tl.constexpr, SCALE: tl.constexpr,
    SPAN: tl.constexpr, LOW: tl.constexpr, KP: tl.constexpr, mask,
):  # fmt: skip
    """values [n, k] times their step, plus their low; row [n, 1] int64, cols [1, k]."""
    if SPAN == 0:
        p_d = d + row + cols * 0
    else:
        p_d = d + row * ((KP + SPAN - 1) // SPAN) + cols // SPAN
    b_d = tl.load(p_d, mask=mask, other=0.0).to(tl.float32)
    groups = (KP + GROUP - 1) // GROUP
    if SCALE == "none":
        out = b_d * values
    else:
        b_scale = tl.load(scale + row * groups + cols // GROUP, mask=mask, other=0)
        if SCALE == "fp8":
            out = (b_scale.to(tl.float8e4nv, bitcast=True).to(tl.float32) * values) * b_d
        else:
            out = (b_d * b_scale.to(tl.float32)) * values
    if LOW == "half":
        out += tl.load(minimum + row * groups + cols // GROUP, mask=mask, other=0.0).to(tl.float32)
    if LOW == "scaled":
        b_minimum = tl.load(minimum + row * groups + cols // GROUP, mask=mask, other=0)
        p_dmin = dmin + row * ((KP + SPAN - 1) // SPAN) + cols // SPAN
        b_dmin = tl.load(p_dmin, mask=mask, other=0.0).to(tl.float32)
        out -= b_dmin * b_minimum.to(tl.float32)
    return out


@triton.jit
def _spare_bits(high, row, cols, BITS: tl.constexpr, KP: tl.constexpr, mask):
    """Bits 4 and up of the codes at cols [1, k]: int32."""
    WIDTH: tl.constexpr = BITS - 4
    PER: tl.constexpr = 8 // WIDTH
    b = tl.load(high + row * (KP // PER) + cols // PER, mask=mask, other=0).to(tl.int32)
    return ((b >> ((cols % PER) * WIDTH)) & ((1 << WIDTH) - 1)) << 4


@triton.jit
def _dot(acc, w, x_t, PRECISE: tl.constexpr):
    if PRECISE:
        return tl.dot(w, x_t, acc, input_precision="ieee")
    return tl.dot(w, x_t, acc)


@triton.jit
def _part(
    x, i_x, codes, high, scale, minimum, d, dmin, table, row, k_start, k_stop, K, ok_n, ok_m,
    BN: tl.constexpr, BM: tl.constexpr, KP: tl.constexpr, BITS: tl.constexpr,
    CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    SPAN: tl.constexpr, LOW: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Sum over columns [k_start, k_stop) of W x^T: float32 [BN, BM]."""
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    mask = ok_n[:, None]
    half = tl.arange(0, HALF_COLS_C)[None, :]
    wide = tl.arange(0, TILE_COLS_C)[None, :]
    for k in range(k_start, k_stop, TILE_COLS_C):
        if BITS == 0 or BITS == 8:  # noqa: PLR1714 - Triton has no sets
            cols = k + wide
            inside = mask & (cols < K)
            w = tl.load(codes + row * KP + cols, mask=inside, other=0)
            if BITS == 8:
                if CODE == "fp8":
                    values = w.to(tl.float8e4nv, bitcast=True).to(tl.float32)
                else:
                    values = w.to(tl.int8, bitcast=True).to(tl.float32)
                values = _stepped(
                    values, scale, minimum, d, dmin, row, cols, GROUP, SCALE, SPAN, LOW, KP, inside
                )
            else:
                values = w
            p_x = x + i_x[None, :] + cols.trans(1, 0)
            x_t = tl.load(p_x, mask=ok_m[None, :] & (cols < K).trans(1, 0), other=0.0)
            acc = _dot(acc, values.to(x_t.dtype), x_t, PRECISE)
        else:
            b_codes = tl.load(codes + row * (KP // 2) + k // 2 + half, mask=mask, other=0)
            for side in tl.static_range(2):
                cols = k + side * HALF_COLS_C + half
                nibble = (b_codes >> (4 * side)) & 15
                spare = tl.zeros((1, 1), dtype=tl.int32)
                if BITS > 4:
                    spare = _spare_bits(high, row, cols, BITS, KP, mask)
                values = _levels(nibble, spare, table, OFFSET, CODE)
                values = _stepped(
                    values, scale, minimum, d, dmin, row, cols, GROUP, SCALE, SPAN, LOW, KP, mask
                )
                p_x = x + i_x[None, :] + cols.trans(1, 0)
                x_t = tl.load(p_x, mask=ok_m[None, :] & (cols < K).trans(1, 0), other=0.0)
                acc = _dot(acc, values.to(x_t.dtype), x_t, PRECISE)
    return acc


@triton.jit
def product_kernel(
    x, y, codes, high, scale, minimum, d, dmin, table,
    slot, tile_expert, tile_row, end,
    M, N, x_stride, y_part_stride, x_divisor, K: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, KP: tl.constexpr, BITS: tl.constexpr,
    CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    SPAN: tl.constexpr, LOW: tl.constexpr, PRECISE: tl.constexpr, PART: tl.constexpr,
    SPLIT: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """One tile of outputs for one tile of rows; with SPLIT, of one part of K (float32 parts)."""
    i_n, i_m = tl.program_id(0), tl.program_id(1)
    n = i_n * BN + tl.arange(0, BN)
    ok_n = n < N
    if GROUPED:
        expert = tl.load(tile_expert + i_m)
        if expert < 0:
            return
        place = tl.load(tile_row + i_m) + tl.arange(0, BM)
        ok_m = place < tl.load(end + expert)
        m = tl.load(slot + place, mask=ok_m, other=0)
        row = (expert.to(tl.int64) * N + n)[:, None]
    else:
        m = i_m * BM + tl.arange(0, BM)
        ok_m = m < M
        row = n.to(tl.int64)[:, None]
    i_x = (m // x_divisor).to(tl.int64) * x_stride
    if SPLIT:
        part = tl.program_id(2)
        k_start = part * PART
        total = _part(
            x, i_x, codes, high, scale, minimum, d, dmin, table, row,
            k_start, min(k_start + PART, K), K, ok_n, ok_m,
            BN, BM, KP, BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW, PRECISE,
        )  # fmt: skip
        y += part.to(tl.int64) * y_part_stride
    else:
        total = tl.zeros((BN, BM), dtype=tl.float32)
        for k_start in range(0, K, PART):
            total += _part(
                x, i_x, codes, high, scale, minimum, d, dmin, table, row,
                k_start, min(k_start + PART, K), K, ok_n, ok_m,
                BN, BM, KP, BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW, PRECISE,
            )  # fmt: skip
    p_y = y + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(p_y, total.to(y.dtype.element_ty), mask=ok_n[:, None] & ok_m[None, :])


@triton.jit
def add_parts_kernel(parts, y, count, part_stride, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """y = the parts added in order, from zero as the one-program form does."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = i < count
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + part * part_stride + i, mask=ok, other=0.0)
    tl.store(y + i, total.to(y.dtype.element_ty), mask=ok)


def matmul(x_TK: Tensor, w: PackedWeight, dtype: torch.dtype) -> Tensor:
    """y_TN = x w^T with operands in x's dtype and float32 accumulation; see `Ops.matmul`."""
    x_TK = x_TK.contiguous()
    rows = x_TK.shape[0]
    return _launch(x_TK, w, dtype, rows=rows, divisor=1, groups=None)


def matmul_grouped(
    x_TK: Tensor, w: PackedWeight, dtype: torch.dtype, groups: Groups, rows: int, divisor: int
) -> Tensor:
    """Row r of y [rows, N] is x[r // divisor] times the matrix of r's group, transposed."""
    return _launch(x_TK.contiguous(), w, dtype, rows=rows, divisor=divisor, groups=groups)


def tile_rows_for(rows: int) -> int:
    """Rows of a tile: at least what a matrix unit takes, more as the batch grows."""
    if rows <= 16:
        return 16
    return 32 if rows <= 32 else 64 if rows <= 512 else 128


def _launch(
    x_TK: Tensor,
    w: PackedWeight,
    dtype: torch.dtype,
    *,
    rows: int,
    divisor: int,
    groups: Groups | None,
) -> Tensor:
    r, parts = w.recipe, -(-w.cols // PART_COLS)
    few = rows <= FEW_ROWS
    split = few and parts > 1
    y = torch.empty((parts, rows, w.rows) if split else (rows, w.rows),
                    dtype=torch.float32 if split else dtype, device=x_TK.device)  # fmt: skip
    tile_m = groups.tile_rows if groups else tile_rows_for(rows)
    tile_n = 64 if few else 128
    tiles = len(groups.tile_expert_I) if groups else -(-rows // tile_m)
    none = x_TK
    grid = (-(-w.rows // tile_n), tiles, parts if split else 1)
    product_kernel[grid](
        x_TK, y, w.codes, *(none if p is None else p
                            for p in (w.high, w.scale, w.minimum, w.d, w.dmin, w.levels)),
        *((groups.slot_S, groups.tile_expert_I, groups.tile_row_I, groups.end_E)
          if groups else (none,) * 4),
        rows, w.rows, x_TK.stride(0), rows * w.rows, divisor, w.cols,
        BN=tile_n, BM=tile_m, KP=padded_cols(w), BITS=r.bits, CODE=r.code, OFFSET=r.offset,
        GROUP=r.group, SCALE=r.scale, SPAN=r.span, LOW=r.low,
        PRECISE=x_TK.dtype == torch.float32, PART=PART_COLS, SPLIT=split,
        GROUPED=groups is not None, num_warps=4 if few else 8,
    )  # fmt: skip
    if not split:
        return y
    out = torch.empty((rows, w.rows), dtype=dtype, device=x_TK.device)
    count = rows * w.rows
    add_parts_kernel[(-(-count // 1024),)](y, out, count, count, PARTS=parts, BLOCK=1024)
    return out


def padded_cols(w: PackedWeight) -> int:
    """Columns that the code planes hold."""
    per_byte = 1 if w.recipe.bits in {0, 8} else 2
    return int(w.codes.shape[-1]) * per_byte
