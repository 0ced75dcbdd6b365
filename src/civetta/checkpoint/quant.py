"""`QuantTensor`: stored bytes plus what is needed to read them as numbers, never expanded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from civetta.checkpoint.formats import QuantFormat


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class QuantTensor:
    """A weight matrix [rows, cols] in its stored format.

    data_RB: uint8 [rows, row_bytes], usually a view of a memory-mapped file (rows may be strided,
    bytes within a row are contiguous).
    scale: companion scales, by format:
      F8_E4M3 in 128x128 blocks: [ceil(rows/128), ceil(cols/128)] (multiply, model.md A.7);
      F8_E4M3 with one global scale: [1];
      NVFP4: float8 bytes as uint8 [rows, cols/16] (e4m3), with `scale_2` a float32 scalar tensor;
      otherwise None.
    row_offset: position of row 0 in the tensor that `scale` describes (block scales of a slice).
    """

    format: QuantFormat
    data_RB: torch.Tensor
    cols: int
    scale: torch.Tensor | None = None
    scale_2: torch.Tensor | None = None
    row_offset: int = 0

    @property
    def rows(self) -> int:
        """Number of rows (output features)."""
        return int(self.data_RB.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """Logical shape (rows, cols) in PyTorch order [out, in]."""
        return (self.rows, self.cols)

    @property
    def nbytes(self) -> int:
        """Stored bytes of the values, scales left out."""
        return self.rows * int(self.data_RB.shape[1])

    def take_rows(self, ids_T: torch.Tensor) -> QuantTensor:
        """Copies of the rows ids_T (int64); scales in 128-row blocks are not supported."""
        scale = self.scale
        if scale is not None and self.format.name == "NVFP4":
            scale = scale.index_select(0, ids_T)
        assert self.format.name != "F8_E4M3" or scale is None or scale.numel() == 1
        return replace(self, data_RB=self.data_RB.index_select(0, ids_T), scale=scale)

    def slice_rows(self, start: int, stop: int) -> QuantTensor:
        """Rows [start, stop) as a view; block scales follow through `row_offset`."""
        scale = self.scale
        if scale is not None and self.format.name == "NVFP4":
            scale = scale[start:stop]
        return replace(
            self, data_RB=self.data_RB[start:stop], scale=scale, row_offset=self.row_offset + start
        )

    def slice_cols(self, start: int, stop: int) -> QuantTensor:
        """Columns [start, stop), both on a block's edge, as a copy; formats without companion scales."""
        width, size = self.format.block_values, self.format.block_bytes
        assert self.scale is None, "companion scales do not follow a column slice"
        assert start % width == stop % width == 0, "a column slice cuts a block"
        data_RB = self.data_RB[:, start // width * size : stop // width * size].clone()
        return replace(self, data_RB=data_RB, cols=stop - start)


Weight = torch.Tensor | QuantTensor
"""A matrix an op can read: a plain float tensor [rows, cols] or a stored one."""


class _Memory:
    """Memory of an array without its read-only flag, kept alive through `owner`."""

    def __init__(self, owner: np.ndarray) -> None:
        self.owner = owner
        address = owner.__array_interface__["data"][0]
        self.__array_interface__ = {**owner.__array_interface__, "data": (address, False)}


def bytes_view(data: np.ndarray) -> torch.Tensor:
    """Stored bytes as a torch tensor: uint8 [n] over the same memory, which it keeps alive.

    `data` is contiguous uint8 [n], often read-only (a mapped file): the result must never be
    written to. torch has no read-only tensors and warns about such arrays, hence the detour.
    """
    assert data.flags.c_contiguous, "bytes of a tensor are contiguous"
    return torch.from_numpy(np.asarray(_Memory(data)))


def quant_tensor(data: np.ndarray, fmt: QuantFormat, rows: int, cols: int) -> QuantTensor:
    """Stored bytes uint8 [rows * row_bytes] as a matrix without scales, a view of the same memory.

    For companion scales, use `dataclasses.replace` on the result.
    """
    data_RB = bytes_view(data).view(rows, fmt.row_bytes(cols))
    return QuantTensor(format=fmt, data_RB=data_RB, cols=cols)


_PLAIN_DTYPES = {
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "I8": "i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "U8": "u1",
    "BOOL": "?",
}


def plain_array(data: np.ndarray, fmt: QuantFormat, shape: tuple[int, ...]) -> np.ndarray:
    """Stored bytes of a type that numpy has, as an exact array of `shape`: a view, not a copy.

    Meant for constants that must not pass through float32 (the int64 hash multipliers, model.md
    A.3). `fmt` is F16, F32, F64, an integer type or BOOL; anything else is our own mistake.
    """
    assert fmt.name in _PLAIN_DTYPES, f"{fmt.name} is no numpy type"
    return data.view(_PLAIN_DTYPES[fmt.name]).reshape(shape)
