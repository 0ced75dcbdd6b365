"""Products with packed weights on a GPU: one kernel for every format, for one row or thousands.

Legend: M rows of x, N outputs, K inputs; E stacked matrices (experts). The kernel computes
y^T = W x^T so that the decoded weights are the operand held in registers.

The inner dimension is cut into parts whose length follows from the weight alone. A part starts a
fresh accumulator and the parts are added in order, whether one program walks them all (many rows) or
a program each takes one and the last to finish adds them (few rows). So a row's bits do not depend
on how many rows share the launch (design.md section 2). Tile sizes may follow the batch freely:
`tl.dot` adds along K in one order whatever the tile.

A step reads RUNS runs of 64 columns. Codes come as [N, RUNS, C, I] with C * I = 32: the innermost
axis shares one step and one byte of spare bits, so each scale is loaded once for all its columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.matmul.tiling import (
    FEW_ROWS,
    part_cols,
    precision,
    registers_of,
    runs_of,
    tile_rows_for,
    tiling,
)
from civetta.kernels.packed import TILE_COLS, PackedWeight

if TYPE_CHECKING:
    from torch import Tensor

COUNTERS = 1 << 16
"""Tiles whose parts may be counted at one time."""


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
def _scaled(
    values, scale, minimum, d, dmin, row, col, ok, GROUP: tl.constexpr, SCALE: tl.constexpr,
    SPAN: tl.constexpr, LOW: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """values [N, R, C, I] times their step, plus their low; col [1, R, C, 1] is each I's first."""
    SPANS: tl.constexpr = 1 if SPAN == 0 else (KP + SPAN - 1) // SPAN
    GROUPS: tl.constexpr = (KP + GROUP - 1) // GROUP
    p_d = row + col * 0 if SPAN == 0 else row * SPANS + col // SPAN
    b_d = tl.load(d + p_d, mask=ok, other=0.0).to(tl.float32)
    if SCALE == "none":
        out = b_d * values
    else:
        b_scale = tl.load(scale + row * GROUPS + col // GROUP, mask=ok, other=0)
        if SCALE == "fp8":
            out = (b_scale.to(tl.float8e4nv, bitcast=True).to(tl.float32) * values) * b_d
        else:
            out = (b_d * b_scale.to(tl.float32)) * values
    if LOW == "half":
        out += tl.load(minimum + row * GROUPS + col // GROUP, mask=ok, other=0.0).to(tl.float32)
    if LOW == "scaled":
        b_minimum = tl.load(minimum + row * GROUPS + col // GROUP, mask=ok, other=0)
        b_dmin = tl.load(dmin + p_d, mask=ok, other=0.0).to(tl.float32)
        out -= b_dmin * b_minimum.to(tl.float32)
    return out


@triton.jit
def dot(w, x_t, acc, PRECISE: tl.constexpr):
    """acc + w x^T; PRECISE names the float32 precision, "" the operands' own."""
    if PRECISE == "":
        acc = tl.dot(w, x_t, acc)
    else:
        acc = tl.dot(w, x_t, acc, input_precision=PRECISE)
    return acc


@triton.jit
def _x_tile(x, i_x, cols, K: tl.constexpr, ok_m, PRECISE: tl.constexpr):
    """x^T at cols: [len(cols), BM]."""
    mask = ok_m[None, :] & (cols < K)[:, None]
    x_t = tl.load(x + i_x[None, :] + cols[:, None], mask=mask, other=0.0)
    if PRECISE != "":
        x_t = x_t.to(tl.float32)
    return x_t


@triton.jit
def part_sum(
    x, i_x, codes, high, scale, minimum, d, dmin, table, row_n, k_start, k_stop, ok_n, ok_m,
    K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, KP: tl.constexpr, BITS: tl.constexpr,
    CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    SPAN: tl.constexpr, LOW: tl.constexpr, PRECISE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Sum over columns [k_start, k_stop) of W x^T: float32 [BN, BM]; row_n int64 [BN]."""
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    I: tl.constexpr = 8 if BITS == 5 else 16 if (BITS == 6 or GROUP == 16) else 32
    C: tl.constexpr = 32 // I
    wide = tl.arange(0, 64 * R)
    half = tl.arange(0, 32 * R)
    r = tl.arange(0, R)[None, :, None, None]
    c = tl.arange(0, C)[None, None, :, None]
    i = tl.arange(0, I)[None, None, None, :]
    row = row_n[:, None, None, None]
    for k in range(k_start, k_stop, 64 * R):
        if BITS == 0:
            cols = k + wide
            mask = ok_n[:, None] & (cols < K)[None, :]
            w = tl.load(codes + row_n[:, None] * KP + cols[None, :], mask=mask, other=0.0)
            x_t = _x_tile(x, i_x, cols, K, ok_m, PRECISE)
            acc = dot(w.to(x_t.dtype), x_t, acc, PRECISE)
        elif BITS == 8:
            cols = k + wide
            r2 = tl.arange(0, 2 * R)[None, :, None, None]
            col = k + r2 * 32 + c * I
            ok = ok_n[:, None, None, None] & (col < KP)
            b = tl.load(codes + row * KP + col + i, mask=ok, other=0)
            if CODE == "fp8":
                values = b.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            else:
                values = b.to(tl.int8, bitcast=True).to(tl.float32)
            values = _scaled(values, scale, minimum, d, dmin, row, col, ok, GROUP, SCALE, SPAN,
                             LOW, KP)  # fmt: skip
            x_t = _x_tile(x, i_x, cols, K, ok_m, PRECISE)
            acc = dot(tl.reshape(values.to(x_t.dtype), (BN, 64 * R)), x_t, acc, PRECISE)
        else:
            col = k + r * 64 + c * I
            ok = ok_n[:, None, None, None] & (col < KP)
            b = tl.load(codes + row * (KP // 2) + k // 2 + r * 32 + c * I + i, mask=ok, other=0)
            spare = b
            if BITS > 4:
                p_high = high + row * (KP // 64 * I) + (k // 64 + r) * I + i
                spare = tl.load(p_high, mask=ok_n[:, None, None, None] & (k + r * 64 < KP), other=0)
                spare = spare >> (c * (8 // C)).to(tl.uint8)
            for side in tl.static_range(2):
                whole = ((b >> (4 * side)) & 15).to(tl.int32)
                if BITS > 4:
                    extra = (spare >> ((BITS - 4) * side)) & ((1 << (BITS - 4)) - 1)
                    whole = whole | (extra.to(tl.int32) << 4)
                if CODE == "levels":
                    values = tl.load(table + whole)
                else:
                    values = (whole - OFFSET).to(tl.float32)
                values = _scaled(values, scale, minimum, d, dmin, row, col + 32 * side, ok, GROUP,
                                 SCALE, SPAN, LOW, KP)  # fmt: skip
                cols = k + 64 * (half // 32) + 32 * side + half % 32
                x_t = _x_tile(x, i_x, cols, K, ok_m, PRECISE)
                acc = dot(tl.reshape(values.to(x_t.dtype), (BN, 32 * R)), x_t, acc, PRECISE)
    return acc


@triton.jit
def _finished(total, divisor, ACT: tl.constexpr):
    if ACT == "squeeze":
        total = total / divisor
        total = total * (1.0 / (1.0 + tl.exp(tl.minimum(-total, 80.0))))
    return total


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x, y, parts, counters, codes, high, scale, minimum, d, dmin, table,
    slot, tile_expert, tile_row, end,
    M, N, x_stride, y_stride, x_divisor, act_divisor, K: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, KP: tl.constexpr, BITS: tl.constexpr,
    CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    SPAN: tl.constexpr, LOW: tl.constexpr, PRECISE: tl.constexpr, R: tl.constexpr,
    PART: tl.constexpr, SPLIT: tl.constexpr, GROUPED: tl.constexpr, PAIR: tl.constexpr,
    ACT: tl.constexpr,
):  # fmt: skip
    """One tile of outputs for one tile of rows; with SPLIT, of one part of K.

    GROUPED "sorted": rows of one expert a tile; "direct": tile i is row i with expert slot[i].
    PAIR: N gate rows are followed by N up rows; y is silu(gate) * up.
    """
    i_n, i_m = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BN)
    if PAIR:
        n = i_n * (BN // 2) + lane % (BN // 2)
        out_row = n + (lane // (BN // 2)) * N
    else:
        n = i_n * BN + lane
        out_row = n
    ok_n = n < N
    rows_each = 2 * N if PAIR else N
    if GROUPED == "sorted":
        expert = tl.load(tile_expert + i_m)
        if expert < 0:
            return
        place = tl.load(tile_row + i_m) + tl.arange(0, BM)
        ok_m = place < tl.load(end + expert)
        m = tl.load(slot + place, mask=ok_m, other=0)
        row = expert.to(tl.int64) * rows_each + out_row
    elif GROUPED == "direct":
        expert = tl.load(slot + i_m)
        m = i_m + tl.arange(0, BM)
        ok_m = m < i_m + 1
        row = expert.to(tl.int64) * rows_each + out_row
    else:
        m = i_m * BM + tl.arange(0, BM)
        ok_m = m < M
        row = out_row.to(tl.int64)
    i_x = (m // x_divisor).to(tl.int64) * x_stride
    if SPLIT:
        part = tl.program_id(2)
        k_start = part * PART
        total = part_sum(
            x, i_x, codes, high, scale, minimum, d, dmin, table, row,
            k_start, min(k_start + PART, K), ok_n, ok_m,
            K, BN, BM, KP, BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW, PRECISE, R,
        )  # fmt: skip
        mask = ok_n[:, None] & ok_m[None, :]
        at = m.to(tl.int64)[None, :] * rows_each + out_row[:, None]
        tl.store(parts + part.to(tl.int64) * M * rows_each + at, total, mask=mask)
        tl.debug_barrier()
        tile = i_m * tl.num_programs(0) + i_n
        done = tl.atomic_add(counters + tile, 1)
        PARTS: tl.constexpr = (K + PART - 1) // PART
        if done < PARTS - 1:
            return
        tl.store(counters + tile, 0)
        total = tl.zeros((BN, BM), dtype=tl.float32)
        p_part = parts + at
        for _ in range(PARTS):
            total += tl.load(p_part, mask=mask, other=0.0, cache_modifier=".cg")
            p_part += M * rows_each
    else:
        total = tl.zeros((BN, BM), dtype=tl.float32)
        for k_start in range(0, K, PART):
            total += part_sum(
                x, i_x, codes, high, scale, minimum, d, dmin, table, row,
                k_start, min(k_start + PART, K), ok_n, ok_m,
                K, BN, BM, KP, BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW, PRECISE, R,
            )  # fmt: skip
    if PAIR:
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, BN // 2, BM)), (1, 2, 0)))
        total = gate * (1.0 / (1.0 + tl.exp(tl.minimum(-gate, 80.0)))) * up
        n = i_n * (BN // 2) + tl.arange(0, BN // 2)
        ok_n = n < N
    total = _finished(total, act_divisor, ACT)
    p_y = y + m.to(tl.int64)[None, :] * y_stride + n[:, None]
    tl.store(p_y, total.to(y.dtype.element_ty), mask=ok_n[:, None] & ok_m[None, :])


def matmul(x_TK: Tensor, w: PackedWeight, dtype: torch.dtype) -> Tensor:
    """y_TN = x w^T with operands in x's dtype and float32 accumulation; see `Ops.matmul`."""
    x_TK = x_TK.contiguous()
    y = torch.empty((x_TK.shape[0], w.rows), dtype=dtype, device=x_TK.device)
    product(x_TK, w, y, counters(x_TK.device))
    return y


def counters(device: torch.device) -> Tensor:
    """Zeros that launches of one stream share; every launch leaves them zero."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def matmul_grouped(
    x_TK: Tensor, w: PackedWeight, dtype: torch.dtype, groups: Groups, rows: int, divisor: int
) -> Tensor:
    """Row r of y [rows, N] is x[r // divisor] times the matrix of r's group, transposed."""
    y = torch.empty((rows, w.rows), dtype=dtype, device=x_TK.device)
    product(x_TK.contiguous(), w, y, None, groups=groups, divisor=divisor)
    return y


def product(
    x_TK: Tensor,
    w: PackedWeight,
    y_MN: Tensor,
    counts: Tensor | None,
    *,
    groups: Groups | None = None,
    experts_M: Tensor | None = None,
    divisor: int = 1,
    pair: bool = False,
    wide: bool = False,
    act: str = "",
    act_divisor: float = 1.0,
) -> None:
    """Write x w^T into y [M, N], whose rows may be strided; x rows contiguous.

    `groups`, or `experts_M` (int64, one matrix a row, for few rows), choose among stacked
    matrices; row r reads x[r // divisor]. `pair`: w holds gate rows, then up rows, and y is
    silu(gate) * up. `wide`: operands are float32 whatever x is. `act` "squeeze": silu(sum /
    act_divisor). `counts` is needed unless rows are sorted.
    """
    r, rows = w.recipe, y_MN.shape[0]
    outputs = w.rows // 2 if pair else w.rows
    parts = -(-w.cols // (part := part_cols(w)))
    few = rows <= FEW_ROWS or experts_M is not None
    split = few and parts > 1
    scratch = y_MN
    if split:
        scratch = torch.empty((parts, rows, w.rows), dtype=torch.float32, device=y_MN.device)
    if groups is not None:
        tile_m, tiles, kind = groups.tile_rows, len(groups.tile_expert_I), "sorted"
    elif experts_M is not None:
        tile_m, tiles, kind = 16, rows, "direct"
    else:
        tile_m = tile_rows_for(rows)
        tiles, kind = -(-rows // tile_m), ""
    exact = precision(torch.float32 if wide else x_TK.dtype, x_TK.device)
    shape = tiling(few=few, exact=exact != "")
    tile_n = shape.outputs
    none = x_TK
    ids = none if experts_M is None else experts_M
    grid = (-(-w.rows // tile_n), tiles, parts if split else 1)
    product_kernel[grid](
        x_TK, y_MN, scratch, none if counts is None else counts,
        w.codes, *(none if p is None else p
                   for p in (w.high, w.scale, w.minimum, w.d, w.dmin, w.levels)),
        *((groups.slot_S, groups.tile_expert_I, groups.tile_row_I, groups.end_E)
          if groups else (ids, none, none, none)),
        rows, outputs, x_TK.stride(0), y_MN.stride(0), divisor, act_divisor, w.cols,
        BN=tile_n, BM=tile_m, KP=padded_cols(w), BITS=r.bits, CODE=r.code, OFFSET=r.offset,
        GROUP=r.group, SCALE=r.scale, SPAN=r.span, LOW=r.low,
        PRECISE=exact, R=runs_of(r.bits, few=few, exact=exact != ""), PART=part, SPLIT=split,
        GROUPED=kind, PAIR=pair, ACT=act, num_warps=shape.warps,
        num_stages=shape.stages, **registers_of(shape, y_MN.device),
    )  # fmt: skip


def padded_cols(w: PackedWeight) -> int:
    """Columns that the code planes hold."""
    per_byte = 1 if w.recipe.bits in {0, 8} else 2
    return int(w.codes.shape[-1]) * per_byte


assert TILE_COLS == 64, "the kernel's runs are 64 columns"
