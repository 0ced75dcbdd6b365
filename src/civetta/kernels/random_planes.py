"""Packed weights of random codes, made on the device: for measuring speed without a checkpoint."""

from __future__ import annotations

import torch

from civetta.kernels.packed import PLAIN, RECIPES, STORED, TILE_COLS, PackedWeight

_SPREAD = {"Q8_0": 74.0, "Q4_K": 167.0, "Q5_K": 336.0, "Q5_1": 9.2, "F8_E4M3": 68.0}
"""Deviation of random codes in units of the step d."""


def random_packed(
    name: str, rows: int, cols: int, generator: torch.Generator, *, experts: int = 1
) -> PackedWeight:
    """Planes of a stored format filled with random codes, on the generator's device.

    Values have about zero mean and a variance of 1 / cols, so that activations keep their size.
    """
    device, width = generator.device, -(-cols // TILE_COLS) * TILE_COLS
    size = (experts, rows)
    if name in STORED:
        plain = torch.randn(*size, width, generator=generator, device=device, dtype=STORED[name])
        return PackedWeight(recipe=PLAIN, rows=rows, cols=cols, codes=plain.mul_(cols**-0.5))
    recipe, spread = RECIPES[name], _SPREAD[name]
    bytes_a_row = width if recipe.bits == 8 else width // 2
    codes = torch.randint(
        256, (*size, bytes_a_row), generator=generator, device=device, dtype=torch.uint8
    )
    if recipe.code == "fp8":
        codes &= 0xF7  # no NaN
    step = cols**-0.5 / spread
    half = torch.float32 if recipe.code == "fp8" else torch.float16
    spans = -(-width // recipe.span)
    d = torch.full((*size, spans), step, dtype=half, device=device)
    high = scale = minimum = dmin = None
    if recipe.bits in {5, 6}:
        high = torch.randint(
            256, (*size, width * (recipe.bits - 4) // 8), generator=generator, device=device,
            dtype=torch.uint8,
        )  # fmt: skip
    middle = (2**recipe.bits - 1) / 2
    if recipe.low == "half":
        minimum = -middle * d
    if recipe.scale == "uint8":
        scale = torch.randint(
            64, (*size, width // recipe.group), generator=generator, device=device,
            dtype=torch.uint8,
        )  # fmt: skip
    if recipe.low == "scaled":
        minimum, dmin = scale, middle * d
    return PackedWeight(
        recipe=recipe, rows=rows, cols=cols, codes=codes, high=high, scale=scale,
        minimum=minimum, d=d, dmin=dmin,
    )  # fmt: skip
