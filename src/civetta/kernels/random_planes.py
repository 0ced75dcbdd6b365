"""Packed weights of random codes, made on the device: for measuring speed without a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from civetta.kernels.packed import STORED, TILE, PackedWeight
from civetta.kernels.packed_fields import PLAIN, RECIPES

_SPREAD = {"Q8_0": 74.0, "Q4_K": 167.0, "Q5_K": 336.0, "Q5_1": 9.2, "F8_E4M3": 68.0}
"""Deviation of random codes in units of the step d."""


def random_packed(
    name: str,
    rows: int,
    cols: int,
    generator: torch.Generator,
    *,
    experts: int = 1,
    pair: bool = False,
) -> PackedWeight:
    """Planes of a stored format filled with random codes, on the generator's device.

    Values have about zero mean and a variance of 1 / cols, so that activations keep their size.
    """
    device = generator.device
    tiles, units = -(-rows // TILE), -(-cols // TILE)
    size = (experts, tiles)
    if name in STORED:
        dtype = STORED[name]
        inner = (4 * units, 1024) if dtype.itemsize == 2 else (8 * units, 512)
        plain = torch.randn(*size, *inner, generator=generator, device=device, dtype=dtype)
        codes = plain.mul_(cols**-0.5)
        return PackedWeight(recipe=PLAIN, rows=rows, cols=cols, codes=codes, pair=pair)
    recipe, spread = RECIPES[name], _SPREAD[name]

    def words(count: int, width: int, keep: int = 0xFF) -> Tensor:
        shape = (*size, count, 4 * width)
        draw = torch.randint(256, shape, generator=generator, device=device, dtype=torch.uint8)
        return draw.bitwise_and_(keep).view(torch.int32)

    def halves(value: float) -> Tensor:
        spans = -(-cols // recipe.span) if recipe.span > TILE else TILE // recipe.span * units
        if recipe.code == "fp8":
            return torch.full((*size, spans, 64), value, dtype=torch.float32, device=device)
        plane = torch.full((*size, spans, 64), value, dtype=torch.float16, device=device)
        return plane.view(torch.int32)

    step, middle = cols**-0.5 / spread, (2**recipe.bits - 1) / 2
    keep = 0xF7 if recipe.code == "fp8" else 0xFF  # no NaN
    high = scale = minimum = dmin = None
    if recipe.bits in {5, 6}:
        high = words((recipe.bits - 4) * units, 128)
    if recipe.low == "half":
        minimum = halves(-middle * step)
    if recipe.scale == "uint8":
        scale = words(units, 32, 63)
    if recipe.low == "scaled":
        minimum, dmin = scale, halves(middle * step)
    return PackedWeight(
        recipe=recipe,
        rows=rows,
        cols=cols,
        codes=words(2 * units if recipe.bits == 8 else units, 512, keep),
        high=high,
        scale=scale,
        minimum=minimum,
        d=halves(step),
        dmin=dmin,
        pair=pair,
    )
