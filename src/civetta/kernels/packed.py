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
from civetta.kernels.dequant import blocks as fields_of
from civetta.kernels.dequant.iq import IQ4_LEVELS
from civetta.kernels.dequant.reference import E2M1_LEVELS, FP8_BLOCK, dequantize_in_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from civetta.checkpoint.quant import QuantTensor, Weight

TILE = tile_order.TILE
TOGETHER = 32
"""Matrices of a stack that are packed in one go; more would only take more memory for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How planes become numbers; every field is a compile-time constant of the kernels.

    bits 4, 5, 6, 8, or 0 for plain numbers; code "linear" (minus `offset`), "levels" (table),
    "int8" or "fp8"; group: columns of one step; scale "none", "int8", "uint8" or "fp8"; span:
    columns of one d (0: one d for a whole row); low "none", "half" (added) or "scaled" (dmin times
    minimum, taken away), one for each group.
    """

    bits: int
    code: str = "linear"
    offset: int = 0
    group: int = 32
    scale: str = "none"
    span: int = 32
    low: str = "none"


PLAIN = Recipe(bits=0)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """Planes of one matrix by rows; codes uint8 [N, K]."""

    codes: Tensor
    high: Tensor | None = None
    scale: Tensor | None = None
    minimum: Tensor | None = None
    d: Tensor | None = None
    dmin: Tensor | None = None


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
    if isinstance(first, Tensor) or first.format.name not in _READERS:
        codes = torch.stack([_tiled(_plain(w, dtype).to(device), pair) for w in matrices])
        return PackedWeight(recipe=PLAIN, rows=rows, cols=cols, codes=codes, pair=pair)
    recipe, read = _READERS[first.format.name]
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


def _packed(
    w: QuantTensor, recipe: Recipe, fields: _Fields, pair: bool, count: int
) -> PackedWeight:
    """Fields of `count` matrices like `w`, under one another, in tile order."""
    f = _arranged(recipe, fields, pair, count)
    levels = _LEVELS.get(w.format.name)

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


def _arranged(recipe: Recipe, f: _Fields, pair: bool, count: int) -> _Fields:
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
    return _Fields(
        codes=codes,
        high=high,
        scale=steps(f.scale, recipe.group),
        minimum=steps(f.minimum, recipe.group),
        d=steps(f.d, recipe.span),
        dmin=steps(f.dmin, recipe.span),
    )


# ---- readers: stored bytes to fields -------------------------------------------------------------


def _blocks(w: QuantTensor) -> Tensor:
    return w.data_RB.reshape(-1, w.format.block_bytes)


