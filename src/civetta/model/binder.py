"""`Binder`: hands out a checkpoint's tensors by name and proves that each is used exactly once.

The same binding code runs twice: first dry, against the header only, so that missing, surplus and
wrong-shaped tensors are refused before any weight is read; then for real, as views of the file or
copies of their own.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.checkpoint.formats import F8_E4M3, INTEGER_FORMATS, NVFP4, U8
from civetta.checkpoint.quant import QuantTensor, Weight, bytes_view, quant_tensor
from civetta.errors import TensorMissing, TensorShapeWrong, TensorSurplus, TensorTypeUnknown
from civetta.kernels.dequant.reference import dequantize

if TYPE_CHECKING:
    from civetta.checkpoint.source import Checkpoint
    from civetta.checkpoint.tensors import TensorInfo

PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FP8_BLOCK = 128
NVFP4_GROUP = 16


class Binder:
    """Access to tensors by file name; `dry` checks names, shapes and types and reads nothing.

    `copied`: tensors are copies in memory of this process, which no other program's reading pushes
    out, instead of views of the mapped file.
    """

    def __init__(self, checkpoint: Checkpoint, *, dry: bool, copied: bool = False) -> None:
        self._checkpoint, self._dry, self._copied = checkpoint, dry, copied
        self._used: dict[str, str] = {}

    def has(self, name: str) -> bool:
        """Whether the files hold a tensor of this name."""
        return name in self._checkpoint.tensors

    def rows(self, name: str) -> int:
        """Rows of a matrix; raises TensorMissing, TensorShapeWrong for another rank."""
        info = self._info(name)
        if len(info.shape) != 2:
            raise _wrong_rank(info)
        return info.shape[0]

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        """A [rows, cols] weight with its companion scales, as a view.

        Raises TensorMissing, TensorShapeWrong, TensorTypeUnknown.
        """
        info = self._info(name)
        if info.format == U8 and self.has(_companion(name, "weight_scale_2")):
            return self._nvfp4(name, rows, cols)
        flat = (cols,) if rows == 1 else None
        if info.shape not in ((rows, cols), flat):
            raise _wrong_shape(info, (rows, cols))
        self._use(name)
        if info.format in INTEGER_FORMATS:
            raise _wrong_type(info, "a floating-point or block format")
        if info.format == F8_E4M3:
            return self._fp8(info, rows, cols)
        return _dummy(rows, cols) if self._dry else _matrix(self._bytes(name), info, rows, cols)

    def bank(self, name: str, count: int, rows: int, cols: int) -> tuple[Weight, ...]:
        """`count` matrices stored as one [count, rows, cols] tensor."""
        info = self._info(name)
        if info.shape != (count, rows, cols):
            raise _wrong_shape(info, (count, rows, cols))
        if info.format in (*INTEGER_FORMATS, F8_E4M3):
            raise _wrong_type(info, "a floating-point or block format")
        self._use(name)
        if self._dry:
            return (_dummy(rows, cols),) * count
        whole = _matrix(self._bytes(name), info, count * rows, cols)
        return tuple(_rows(whole, i * rows, (i + 1) * rows) for i in range(count))

    def vector(self, name: str, *shape: int, add: float = 0.0) -> Tensor:
        """A small float tensor, float32 in `shape`, plus `add`; extra dimensions of 1 are allowed."""
        info = self._info(name)
        if [n for n in info.shape if n != 1] != [n for n in shape if n != 1] and not (
            prod(info.shape) == prod(shape) and len(shape) == 2 and info.shape == (prod(shape),)
        ):
            raise _wrong_shape(info, shape)
        if info.format in (*INTEGER_FORMATS, F8_E4M3):
            raise _wrong_type(info, "a floating-point format")
        self._use(name)
        if self._dry:
            return torch.zeros(0)
        cols = info.cols
        q = quant_tensor(self._bytes(name), info.format, prod(info.shape) // cols, cols)
        return (dequantize(q) + add).view(shape)

    def integers(self, name: str, count: int) -> tuple[int, ...]:
        """A vector of int64; empty when dry."""
        info = self._info(name)
        if info.shape != (count,):
            raise _wrong_shape(info, (count,))
        if info.format.name != "I64":
            raise _wrong_type(info, "I64")
        self._use(name)
        if self._dry:
            return ()
        return tuple(int(x) for x in bytes_view(self._bytes(name)).view(torch.int64))

    def stored(self, name: str) -> TensorInfo:
        """Where a tensor lies, for a caller that reads its bytes itself; counts as used."""
        info = self._info(name)
        self._use(name)
        return info

    def ignore(self, prefix: str, reason: str) -> None:
        """Tensors under `prefix` are not read, for a stated reason."""
        for name in self._checkpoint.tensors:
            if name.startswith(prefix):
                self._used.setdefault(name, reason)

    def ignored(self) -> dict[str, str]:
        """Names that were left aside, with the reason."""
        return {name: reason for name, reason in self._used.items() if reason}

    def finish(self, prefix: str = "") -> None:
        """Raise TensorSurplus when a tensor under `prefix` was neither used nor ignored."""
        names = (name for name in self._checkpoint.tensors if name.startswith(prefix))
        left = [name for name in names if name not in self._used]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise TensorSurplus(
                f"{self._checkpoint.path}: tensor {left[0]!r}{more} has no place in this model;"
                " the configuration and the weights do not belong together"
            )

    def _fp8(self, info: TensorInfo, rows: int, cols: int) -> Weight:
        block = _companion(info.name, "weight_scale_inv")
        if self.has(block):
            grid = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
            scale = self.vector(block, *grid)
        else:
            scale = self.vector(_companion(info.name, "weight_scale"), 1)
        if self._dry:
            return _dummy(rows, cols)
        return replace(quant_tensor(self._bytes(info.name), F8_E4M3, rows, cols), scale=scale)

    def _nvfp4(self, name: str, rows: int, cols: int) -> Weight:
        info = self._info(name)
        if cols % NVFP4_GROUP:
            raise _wrong_type(info, f"a format for rows of {cols} values")
        if info.shape != (rows, cols // 2):
            raise _wrong_shape(info, (rows, cols // 2))
        scale_name = _companion(name, "weight_scale")
        scale_info = self._info(scale_name)
        if scale_info.shape != (rows, cols // NVFP4_GROUP) or scale_info.format != F8_E4M3:
            raise _wrong_shape(scale_info, (rows, cols // NVFP4_GROUP))
        for used in (name, scale_name):
            self._use(used)
        scale_2 = self.vector(_companion(name, "weight_scale_2"), 1)
        activation = _companion(name, "input_scale")
        if self.has(activation):
            self._used[activation] = "activations are not quantised here"
        if self._dry:
            return _dummy(rows, cols)
        return replace(
            quant_tensor(self._bytes(name), NVFP4, rows, cols),
            scale=bytes_view(self._bytes(scale_name)).view(rows, -1),
            scale_2=scale_2,
        )

    def _info(self, name: str) -> TensorInfo:
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise TensorMissing(
                f"{self._checkpoint.path}: tensor {name!r} is missing; the download is incomplete"
                " or the file is for another program"
            )
        return info

    def _use(self, name: str) -> None:
        assert name not in self._used, f"{name} is bound twice"
        self._used[name] = ""

    def _bytes(self, name: str):  # type: ignore[no-untyped-def]  # numpy view
        stored = self._checkpoint.bytes_of(name)
        if not self._copied:
            return stored
        copy = torch.empty(len(stored), dtype=torch.uint8).numpy()  # aligned for wide loads
        copy[:] = stored
        return copy


def _companion(name: str, suffix: str) -> str:
    return name.removesuffix("weight") + suffix


def _matrix(data, info: TensorInfo, rows: int, cols: int) -> Weight:  # type: ignore[no-untyped-def]
    dtype = PLAIN_DTYPES.get(info.format.name)
    if dtype is not None and info.offset % info.format.block_bytes == 0:
        return bytes_view(data).view(dtype).view(rows, cols)
    return quant_tensor(data, info.format, rows, cols)


def _rows(w: Weight, start: int, stop: int) -> Weight:
    return w.slice_rows(start, stop) if isinstance(w, QuantTensor) else w[start:stop]


def slice_rows(w: Weight, start: int, stop: int) -> Weight:
    """Rows [start, stop) as a view; a dry placeholder stays one."""
    return w if w.shape[0] == 0 else _rows(w, start, stop)


def _dummy(rows: int, cols: int) -> Tensor:
    del rows, cols
    return torch.zeros(0, 0)


def _wrong_shape(info: TensorInfo, wanted: tuple[int, ...]) -> TensorShapeWrong:
    return TensorShapeWrong(
        f"{info.path}: tensor {info.name!r} has shape {list(info.shape)}, but the configuration"
        f" implies {list(wanted)}; the configuration and the weights do not belong together"
    )


def _wrong_rank(info: TensorInfo) -> TensorShapeWrong:
    return TensorShapeWrong(
        f"{info.path}: tensor {info.name!r} has shape {list(info.shape)}, but must be a matrix;"
        " the file is damaged or made for another program"
    )


def _wrong_type(info: TensorInfo, wanted: str) -> TensorTypeUnknown:
    return TensorTypeUnknown(
        f"{info.path}: tensor {info.name!r} is stored as {info.format.name}, but must be {wanted};"
        " use another quantization of the model"
    )
