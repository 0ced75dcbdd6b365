"""Products with packed weights on a GPU: one kernel for every format, for one row or thousands.

Legend: M rows of x, N outputs, K inputs; E stacked matrices (experts). The kernels: product.py.

The inner dimension is cut into parts whose length follows from the weight alone. A part starts a
fresh accumulator and the parts are added in order, whether one program walks them all (many rows) or
a program each takes one and the last to finish adds them (few rows). So a row's bits do not depend
on how many rows share the launch (design.md section 2). Tile sizes may follow the batch freely:
`tl.dot` adds along K in one order whatever the tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from civetta.kernels.matmul.dense import dense, pays
from civetta.kernels.matmul.product import product_kernel, two_products_kernel
from civetta.kernels.matmul.tiling import (
    FEW_ROWS,
    LEAST_ROWS,
    Tiling,
    last_rows,
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

ONE_LAUNCH_ROWS = 16
"""Up to so many rows two products share a launch."""

RUN_TIME = (
    "x", "y", "parts", "counters", "codes", "high", "scale", "minimum", "d", "dmin", "table",
    "slot", "tile_expert", "tile_row", "end", "M", "N", "x_stride", "y_stride", "x_divisor",
    "act_divisor",
)  # fmt: skip
"""Arguments of a product that are no constants of its kernel, in its order."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """x w^T into y; fields as `product` takes them."""

    x_TK: Tensor
    w: PackedWeight
    y_MN: Tensor
    experts_M: Tensor | None = None
    divisor: int = 1
    wide: bool = False


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
    one = Product(x_TK=x_TK, w=w, y_MN=y_MN, experts_M=experts_M, divisor=divisor, wide=wide)
    launch = _launch(one, counts, groups=groups, act=act, act_divisor=act_divisor)
    constants = {k: v for k, v in launch.args.items() if k not in RUN_TIME}
    product_kernel[launch.grid](
        *(launch.args[k] for k in RUN_TIME), **constants,
        num_warps=launch.shape.warps, num_stages=launch.shape.stages,
        **registers_of(launch.shape, y_MN.device),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    grid: tuple[int, int, int]
    args: dict[str, Any]
    shape: Tiling


def _launch(
    one: Product,
    counts: Tensor | None,
    *,
    groups: Groups | None = None,
    act: str = "",
    act_divisor: float = 1.0,
) -> _Launch:
    """What product_kernel is launched with; see `product`."""
    x_TK, w, y_MN, experts_M, wide = one.x_TK, one.w, one.y_MN, one.experts_M, one.wide
    rows = y_MN.shape[0]
    r = recipe_on(w.recipe, y_MN.device, x_TK.dtype)
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
    codes, high, scale, minimum, d, dmin, table = planes_of(w, none)
    args = {
        "x": x_TK, "y": y_MN, "parts": scratch, "counters": none if counts is None else counts,
        "codes": codes, "high": high, "scale": scale, "minimum": minimum, "d": d, "dmin": dmin,
        "table": table, "slot": none if experts_M is None else experts_M, "tile_expert": none,
        "tile_row": none, "end": none, "M": rows, "N": w.rows // 2 if w.pair else w.rows,
        "x_stride": x_TK.stride(0), "y_stride": y_MN.stride(0), "x_divisor": one.divisor,
        "act_divisor": act_divisor, "K": w.cols, "TILES": w.tiles, "NT": shape.tiles,
        "BM": tile_m, "KP": w.padded_cols, "BITS": r.bits, "CODE": r.code, "OFFSET": r.offset,
        "GROUP": r.group, "SCALE": r.scale, "SPAN": r.span, "LOW": r.low, "PRECISE": exact,
        "WIDE": wide and exact == "", "S": shape.steps, "PART": part, "SPLIT": split,
        "LAST": last_rows(rows, tile_m), "GROUPED": kind, "PAIR": w.pair, "ACT": act,
    }  # fmt: skip
    if groups is not None:
        args |= {
            "slot": groups.slot_S, "tile_expert": groups.tile_expert_I,
            "tile_row": groups.tile_row_I, "end": groups.end_E,
        }  # fmt: skip
    return _Launch(
        grid=(-(-w.tiles // shape.tiles), tiles, parts if split else 1), args=args, shape=shape
    )


def two_products(first: Product, second: Product, counts: Tensor) -> None:
    """Both products, in one launch when rows are few; neither reads what the other writes.

    Bits are those of `product`.
    """
    rows = max(len(p.y_MN) for p in (first, second) if p.experts_M is None)
    if rows > ONE_LAUNCH_ROWS:
        for p in (first, second):
            product(p.x_TK, p.w, p.y_MN, counts, experts_M=p.experts_M, divisor=p.divisor,
                    wide=p.wide)  # fmt: skip
        return
    counts_of = (counts, counts[COUNTERS // 2 :])
    a, b = (_launch(p, own) for p, own in zip((first, second), counts_of, strict=True))
    named = {f"{letter}_{k}": v for letter, launch in (("A", a), ("B", b))
             for k, v in launch.args.items() if k not in RUN_TIME}  # fmt: skip
    two_products_kernel[(prod(a.grid) + prod(b.grid),)](
        prod(a.grid), *a.grid[:2], *b.grid[:2], *(a.args[k] for k in RUN_TIME),
        *(b.args[k] for k in RUN_TIME), **named, num_warps=4,
        num_stages=max(a.shape.stages, b.shape.stages),
    )  # fmt: skip


def planes_of(w: PackedWeight, none: Tensor) -> tuple[Tensor, ...]:
    """The planes as the kernels take them; `none` stands for one that is not there."""
    planes = (w.codes, w.high, w.scale, w.minimum, w.d, w.dmin, w.levels)
    return tuple(none if p is None else p for p in planes)