def _half(w: QuantTensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block: float16 [N, blocks]."""
    return _blocks(w)[:, at : at + 2].contiguous().view(torch.float16).view(w.rows, -1)


def _by_row(w: QuantTensor, plane: Tensor) -> Tensor:
    return plane.reshape(w.rows, -1).contiguous()


def _five(blocks: Tensor, high: int, low: int) -> Tensor:
    spare = fields_of.fields_of_each(blocks[:, high : high + 4], 1, 8).flatten(1)
    return fields_of.nibbles(blocks[:, low:], 16) | (spare << 4)


def _q4_0(w: QuantTensor) -> _Fields:
    return _Fields(codes=_by_row(w, fields_of.nibbles(_blocks(w)[:, 2:], 16)), d=_half(w, 0))


def _q4_1(w: QuantTensor) -> _Fields:
    codes = _by_row(w, fields_of.nibbles(_blocks(w)[:, 4:], 16))
    return _Fields(codes=codes, d=_half(w, 0), minimum=_half(w, 2))


def _q5_0(w: QuantTensor) -> _Fields:
    return _Fields(codes=_by_row(w, _five(_blocks(w), 2, 6)), d=_half(w, 0))


def _q5_1(w: QuantTensor) -> _Fields:
    codes = _by_row(w, _five(_blocks(w), 4, 8))
    return _Fields(codes=codes, d=_half(w, 0), minimum=_half(w, 2))


def _q8_0(w: QuantTensor) -> _Fields:
    return _Fields(codes=_by_row(w, _blocks(w)[:, 2:]), d=_half(w, 0))


def _k_fields(w: QuantTensor, codes: Tensor) -> _Fields:
    packed = _blocks(w)[:, 4:16]
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = torch.cat([a & 63, (c & 15) | ((a >> 6) << 4)], dim=1)
    minimum = torch.cat([b & 63, (c >> 4) | ((b >> 6) << 4)], dim=1)
    return _Fields(
        codes=_by_row(w, codes),
        scale=_by_row(w, scale),
        minimum=_by_row(w, minimum),
        d=_half(w, 0),
        dmin=_half(w, 2),
    )


def _q4_k(w: QuantTensor) -> _Fields:
    return _k_fields(w, fields_of.nibbles(_blocks(w)[:, 16:], 32))


def _q5_k(w: QuantTensor) -> _Fields:
    blocks = _blocks(w)
    fifth = fields_of.fields(blocks[:, 16:48].unsqueeze(1), 1, 8).flatten(1)
    return _k_fields(w, fields_of.nibbles(blocks[:, 48:], 32) | (fifth << 4))


def _q6_k(w: QuantTensor) -> _Fields:
    blocks = _blocks(w)
    high = fields_of.fields(fields_of.grouped(blocks[:, 128:192], 32), 2, 4).flatten(1)
    codes = fields_of.nibbles(blocks[:, :128], 64) | (high << 4)
    scale = fields_of.signed(blocks[:, 192:208])
    return _Fields(codes=_by_row(w, codes), scale=_by_row(w, scale), d=_half(w, 208))


def _iq4_nl(w: QuantTensor) -> _Fields:
    return _q4_0(w)


def _iq4_xs(w: QuantTensor) -> _Fields:
    blocks = _blocks(w)
    low = fields_of.fields_of_each(blocks[:, 4:8], 4, 2).flatten(1)
    high = fields_of.fields_of_each(blocks[:, 2:4], 2, 4).flatten(1)
    scale = fields_of.signed(low | (high << 4)) - 32
    codes = fields_of.nibbles(blocks[:, 8:], 16)
    return _Fields(codes=_by_row(w, codes), scale=_by_row(w, scale), d=_half(w, 0))


def _fp8(w: QuantTensor) -> _Fields:
    """Block scales become one a row and 128 columns; one global scale is repeated."""
    codes = w.data_RB.contiguous()
    spans = -(-w.cols // FP8_BLOCK)
    if w.scale is None or w.scale.ndim < 2:
        one = torch.ones(1, device=codes.device) if w.scale is None else w.scale.float()
        return _Fields(codes=codes, d=one.reshape(1, 1).expand(w.rows, spans).contiguous())
    rows = torch.arange(w.row_offset, w.row_offset + w.rows, device=codes.device)
    return _Fields(codes=codes, d=w.scale.float()[rows // FP8_BLOCK].contiguous())


def _nvfp4(w: QuantTensor) -> _Fields:
    assert w.scale is not None
    codes = fields_of.fields_of_each(w.data_RB, 4, 2).flatten(1)
    one = torch.ones(1, device=codes.device) if w.scale_2 is None else w.scale_2.float()
    d = one.reshape(1, 1).expand(w.rows, 1).contiguous()
    return _Fields(codes=codes, scale=w.scale.contiguous(), d=d)


_READERS: dict[str, tuple[Recipe, Callable[[QuantTensor], _Fields]]] = {
    "Q4_0": (Recipe(bits=4, offset=8), _q4_0),
    "Q4_1": (Recipe(bits=4, low="half"), _q4_1),
    "Q5_0": (Recipe(bits=5, offset=16), _q5_0),
    "Q5_1": (Recipe(bits=5, low="half"), _q5_1),
    "Q8_0": (Recipe(bits=8, code="int8"), _q8_0),
    "Q4_K": (Recipe(bits=4, scale="uint8", span=256, low="scaled"), _q4_k),
    "Q5_K": (Recipe(bits=5, scale="uint8", span=256, low="scaled"), _q5_k),
    "Q6_K": (Recipe(bits=6, offset=32, group=16, scale="int8", span=256), _q6_k),
    "IQ4_NL": (Recipe(bits=4, code="levels"), _iq4_nl),
    "IQ4_XS": (Recipe(bits=4, code="levels", scale="int8", span=256), _iq4_xs),
    "F8_E4M3": (Recipe(bits=8, code="fp8", group=FP8_BLOCK, span=FP8_BLOCK), _fp8),
    "NVFP4": (Recipe(bits=4, code="levels", group=16, scale="fp8", span=0), _nvfp4),
}
RECIPES: dict[str, Recipe] = {name: recipe for name, (recipe, _) in _READERS.items()}
"""How the planes of every format become numbers."""

_LEVELS: dict[str, tuple[float, ...]] = {
    "IQ4_NL": tuple(float(v) for v in IQ4_LEVELS),
    "IQ4_XS": tuple(float(v) for v in IQ4_LEVELS),
    "NVFP4": tuple(E2M1_LEVELS),
}


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
