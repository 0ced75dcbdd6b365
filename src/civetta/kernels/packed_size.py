"""How large a stored weight will be in planes (packed.py), before anything of it is read."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.checkpoint.formats import by_name
from civetta.checkpoint.quant import QuantTensor
from civetta.kernels.packed import STORED, TILE, pack
from civetta.kernels.packed_fields import RECIPES

if TYPE_CHECKING:
    from civetta.checkpoint.quant import Weight


def packed_bytes(w: Weight, dtype: torch.dtype) -> int:
    """What `pack` makes of a weight whose rows fill tiles; reads and allocates nothing."""
    if isinstance(w, Tensor):
        return w.nbytes
    count = w.rows * (w.cols + -w.cols % TILE)
    if w.format.name not in RECIPES:
        return count * STORED.get(w.format.name, dtype).itemsize
    return round(count * _bytes_a_number(w.format.name))


@cache
def _bytes_a_number(name: str) -> float:
    """Of a format with planes, from one packed without contents."""
    fmt, rows, cols = by_name(name), TILE, 1024
    assert fmt is not None
    with torch.device("meta"):
        sample = QuantTensor(
            format=fmt,
            data_RB=torch.empty((rows, fmt.row_bytes(cols)), dtype=torch.uint8),
            cols=cols,
            scale=torch.empty((rows, cols // 16), dtype=torch.uint8) if name == "NVFP4" else None,
        )
    return pack(sample, torch.float16, "meta").nbytes / (rows * cols)
