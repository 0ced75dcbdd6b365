"""Products on the CPU by the compiled extension, with the signatures of `Ops`.

A row's bits depend on the row and the weights alone: each dot product is one fixed sequence of
float32 operations, whatever the number of rows, the row's place, the threads, or the other matrices
of the call (native/tiles.hpp). AVX-512, AVX2 and NEON give the same bits; x86-64 without fused
multiply-add may differ from them. Nothing here can be differentiated. Shape suffixes as in `ops`.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.kernels.dequant import grids
from civetta.kernels.matmul import reference as matmul_reference
from civetta.kernels.moe import reference as moe_reference
from civetta.kernels.residual import reference as residual_reference

if TYPE_CHECKING:
    from civetta.checkpoint.quant import QuantTensor, Weight
    from civetta.kernels import _native
    from civetta.kernels.ops import ExpertWeights, HyperWeights

_TENSOR_FORMATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_IS_BF16 = {torch.float32: False, torch.bfloat16: True}


def available() -> bool:
    """Whether the extension was built and loads; without it only the torch reference is left."""
    try:
        from civetta.kernels import _native  # noqa: F401
    except ImportError:
        return False
    return True


def instructions() -> str:
    """The instruction set in use: "avx512", "avx2", "neon" or "generic"; needs `available()`."""
    from civetta.kernels import _native

    return _native.instructions()


class _Descriptor:
    """What the extension needs to read one weight.

    `address` of a plain tensor's values (0 for a stored one), to notice that they moved; `kept` is
    read besides the weight; `owner` forgets the descriptor when the weight is freed.
    """

    __slots__ = ("address", "kept", "matrix", "owner", "rows")

    def __init__(self, matrix: _native.Matrix, address: int, kept: Tensor | None) -> None:
        self.matrix = matrix
        self.rows = matrix.rows
        self.address = address
        self.kept = kept
        self.owner: weakref.ref[Weight] | None = None


class CpuProducts:
    """`matmul`, `experts` and `hyper_read` over the extension's threads.

    Weights are described once each and remembered by identity until they are freed; their memory is
    read in place at every call. Every block format has a kernel; float64 and integers, and activations
    other than float32 and bfloat16, go to the torch reference.
    """

    def __init__(self, threads: int) -> None:
        """Use `threads` threads, the caller included (one setting for the process).

        Needs `available()`; raises ImportError otherwise.
        """
        from civetta.kernels import _native

        self._native = _native
        self._formats = frozenset(_native.FORMATS)
        self._known: dict[int, _Descriptor] = {}
        self._known_experts: dict[int, _ExpertSet] = {}
        _native.set_threads(threads)

    def matmul(self, x_TK: Tensor, w: Weight, dtype: torch.dtype) -> Tensor:
        """y_TN = x w^T, dtype [T, N]: operands in x's dtype, float32 sums; see `Ops.matmul`.

        Rows of x and of w may be strided. With bfloat16 x the weights are rounded to bfloat16 after
        decoding.
        """
        known = self._find(w)
        x_bf16, y_bf16 = _IS_BF16.get(x_TK.dtype), _IS_BF16.get(dtype)
        if known is None or x_bf16 is None or y_bf16 is None:
            return matmul_reference.matmul(x_TK, w, dtype)
        x_TK, rows, cols, stride = _rows_of(x_TK)
        assert cols == known.matrix.cols, "x is as wide as the weight's rows"
        n = known.rows
        y_TN = torch.empty((rows, n), dtype=dtype)
        self._native.matmul(
            known.matrix, x_TK.data_ptr(), stride, x_bf16, rows, y_TN.data_ptr(), n, y_bf16
        )
        return y_TN

    def experts(
        self, h_TD: Tensor, experts_TM: Tensor, weights_TM: Tensor, w: ExpertWeights
    ) -> Tensor:
        """y_TD float32, each token through its experts, summed in slot order; see `Ops.experts`.

        Raises IndexError for an expert id that is not there.
        """
        known = self._known_experts.get(id(w)) or self._describe_experts(w)
        h_bf16 = _IS_BF16.get(h_TD.dtype)
        if known.experts is None or h_bf16 is None:
            return moe_reference.experts(h_TD, experts_TM, weights_TM, w)
        h_TD, rows, cols, stride = _rows_of(h_TD)
        slots = experts_TM.shape[1]
        assert cols == known.cols, "h is as wide as the experts' rows"
        assert experts_TM.shape == weights_TM.shape == (rows, slots), "a weight for each slot"
        ids = experts_TM.to(torch.int64).contiguous()
        weights = weights_TM.to(torch.float32).contiguous()
        y_TD = torch.empty((rows, known.rows), dtype=torch.float32)
        self._native.experts(
            known.experts,
            h_TD.data_ptr(),
            stride,
            h_bf16,
            ids.data_ptr(),
            weights.data_ptr(),
            rows,
            slots,
            y_TD.data_ptr(),
        )
        return y_TD

    def hyper_read(
        self, x_TSD: Tensor, w: HyperWeights, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Mix the streams into one row, products included, in one call; see `Ops.hyper_read`."""
        down, up = self._find(w.down), self._find(w.up)
        inject = down if w.inject is None else self._find(w.inject)
        h_bf16 = _IS_BF16.get(dtype)
        if down is None or up is None or inject is None or h_bf16 is None:
            return residual_reference.hyper_read(x_TSD, w, eps, dtype, matmul=self.matmul)
        assert w.gain_SD.dtype == torch.float32, "gains are float32"
        assert w.gain_SD.is_contiguous(), "gains lie side by side"
        x_TSD = x_TSD.to(torch.float32).contiguous()
        rows, streams, width = x_TSD.shape
        assert down.matrix.cols == up.rows == streams * width, "all streams side by side"
        h_TD = torch.empty((rows, width), dtype=dtype)
        inject_TS = torch.empty((rows, streams), dtype=torch.float32)
        self._native.hyper_read(
            down.matrix,
            up.matrix,
            inject.matrix,
            w.inject is not None,
            w.gain_SD.data_ptr(),
            streams,
            width,
            eps,
            x_TSD.data_ptr(),
            rows,
            h_TD.data_ptr(),
            h_bf16,
            inject_TS.data_ptr(),
        )
        return h_TD, None if w.inject is None else inject_TS

    def _find(self, w: Weight) -> _Descriptor | None:
        """The descriptor of a weight, or None where the extension cannot read it."""
        known = self._known.get(id(w))
        if known is not None and (not known.address or known.address == _address(w)):
            return known
        known = self._describe(w)
        if known is not None:
            key, table = id(w), self._known
            known.owner = weakref.ref(w, lambda _: table.pop(key, None))
            table[key] = known
        return known

    def _describe(self, w: Weight) -> _Descriptor | None:
        if isinstance(w, Tensor):
            name = _TENSOR_FORMATS.get(w.dtype)
            if name is None or w.device.type != "cpu" or (w.stride(1) != 1 and w.shape[1] > 1):
                return None
            (rows, cols), size, address = w.shape, w.element_size(), w.data_ptr()
            matrix = self._native.Matrix(
                name, rows, cols, address, w.stride(0) * size, 0, 0, 1.0, 0
            )
            return _Descriptor(matrix, address, None)
        return self._describe_stored(w)

    def _describe_stored(self, w: QuantTensor) -> _Descriptor | None:
        name, data_RB = w.format.name, w.data_RB
        if name not in self._formats or data_RB.device.type != "cpu" or data_RB.stride(1) != 1:
            return None
        kept, scale_stride, scale_2 = None, 0, 1.0 if w.scale_2 is None else float(w.scale_2)
        if name == "F8_E4M3" and (w.scale is None or w.scale.ndim < 2):
            # One scale for all reads like one row of blocks that every row shares.
            kept = torch.full((-(-w.cols // 128),), 1.0 if w.scale is None else float(w.scale))
        elif name == "F8_E4M3" and w.scale is not None:
            kept = w.scale.to(torch.float32).contiguous()
            scale_stride = kept.stride(0)
        elif name == "NVFP4":
            if w.scale is None:
                return None
            kept = w.scale.view(torch.uint8).contiguous()
            scale_stride = kept.stride(0)
        elif name in grids.BY_FORMAT:
            kept = _points(name)
        scale = 0 if kept is None else kept.data_ptr()
        matrix = self._native.Matrix(
            name,
            w.rows,
            w.cols,
            data_RB.data_ptr(),
            data_RB.stride(0),
            scale,
            scale_stride,
            scale_2,
            w.row_offset,
        )
        return _Descriptor(matrix, 0, kept)

    def _describe_experts(self, w: ExpertWeights) -> _ExpertSet:
        key, table = id(w), self._known_experts
        owner = weakref.ref(w, lambda _: table.pop(key, None))
        parts = [[self._describe(m) for m in side] for side in (w.gate, w.up, w.down)]
        known = [[d for d in side if d is not None] for side in parts]
        complete = [len(side) for side in known] == [len(w.gate)] * 3
        gate, up, down = ([d.matrix for d in side] for side in known)
        table[key] = _ExpertSet(
            owner=owner,
            experts=self._native.Experts(gate, up, down) if complete else None,
            cols=w.gate[0].shape[1],
            rows=w.down[0].shape[0],
            kept=[d.kept for side in known for d in side if d.kept is not None],
        )
        return table[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExpertSet:
    """One layer's experts as the extension reads them; None where a format has no kernel."""

    owner: weakref.ref[ExpertWeights]
    experts: _native.Experts | None
    cols: int
    rows: int
    kept: list[Tensor]


@functools.cache
def _points(name: str) -> Tensor:
    """A codebook's points, int8 [points, coordinates]; all matrices of a format share them."""
    return torch.from_numpy(grids.BY_FORMAT[name].points()).contiguous()


def _address(w: Weight) -> int:
    return w.data_ptr() if isinstance(w, Tensor) else 0


def _rows_of(x_TK: Tensor) -> tuple[Tensor, int, int, int]:
    """x with its values of a row side by side, and its rows, columns and row stride."""
    rows, cols = x_TK.shape
    stride, inner = x_TK.stride()
    if inner != 1 and cols > 1:
        return x_TK.contiguous(), rows, cols, cols
    return x_TK, rows, cols, stride
