"""Stored weights to numbers, in plain torch: what each format means, for every format we accept.

Legend: R rows, B bytes a row, C columns. Decoding is exact float32 arithmetic in one order, then
one rounding to the asked dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from civetta.checkpoint.quant import QuantTensor, Weight
from civetta.errors import TensorTypeUnknown
from civetta.kernels.dequant import blocks, iq

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from civetta.checkpoint.formats import QuantFormat

FP8_BLOCK = 128  # rows and columns that share one scale, model.md A.7
NVFP4_GROUP = 16  # columns that share one scale, model.md A.8

RUN_ROWS = 16_384
"""Rows that `dequantize_in_runs` expands at once; a multiple of FP8_BLOCK."""

E2M1_LEVELS = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)

_PLAIN: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}

_BLOCKS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": blocks.q4_0,
    "Q4_1": blocks.q4_1,
    "Q5_0": blocks.q5_0,
    "Q5_1": blocks.q5_1,
    "Q8_0": blocks.q8_0,
    "Q2_K": blocks.q2_k,
    "Q3_K": blocks.q3_k,
    "Q4_K": blocks.q4_k,
    "Q5_K": blocks.q5_k,
    "Q6_K": blocks.q6_k,
    "TQ1_0": blocks.tq1_0,
    "TQ2_0": blocks.tq2_0,
    "MXFP4": blocks.mxfp4,
    "GGML_NVFP4": blocks.ggml_nvfp4,
    "IQ4_NL": iq.iq4_nl,
    "IQ4_XS": iq.iq4_xs,
    "IQ2_XXS": iq.iq2_xxs,
    "IQ2_XS": iq.iq2_xs,
    "IQ2_S": iq.iq2_s,
    "IQ3_XXS": iq.iq3_xxs,
    "IQ3_S": iq.iq3_s,
    "IQ1_S": iq.iq1_s,
    "IQ1_M": iq.iq1_m,
}


def dequantize(q: QuantTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers of a stored matrix: dtype [rows, cols] on the device of its bytes.

    Raises TensorTypeUnknown for a format that holds no weights (integers).
    """
    return _decode_float32(q).to(dtype)


def dequantize_in_runs(q: QuantTensor, dtype: torch.dtype) -> torch.Tensor:
    """`dequantize`, some rows at a time: a tall matrix takes no float32 copy of itself."""
    if q.rows <= RUN_ROWS:
        return dequantize(q, dtype)
    out = torch.empty(q.shape, dtype=dtype, device=q.data_RB.device)
    for at in range(0, q.rows, RUN_ROWS):
        stop = min(at + RUN_ROWS, q.rows)
        out[at:stop] = dequantize(q.slice_rows(at, stop), dtype)
    return out


def as_numbers(w: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a weight, stored or plain: dtype [rows, cols] where it lies."""
    return w.to(dtype) if isinstance(w, torch.Tensor) else dequantize(w, dtype)


def dequantize_rows(
    data_RB: torch.Tensor,
    fmt: QuantFormat,
    cols: int,
    *,
    scale: torch.Tensor | None = None,
    scale_2: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Gathered rows, uint8 [n, row_bytes], as numbers: dtype [n, cols].

    The rows are no slice of their tensor, so FP8 takes a global scale [1] only. NVFP4 takes `scale`
    uint8 [n, cols/16] of the same rows, or None when each row has its scales behind its codes
    (cols/2 + cols/16 bytes, model.md A.8).
    """
    if fmt.name == "NVFP4" and scale is None:
        codes = fmt.row_bytes(cols)
        data_RB, scale = data_RB[:, :codes], data_RB[:, codes:]
    assert fmt.name != "F8_E4M3" or scale is None or scale.numel() == 1, "a global scale"
    q = QuantTensor(format=fmt, data_RB=data_RB, cols=cols, scale=scale, scale_2=scale_2)
    return dequantize(q, dtype)


def _decode_float32(q: QuantTensor) -> torch.Tensor:
    name = q.format.name
    assert q.data_RB.shape[1] == q.format.row_bytes(q.cols), "row bytes match the columns"
    if name in _PLAIN:
        return _aligned(q.data_RB).view(_PLAIN[name]).float()
    if name == "F8_E4M3":
        return _decode_fp8(q)
    if name == "NVFP4":
        return _decode_nvfp4(q)
    decode = _BLOCKS.get(name)
    if decode is None:
        raise TensorTypeUnknown(
            f"A weight matrix is stored as {name}, which holds no fractions; the file is of another"
            " model or damaged."
        )
    if q.data_RB.numel() == 0:
        return torch.empty(q.shape, dtype=torch.float32, device=q.data_RB.device)
    blocks_NB = q.data_RB.reshape(-1, q.format.block_bytes)
    return decode(blocks_NB).view(q.shape)


def _aligned(data_RB: torch.Tensor) -> torch.Tensor:
    """Contiguous bytes that start on an 8-byte boundary, so that they can be viewed as numbers."""
    data_RB = data_RB.contiguous()
    if data_RB.data_ptr() % 8 or data_RB.storage_offset() % 8:
        return data_RB.clone()
    return data_RB


def _decode_fp8(q: QuantTensor) -> torch.Tensor:
    """e4m3 times a scale: one for all, or one a 128x128 block of the unsliced tensor."""
    values = q.data_RB.contiguous().view(torch.float8_e4m3fn).float()
    if q.scale is None:
        return values
    scale = q.scale.to(values.device, torch.float32)
    if scale.ndim < 2:
        return values * scale  # [1] or a scalar
    rows = torch.arange(q.row_offset, q.row_offset + q.rows, device=values.device)
    cols = torch.arange(q.cols, device=values.device)
    return values * scale[rows // FP8_BLOCK][:, cols // FP8_BLOCK]


def _decode_nvfp4(q: QuantTensor) -> torch.Tensor:
    """e2m1 times the e4m3 scale of its group of 16 (exact), times the global scale."""
    assert q.scale is not None, "NVFP4 has a scale for each group of 16"
    assert q.scale.shape == (q.rows, q.cols // NVFP4_GROUP), "a scale for each group of 16"
    table = torch.tensor(E2M1_LEVELS, dtype=torch.float32, device=q.data_RB.device)
    values = table[blocks.fields_of_each(q.data_RB, 4, 2).flatten(1).int()]
    scales = q.scale.to(values.device).contiguous().view(torch.float8_e4m3fn).float()
    values = blocks.spread(scales, values)
    if q.scale_2 is None:
        return values
    return values * q.scale_2.to(values.device, torch.float32)
