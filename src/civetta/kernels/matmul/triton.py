"""Products with packed weights on a GPU: one kernel for every format, for one row or thousands.

Legend: M rows of x, N outputs, K inputs; E stacked matrices (experts). The kernel computes
y^T = W x^T so that the decoded weights are the operand held in registers (matmul/tiles.py).

The inner dimension is cut into parts whose length follows from the weight alone. A part starts a
fresh accumulator and the parts are added in order, whether one program walks them all (many rows) or
a program each takes one and the last to finish adds them (few rows). So a row's bits do not depend
on how many rows share the launch (design.md section 2). Tile sizes may follow the batch freely:
`tl.dot` adds along K in one order whatever the tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.matmul.dense import dense, pays
from civetta.kernels.matmul.tiles import weight_tile
from civetta.kernels.matmul.tiling import (
    FEW_ROWS,
    LEAST_ROWS,
    part_cols,
    precision,
    recipe_on,
    registers_of,
    tile_rows_for,
    tiling,
)
from civetta.kernels.packed import TILE, PackedWeight

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
def _head(w, TYPE: tl.constexpr):
    """float32 numbers of TYPE's precision; what they leave of w is exact."""
    if tl.bfloat16 == TYPE:
        head = (w.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    else:
        head = w.to(TYPE).to(tl.float32)
    return head


@triton.jit
def _add_product(w, x_t, acc, PRECISE: tl.constexpr, WIDE: tl.constexpr):
    """acc + w x^T. PRECISE names the precision of float32 operands, "" for those of x's dtype; WIDE:
    a float32 w in three parts of x's dtype, which add up to it."""
    if PRECISE != "":
        acc = tl.dot(w.to(tl.float32), x_t.to(tl.float32), acc, input_precision=PRECISE)
    elif WIDE:
        first = _head(w, x_t.dtype)
        rest = w - first
        second = _head(rest, x_t.dtype)
        acc = tl.dot((rest - second).to(x_t.dtype), x_t, acc)
        acc = tl.dot(second.to(x_t.dtype), x_t, acc)
        acc = tl.dot(first.to(x_t.dtype), x_t, acc)
    else:
        acc = tl.dot(w.to(x_t.dtype), x_t, acc)
    return acc


@triton.jit
def part_sum(
    x, i_x, codes, high, scale, minimum, d, dmin, table, tile, k_start, k_stop, left, ok_m,
    K: tl.constexpr, NT: tl.constexpr, BM: tl.constexpr, KP: tl.constexpr, BITS: tl.constexpr,
    CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    SPAN: tl.constexpr, LOW: tl.constexpr, PRECISE: tl.constexpr, WIDE: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Sum over columns [k_start, k_stop) of W x^T: float32 [64 NT, BM].

    Row tiles are those from `tile` (int64) on, of which `left` exist; k_start is a multiple of 64 S.
    """
    acc = tl.zeros((64 * NT, BM), dtype=tl.float32)
    for k in range(k_start, k_stop, 64 * S):
        cols = k + tl.arange(0, 64 * S)
        w = weight_tile(codes, high, scale, minimum, d, dmin, table, tile, k, left, S, NT, KP,
                        BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW)  # fmt: skip
        mask = ok_m[None, :]
        if K % (64 * S) != 0:
            mask = mask & (cols < K)[:, None]
        x_t = tl.load(x + i_x[None, :] + cols[:, None], mask=mask, other=0.0)
        acc = _add_product(w, x_t, acc, PRECISE, WIDE)
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
    M, N, x_stride, y_stride, x_divisor, act_divisor, K: tl.constexpr, TILES: tl.constexpr,
    NT: tl.constexpr, BM: tl.constexpr, KP: tl.constexpr, BITS: tl.constexpr,
    CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    SPAN: tl.constexpr, LOW: tl.constexpr, PRECISE: tl.constexpr, WIDE: tl.constexpr,
    S: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr, GROUPED: tl.constexpr,
    PAIR: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """NT tiles of outputs, of TILES, for one tile of rows; with SPLIT, of one part of K.

    GROUPED "sorted": rows of one expert a tile; "direct": tile i is row i with expert slot[i].
    PAIR: gate and up rows in runs of 8; y [M, N] is silu(gate) * up.
    """
    i_n, i_m = tl.program_id(0), tl.program_id(1)
    first = i_n * NT
    left = TILES - first
    if GROUPED == "sorted":
        expert = tl.load(tile_expert + i_m)
        if expert < 0:
            return
        place = tl.load(tile_row + i_m) + tl.arange(0, BM)
        ok_m = place < tl.load(end + expert)
        m = tl.load(slot + place, mask=ok_m, other=0)
        tile = expert.to(tl.int64) * TILES + first
    elif GROUPED == "direct":
        expert = tl.load(slot + i_m)
        m = i_m + tl.arange(0, BM)
        ok_m = m < i_m + 1
        tile = expert.to(tl.int64) * TILES + first
    else:
        m = i_m * BM + tl.arange(0, BM)
        ok_m = m < M
        tile = first.to(tl.int64)
    i_x = (m // x_divisor).to(tl.int64) * x_stride
    if SPLIT:
        part = tl.program_id(2)
        k_start = part * PART
        total = part_sum(
            x, i_x, codes, high, scale, minimum, d, dmin, table, tile,
            k_start, min(k_start + PART, K), left, ok_m,
            K, NT, BM, KP, BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW, PRECISE, WIDE, S,
        )  # fmt: skip
        lane = tl.arange(0, 64 * NT)
        mask = (lane < left * 64)[:, None] & ok_m[None, :]
        at = m.to(tl.int64)[None, :] * (TILES * 64) + (first * 64 + lane)[:, None]
        tl.store(parts + part.to(tl.int64) * M * (TILES * 64) + at, total, mask=mask)
        tl.debug_barrier()
        counter = i_m * tl.num_programs(0) + i_n
        done = tl.atomic_add(counters + counter, 1)
        PARTS: tl.constexpr = (K + PART - 1) // PART
        if done < PARTS - 1:
            return
        tl.store(counters + counter, 0)
        total = tl.zeros((64 * NT, BM), dtype=tl.float32)
        p_part = parts + at
        for _ in tl.static_range(PARTS):
            total += tl.load(p_part, mask=mask, other=0.0, cache_modifier=".cg")
            p_part += M * (TILES * 64)
    elif PART >= K:
        total = part_sum(
            x, i_x, codes, high, scale, minimum, d, dmin, table, tile, 0, K, left, ok_m,
            K, NT, BM, KP, BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW, PRECISE, WIDE, S,
        )  # fmt: skip
    else:
        total = tl.zeros((64 * NT, BM), dtype=tl.float32)
        for k_start in range(0, K, PART):
            total += part_sum(
                x, i_x, codes, high, scale, minimum, d, dmin, table, tile,
                k_start, min(k_start + PART, K), left, ok_m,
                K, NT, BM, KP, BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW, PRECISE, WIDE, S,
            )  # fmt: skip
    OUT: tl.constexpr = 32 if PAIR else 64
    if PAIR:
        halves = tl.permute(tl.reshape(total, (4 * NT, 2, 8, BM)), (0, 2, 3, 1))
        gate, up = tl.split(halves)
        total = gate * (1.0 / (1.0 + tl.exp(tl.minimum(-gate, 80.0)))) * up
        total = tl.reshape(total, (OUT * NT, BM))
    n = first * OUT + tl.arange(0, OUT * NT)
    total = _finished(total, act_divisor, ACT)
    p_y = y + m.to(tl.int64)[None, :] * y_stride + n[:, None]
    tl.store(p_y, total.to(y.dtype.element_ty), mask=(n < N)[:, None] & ok_m[None, :])


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
    wide: bool = False,
    act: str = "",
    act_divisor: float = 1.0,
) -> None:
    """Write x w^T into y [M, N], whose rows may be strided; x rows contiguous.

    `groups`, or `experts_M` (int64, one matrix a row, for few rows), choose among stacked
    matrices; row r reads x[r // divisor]. Of a weight of pairs y is silu(gate) * up. `wide`: the
    weights are float32, and are not rounded to x's dtype. `act` "squeeze": silu(sum / act_divisor).
    `counts` is needed unless rows are sorted.
    """
    rows = y_MN.shape[0]
    if not wide and divisor == 1 and pays(w, rows, x_TK.dtype):
        dense(x_TK, w, planes_of(w, x_TK), y_MN, act, act_divisor)
        return
    r = recipe_on(w.recipe, y_MN.device)
    parts = -(-w.cols // (part := part_cols(w)))
    few = rows <= FEW_ROWS or experts_M is not None
    split = few and parts > 1 and groups is None
    scratch = y_MN
    if split:
        scratch = torch.empty(
            (parts, rows, w.tiles * TILE), dtype=torch.float32, device=y_MN.device
        )
    if groups is not None:
        tile_m, tiles, kind = groups.tile_rows, len(groups.tile_expert_I), "sorted"
    elif experts_M is not None:
        tile_m, tiles, kind = LEAST_ROWS, rows, "direct"
    else:
        tile_m = tile_rows_for(rows)
        tiles, kind = -(-rows // tile_m), ""
    exact = precision(x_TK.dtype, x_TK.device)
    shape = tiling(w, rows=tile_m, exact=exact != "", wide=wide)
    none = x_TK
    ids = none if experts_M is None else experts_M
    grid = (-(-w.tiles // shape.tiles), tiles, parts if split else 1)
    product_kernel[grid](
        x_TK, y_MN, scratch, none if counts is None else counts, *planes_of(w, none),
        *((groups.slot_S, groups.tile_expert_I, groups.tile_row_I, groups.end_E)
          if groups else (ids, none, none, none)),
        rows, w.rows // 2 if w.pair else w.rows, x_TK.stride(0), y_MN.stride(0), divisor,
        act_divisor, K=w.cols, TILES=w.tiles, NT=shape.tiles, BM=tile_m, KP=w.padded_cols,
        BITS=r.bits, CODE=r.code, OFFSET=r.offset, GROUP=r.group, SCALE=r.scale, SPAN=r.span,
        LOW=r.low, PRECISE=exact, WIDE=wide and exact == "", S=shape.steps, PART=part, SPLIT=split,
        GROUPED=kind, PAIR=w.pair, ACT=act, num_warps=shape.warps, num_stages=shape.stages,
        **registers_of(shape, y_MN.device),
    )  # fmt: skip


def planes_of(w: PackedWeight, none: Tensor) -> tuple[Tensor, ...]:
    """The planes as the kernels take them; `none` stands for one that is not there."""
    planes = (w.codes, w.high, w.scale, w.minimum, w.d, w.dmin, w.levels)
    return tuple(none if p is None else p for p in planes)
