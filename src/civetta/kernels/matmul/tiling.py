"""How a packed product on a GPU is cut: parts of the inner dimension, tiles, steps, precision.

Parts and the order inside a step follow from the weight alone; the rest may follow the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from civetta.kernels.packed_fields import RECIPES

if TYPE_CHECKING:
    from civetta.kernels.packed import PackedWeight
    from civetta.kernels.packed_fields import Recipe

PAIRED = (RECIPES["Q8_0"], RECIPES["Q4_K"])
"""Recipes that float16 operands on NVIDIA decode in pairs."""

RAISED = (RECIPES["Q5_1"], RECIPES["Q5_K"])
"""Recipes whose codes operands of 16 bits on NVIDIA decode as 128 + code."""

FEW_ROWS = 64
"""Up to so many rows, the parts of the inner dimension run beside each other."""

LEAST_ROWS = 16
"""Rows of the smallest tile; of 8 rows Triton 3.6 makes another instruction (mma)."""

PROGRAMS = 256
"""Programs that a launch of few rows should have: a weight of fewer tiles is cut into parts."""

PART_UNIT = 256
"""Columns that a part is a multiple of: a step of every tiling."""

WHOLE_COLS = 768
"""A weight of up to so many columns is not cut."""


def part_cols(w: PackedWeight) -> int:
    """Columns of one accumulator. Stacked matrices are not cut: a row meets several of them."""
    if w.cols <= WHOLE_COLS or w.experts > 1 or w.tiles >= PROGRAMS * 3 // 4:
        return w.cols
    return max(1, w.cols * w.tiles // PROGRAMS // PART_UNIT) * PART_UNIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Tiles of 64 outputs in a program, tiles of 64 inputs in a step, warps, stages of the pipeline of
    loads, registers a thread (None: free).

    A program has 64 outputs at least: NVIDIA's matrix units take fewer by other instructions (mma)
    than more (wgmma), and the two round differently.
    """

    tiles: int
    steps: int
    warps: int
    stages: int
    registers: int | None = None


def tiling(w: PackedWeight, *, rows: int, exact: bool, wide: bool) -> Tiling:
    """The fastest of those tried (benchmarks/kernels/gpu_tiles.py) for a tile of `rows` rows.

    Products of several terms an operand (`exact`, `wide`) take a step's terms one after the other, so
    their step must not follow the rows.
    """
    if exact:
        return Tiling(tiles=1, steps=1, warps=4, stages=2)
    if wide and rows <= FEW_ROWS:
        return Tiling(tiles=1, steps=1, warps=4, stages=4)
    if wide:
        return Tiling(tiles=2, steps=1, warps=8, stages=3)
    if rows <= FEW_ROWS:
        long = part_cols(w) == w.cols and w.cols % PART_UNIT == 0
        return Tiling(tiles=1, steps=4 if long else 2, warps=4, stages=3)
    if w.experts > 1:
        return Tiling(tiles=2, steps=1, warps=4, stages=3)
    return Tiling(tiles=2, steps=1, warps=8, stages=3)


def precision(dtype: torch.dtype, device: torch.device) -> str:
    """How float32 operands are multiplied: in three TF32 products on NVIDIA, else as they are."""
    if dtype != torch.float32:
        return ""
    return "tf32x3" if device.type == "cuda" and torch.version.hip is None else "ieee"


def tile_rows_for(rows: int) -> int:
    """Rows of a tile: at least what a matrix unit takes; beyond that, decoding a weight once more
    costs more than rows that are not there."""
    if rows <= LEAST_ROWS:
        return LEAST_ROWS
    return 32 if rows <= 32 else 64 if rows <= 48 else 128


def last_rows(rows: int, tile_rows: int) -> int:
    """Rows of the tile that adds up parts: no matrix unit asks for 16 there."""
    return 1 if rows == 1 else min(8 if rows <= 8 else tile_rows, tile_rows)


def warps_without_copies(elements: int, most: int) -> int:
    """Warps, at most `most`, among whose threads each of `elements` (a power of two) has one holder.

    Triton gives what is left of the threads copies of the elements, and lets copies load and only
    the first holders store. A kernel that reads memory, writes it and goes on with what it read must
    have no copies: one in a late warp would read what another warp has already written.
    """
    lanes = 32 if torch.version.hip is None else 64
    return max(1, min(most, elements // lanes))


def registers_of(tiles: Tiling, device: torch.device) -> dict[str, int]:
    """The launch option that bounds registers, where the backend has one."""
    if tiles.registers is None or device.type != "cuda" or torch.version.hip is not None:
        return {}
    return {"maxnreg": tiles.registers}


def recipe_on(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Recipe:
    """The recipe as the kernels take it for operands of `dtype`: "fp8" is "fp8 bits" where the card
    has no such conversion, "int8" and "linear" are "int8 pairs" and "linear pairs" where numbers of
    float16 are decoded two at a time (halves.py)."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    if nvidia and dtype == torch.float16 and recipe in PAIRED:
        return replace(recipe, code=f"{recipe.code} pairs")
    if nvidia and dtype.itemsize == 2 and recipe in RAISED:
        return replace(recipe, code="linear raised")
    if "fp8" not in {recipe.code, recipe.scale} or converts_e4m3(device):
        return recipe
    code, scale = ("fp8 bits" if kind == "fp8" else kind for kind in (recipe.code, recipe.scale))
    return replace(recipe, code=code, scale=scale)


@cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether E4M3 is a type of Triton's for the device: on NVIDIA's from compute capability 8.9 on.

    AMD's cards count as without it: some know only another type of 8 bits, with another bias.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have; the interpreter bounds none."""
    if device.type != "cuda":
        return 1 << 30
    from triton.runtime import driver

    index = torch.device(device).index or 0
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
