"""Stored blocks taken apart: a plane for each kind of field, by rows, before tile order (packed.py).

Legend: N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.kernels.dequant import blocks as fields_of
from civetta.kernels.dequant.iq import IQ4_LEVELS
from civetta.kernels.dequant.reference import E2M1_LEVELS, FP8_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.checkpoint.quant import QuantTensor


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Planes of one matrix by rows; codes uint8 [N, K]."""

    codes: Tensor
    high: Tensor | None = None
    scale: Tensor | None = None
    minimum: Tensor | None = None
    d: Tensor | None = None
    dmin: Tensor | None = None


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


def _q4_0(w: QuantTensor) -> Fields:
    return Fields(codes=_by_row(w, fields_of.nibbles(_blocks(w)[:, 2:], 16)), d=_half(w, 0))


def _q4_1(w: QuantTensor) -> Fields:
    codes = _by_row(w, fields_of.nibbles(_blocks(w)[:, 4:], 16))
    return Fields(codes=codes, d=_half(w, 0), minimum=_half(w, 2))


def _q5_0(w: QuantTensor) -> Fields:
    return Fields(codes=_by_row(w, _five(_blocks(w), 2, 6)), d=_half(w, 0))


def _q5_1(w: QuantTensor) -> Fields:
    codes = _by_row(w, _five(_blocks(w), 4, 8))
    return Fields(codes=codes, d=_half(w, 0), minimum=_half(w, 2))


def _q8_0(w: QuantTensor) -> Fields:
    return Fields(codes=_by_row(w, _blocks(w)[:, 2:]), d=_half(w, 0))


def _k_fields(w: QuantTensor, codes: Tensor) -> Fields:
    packed = _blocks(w)[:, 4:16]
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = torch.cat([a & 63, (c & 15) | ((a >> 6) << 4)], dim=1)
    minimum = torch.cat([b & 63, (c >> 4) | ((b >> 6) << 4)], dim=1)
    return Fields(
        codes=_by_row(w, codes),
        scale=_by_row(w, scale),
        minimum=_by_row(w, minimum),
        d=_half(w, 0),
        dmin=_half(w, 2),
    )


def _q4_k(w: QuantTensor) -> Fields:
    return _k_fields(w, fields_of.nibbles(_blocks(w)[:, 16:], 32))


def _q5_k(w: QuantTensor) -> Fields:
    blocks = _blocks(w)
    fifth = fields_of.fields(blocks[:, 16:48].unsqueeze(1), 1, 8).flatten(1)
    return _k_fields(w, fields_of.nibbles(blocks[:, 48:], 32) | (fifth << 4))


def _q6_k(w: QuantTensor) -> Fields:
    blocks = _blocks(w)
    high = fields_of.fields(fields_of.grouped(blocks[:, 128:192], 32), 2, 4).flatten(1)
    codes = fields_of.nibbles(blocks[:, :128], 64) | (high << 4)
    scale = fields_of.signed(blocks[:, 192:208])
    return Fields(codes=_by_row(w, codes), scale=_by_row(w, scale), d=_half(w, 208))


def _iq4_nl(w: QuantTensor) -> Fields:
    return _q4_0(w)


def _iq4_xs(w: QuantTensor) -> Fields:
    blocks = _blocks(w)
    low = fields_of.fields_of_each(blocks[:, 4:8], 4, 2).flatten(1)
    high = fields_of.fields_of_each(blocks[:, 2:4], 2, 4).flatten(1)
    scale = fields_of.signed(low | (high << 4)) - 32
    codes = fields_of.nibbles(blocks[:, 8:], 16)
    return Fields(codes=_by_row(w, codes), scale=_by_row(w, scale), d=_half(w, 0))


def _fp8(w: QuantTensor) -> Fields:
    """Block scales become one a row and 128 columns; one global scale is repeated."""
    codes = w.data_RB.contiguous()
    spans = -(-w.cols // FP8_BLOCK)
    if w.scale is None or w.scale.ndim < 2:
        one = torch.ones(1, device=codes.device) if w.scale is None else w.scale.float()
        return Fields(codes=codes, d=one.reshape(1, 1).expand(w.rows, spans).contiguous())
    rows = torch.arange(w.row_offset, w.row_offset + w.rows, device=codes.device)
    return Fields(codes=codes, d=w.scale.float()[rows // FP8_BLOCK].contiguous())


def _nvfp4(w: QuantTensor) -> Fields:
    assert w.scale is not None
    codes = fields_of.fields_of_each(w.data_RB, 4, 2).flatten(1)
    one = torch.ones(1, device=codes.device) if w.scale_2 is None else w.scale_2.float()
    d = one.reshape(1, 1).expand(w.rows, 1).contiguous()
    return Fields(codes=codes, scale=w.scale.contiguous(), d=d)


READERS: dict[str, tuple[Recipe, Callable[[QuantTensor], Fields]]] = {
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
RECIPES: dict[str, Recipe] = {name: recipe for name, (recipe, _) in READERS.items()}
"""How the planes of every format become numbers."""

LEVELS: dict[str, tuple[float, ...]] = {
    "IQ4_NL": tuple(float(v) for v in IQ4_LEVELS),
    "IQ4_XS": tuple(float(v) for v in IQ4_LEVELS),
    "NVFP4": tuple(E2M1_LEVELS),
}
