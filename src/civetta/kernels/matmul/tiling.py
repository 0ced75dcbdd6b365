"""How a packed product on a GPU is cut: parts of the inner dimension, tiles, steps, precision.

Parts and the order inside a step follow from the weight alone; the rest may follow the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from civetta.kernels.packed import PackedWeight

FEW_ROWS = 64
"""Up to so many rows, the parts of the inner dimension run beside each other."""

PART_COLS = 512
"""Columns of one accumulator: two steps of a program when rows are few, so that a launch's memory
reads are nearly all under way at once."""

WHOLE_COLS = 768
"""A weight of up to so many columns is not cut."""

FEW_COLS = 64
"""Outputs of a tile when rows are few. Not fewer: NVIDIA's matrix units take tiles from 64 on by other
instructions (wgmma) than smaller ones, and the two round differently."""


def part_cols(w: PackedWeight) -> int:
    """Columns of one part."""
    return w.cols if w.cols <= WHOLE_COLS else PART_COLS


def runs_of(bits: int, *, few: bool, exact: bool) -> int:
    """Runs of 64 columns in a step. Nibbles are read in one order whatever the batch; elsewhere
    the order does not depend on the step."""
    if bits not in {0, 8} or few or exact:
        return 2
    return 1 if bits == 8 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Outputs of a tile, warps, stages of the pipeline of loads, registers a thread (None: free)."""

    outputs: int
    warps: int
    stages: int
    registers: int | None = None


def tiling(*, few: bool, exact: bool) -> Tiling:
    """The fastest of those tried (benchmarks/kernels/gpu_tiles.py)."""
    if few:
        return Tiling(outputs=FEW_COLS, warps=4, stages=1, registers=None if exact else 128)
    if exact:
        return Tiling(outputs=64, warps=8, stages=2)
    return Tiling(outputs=128, warps=8, stages=3)


def precision(dtype: torch.dtype, device: torch.device) -> str:
    """How float32 operands are multiplied: in three TF32 products on NVIDIA, else as they are."""
    if dtype != torch.float32:
        return ""
    return "tf32x3" if device.type == "cuda" and torch.version.hip is None else "ieee"


def tile_rows_for(rows: int) -> int:
    """Rows of a tile: at least what a matrix unit takes; beyond that, decoding a weight once more
    costs more than rows that are not there."""
    if rows <= 16:
        return 16
    return 32 if rows <= 32 else 64 if rows <= 48 else 128


def registers_of(tiles: Tiling, device: torch.device) -> dict[str, int]:
    """The launch option that bounds registers, where the backend has one."""
    if tiles.registers is None or device.type != "cuda" or torch.version.hip is not None:
        return {}
    return {"maxnreg": tiles.registers}
