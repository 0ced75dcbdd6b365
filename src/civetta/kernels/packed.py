"""`PackedWeight`: a stored matrix in planes that a GPU kernel reads in wide loads, nothing lost.

A GGUF block mixes scales, codes and spare bits every 18 to 210 bytes, so no two rows of a tile start
on the same byte. Packing takes each kind of field into a plane of its own: codes, spare bits of the
codes, integer scales, minima, and the float steps. Values come out as the block decoders' (dequant/):

    value = step * (code - offset)            step = d, or d * scale, or scale * d for NVFP4
    value = step * code + low                 low = minimum, or -(dmin * minimum)
    value = step * level[code]                four-bit codebooks

Planes lie in the order of tiles that tile_order.py describes. Rows and columns are filled up to
multiples of 64 with codes whose step is zero.

A format without planes of its own (2- and 3-bit grids) is expanded to `dtype`, which loses nothing
either: a product rounds its operand to that dtype anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.kernels import tile_order
from civetta.kernels.dequant.reference import dequantize_in_runs
from civetta.kernels.packed_fields import LEVELS, PLAIN, READERS, Fields, Recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.checkpoint.quant import QuantTensor, Weight

TILE = tile_order.TILE
TOGETHER = 32
"""Matrices of a stack that are packed in one go; more would only take more memory for a while."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class PackedWeight:
    """Planes of a matrix [rows, cols], or of E stacked ones, [E, T, ...] in the order of tile_order.py.

    pair: rows are gate rows, then up rows, woven in runs of 8. codes: int32 words, or plain numbers;
    high: int32, spare bits of the codes; scale, minimum: one for each group; d, dmin: one for each
    span; all int32 words of halves or bytes, or float32. levels: float32 [16].
    """

    recipe: Recipe
    rows: int
    cols: int
    codes: Tensor
    high: Tensor | None = None
    scale: Tensor | None = None
    minimum: Tensor | None = None
    d: Tensor | None = None
    dmin: Tensor | None = None
    levels: Tensor | None = None
    pair: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Logical shape (rows, cols) in PyTorch order [out, in]."""
        return (self.rows, self.cols)

    @property
    def experts(self) -> int:
        """Stacked matrices."""
        return int(self.codes.shape[0])

    @property
    def tiles(self) -> int:
        """Tiles of 64 outputs in each matrix."""
        return int(self.codes.shape[1])

    @property
    def padded_cols(self) -> int:
        """Columns that the code planes hold."""
        return -(-self.cols // TILE) * TILE

    @property
    def numbers(self) -> int:
        """Numbers that the planes stand for."""
        return self.experts * self.rows * self.cols

    @property
    def nbytes(self) -> int:
        """Bytes of all planes; one that serves as two counts once."""
        planes = (self.codes, self.high, self.scale, self.minimum, self.d, self.dmin)
        return sum({id(p): p.nbytes for p in planes if p is not None}.values())


def pack(
    w: Weight, dtype: torch.dtype, device: torch.device | str, *, pair: bool = False
) -> PackedWeight:
    """One matrix in planes on `device`; `dtype` is what formats without planes expand to."""
    return pack_stack([w], dtype, device, pair=pair)


def pack_stack(
    matrices: Sequence[Weight],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    pair: bool = False,
) -> PackedWeight:
    """Matrices of one shape and format, stacked in planes on `device`; `pair`: see `PackedWeight`."""
    first = matrices[0]
    rows, cols = first.shape
    if isinstance(first, Tensor) or first.format.name not in READERS:
        codes = torch.stack([_tiled(_plain(w, dtype).to(device), pair) for w in matrices])
        return PackedWeight(recipe=PLAIN, rows=rows, cols=cols, codes=codes, pair=pair)
    recipe, read = READERS[first.format.name]
    stored = [w for w in matrices if not isinstance(w, Tensor)]
    size = TOGETHER if _alike(stored) else 1
    made = []
    for at in range(0, len(stored), size):
        some = stored[at : at + size]
        fields = read(_moved(_under_one_another(some, device), device))
        made.append(_packed(some[0], recipe, fields, pair, len(some)))
    return stacked(made)


def stacked(made: Sequence[PackedWeight]) -> PackedWeight:
    """Stacks of matrices of one shape and format, behind one another."""
    if len(made) == 1:
        return made[0]

    def whole(name: str) -> Tensor | None:
        planes = [plane for w in made if (plane := getattr(w, name)) is not None]
        return torch.cat(planes) if planes else None

    codes = whole("codes")
    assert codes is not None
    return replace(
        made[0],
        codes=codes,
        high=whole("high"),
        scale=whole("scale"),
        minimum=whole("minimum"),
        d=whole("d"),
        dmin=whole("dmin"),
    )


def _alike(matrices: Sequence[QuantTensor]) -> bool:
    """Whether the matrices may be one tall one: no scales beside their bytes, and whole tiles.

    Packed in one go they take few and large steps, where one by one they take many.
    """
    first = matrices[0]
    return all(
        w.scale is None
        and w.rows % TILE == 0
        and w.shape == first.shape
        and w.format == first.format
        for w in matrices
    )


def _under_one_another(matrices: Sequence[QuantTensor], device: torch.device | str) -> QuantTensor:
    if len(matrices) == 1:
        return matrices[0]
    return replace(matrices[0], data_RB=torch.cat([w.data_RB.to(device) for w in matrices]))


def _packed(w: QuantTensor, recipe: Recipe, fields: Fields, pair: bool, count: int) -> PackedWeight:
    """Fields of `count` matrices like `w`, under one another, in tile order."""
    f = _arranged(recipe, fields, pair, count)
    levels = LEVELS.get(w.format.name)

    def each(plane: Tensor) -> Tensor:
        return plane.reshape(count, plane.shape[0] // count, *plane.shape[1:]).contiguous()

    def split(plane: Tensor | None) -> Tensor | None:
        return None if plane is None else each(plane)

    return PackedWeight(
        recipe=recipe,
        rows=w.rows,
        cols=w.cols,
        codes=each(f.codes),
        high=split(f.high),
        scale=split(f.scale),
        minimum=split(f.minimum),
        d=split(f.d),
        dmin=split(f.dmin),
        levels=None if levels is None else torch.tensor(levels, device=f.codes.device),
        pair=pair,
    )


def _plain(w: Weight, dtype: torch.dtype) -> Tensor:
    if isinstance(w, Tensor):
        return w.contiguous()
    return dequantize_in_runs(w, STORED.get(w.format.name, dtype))


STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def _moved(w: Weight, device: torch.device | str) -> QuantTensor:
    assert not isinstance(w, Tensor)
    move = {
        name: plane.to(device)
        for name in ("data_RB", "scale", "scale_2")
        if (plane := getattr(w, name)) is not None
    }
    return replace(w, **move)


def _tiled(x_RK: Tensor, pair: bool) -> Tensor:
    """Numbers in tile order."""
    return tile_order.numbers(_whole_tiles(x_RK, pair, 1))


def _whole_tiles(plane: Tensor, pair: bool, group: int, count: int = 1) -> Tensor:
    """Rows and columns filled up with zeros to whole tiles; a column stands for `group` columns,
    0 for all. With `pair`, rows of `count` matrices are woven each by itself."""
    if pair:
        plane = torch.cat([tile_order.paired(one) for one in plane.chunk(count)])
    rows, cols = plane.shape
    unit = max(1, TILE // group) if group else 1
    return tile_order.filled(plane, rows + -rows % TILE, cols + -cols % unit)


def _arranged(recipe: Recipe, f: Fields, pair: bool, count: int) -> Fields:
    """All planes of `count` matrices in tile order."""

    def steps(plane: Tensor | None, group: int) -> Tensor | None:
        if plane is None:
            return None
        return tile_order.steps(
            _whole_tiles(plane, pair, group, count), TILE // group if group else 1
        )

    codes, high = _whole_tiles(f.codes, pair, 1, count), None
    if recipe.bits in {5, 6}:
        high = tile_order.spare_bits(codes >> 4, recipe.bits - 4)
    if recipe.code == "int8":
        codes = codes ^ 128  # 0 to 255, which a float's mantissa can take as it is
    codes = tile_order.bytes_(codes) if recipe.bits == 8 else tile_order.nibbles(codes & 15)
    return Fields(
        codes=codes,
        high=high,
        scale=steps(f.scale, recipe.group),
        minimum=steps(f.minimum, recipe.group),
        d=steps(f.d, recipe.span),
        dmin=steps(f.dmin, recipe.span),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedHyper:
    """One hyper-connection site in planes; fields as in `HyperWeights`, inject float32."""

    gain_SD: Tensor
    down: PackedWeight
    up: PackedWeight
    inject: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class PackedExperts:
    """Routed experts in planes, stacked: gate/up E x [F, D], down E x [D, F]."""

    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
