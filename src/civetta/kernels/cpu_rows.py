"""Row-local ops on the CPU by the compiled extension, with the signatures of `Ops`.

Activations are float32 or bfloat16 tensors in CPU memory whose last dimension lies side by side
(others are copied); arithmetic is float32. A row's bits depend on that row alone, and AVX-512, AVX2
and NEON give the same ones. Nothing here can be differentiated. Needs `cpu.available()`; importing
this module raises ImportError otherwise. Shape suffixes as in `ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from civetta.kernels import _native

IS_BF16 = {torch.float32: False, torch.bfloat16: True}


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / rms(x) * gain over the last dimension; see `Ops.rms_norm`.

    x [..., A]; gain [A], or [S, A] where x is [T, S, A].
    """
    x_TSA, shape = _rows_of_heads(x), x.shape
    rows, heads, width = x_TSA.shape
    y = torch.empty(shape, dtype=x.dtype)
    each = gain.ndim > 1
    assert is_plain(gain), "gains are float32"
    assert gain.shape[-1] == width, "a gain for each column"
    assert not each or gain.shape[0] == heads, "a gain for each stream"
    _native.rms_norm(
        x_TSA.data_ptr(),
        x_TSA.stride(0),
        x_TSA.stride(1),
        IS_BF16[x.dtype],
        rows,
        heads,
        width,
        gain.data_ptr(),
        width if each else 0,
        eps,
        y.data_ptr(),
    )
    return y


def rope(x_THA: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first 2R columns, column i with i + R; see `Ops.rope`."""
    x_THA, (rows, heads, width) = side_by_side(x_THA), x_THA.shape
    cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
    assert cos_TR.dtype == sin_TR.dtype == torch.float32, "angles are float32"
    y_THA = torch.empty((rows, heads, width), dtype=x_THA.dtype)
    _native.rope(
        x_THA.data_ptr(),
        x_THA.stride(0),
        x_THA.stride(1),
        IS_BF16[x_THA.dtype],
        rows,
        heads,
        width,
        cos_TR.data_ptr(),
        sin_TR.data_ptr(),
        cos_TR.shape[1],
        y_THA.data_ptr(),
    )
    return y_THA


def hyper_write(x_TSD: Tensor, y_TD: Tensor, inject_TS: Tensor) -> Tensor:
    """x_TSD + inject_TS * y_TD, float32; see `Ops.hyper_write`."""
    x_TSD, y_TD, inject_TS = x_TSD.contiguous(), side_by_side(y_TD), inject_TS.contiguous()
    assert x_TSD.dtype == inject_TS.dtype == torch.float32, "streams are float32"
    rows, streams, width = x_TSD.shape
    out_TSD = torch.empty((rows, streams, width), dtype=torch.float32)
    _native.hyper_write(
        x_TSD.data_ptr(),
        y_TD.data_ptr(),
        y_TD.stride(0),
        IS_BF16[y_TD.dtype],
        inject_TS.data_ptr(),
        rows,
        streams,
        width,
        out_TSD.data_ptr(),
    )
    return out_TSD


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [T, F] each; see `Ops.swiglu`."""
    gate, up = side_by_side(gate), side_by_side(up)
    assert gate.dtype == up.dtype, "both in one dtype"
    rows, width = gate.shape
    y = torch.empty((rows, width), dtype=gate.dtype)
    _native.swiglu(
        gate.data_ptr(),
        gate.stride(0),
        up.data_ptr(),
        up.stride(0),
        IS_BF16[gate.dtype],
        rows,
        width,
        y.data_ptr(),
    )
    return y


def ple_gate(
    x_TSD: Tensor,
    key_TSD: Tensor,
    value_TD: Tensor,
    gain_query_SD: Tensor,
    gain_key_SD: Tensor,
    eps: float,
) -> Tensor:
    """sigmoid(signed root of <key, query>) * value for each stream; see `Ops.ple_gate`."""
    x_TSD, key_TSD, value_TD = x_TSD.contiguous(), side_by_side(key_TSD), side_by_side(value_TD)
    assert x_TSD.dtype == torch.float32, "streams are float32"
    assert is_plain(gain_query_SD), "gains are float32"
    assert is_plain(gain_key_SD), "gains are float32"
    rows, streams, width = x_TSD.shape
    out_TSD = torch.empty((rows, streams, width), dtype=torch.float32)
    _native.ngram_gate(
        x_TSD.data_ptr(),
        key_TSD.data_ptr(),
        key_TSD.stride(0),
        key_TSD.stride(1),
        IS_BF16[key_TSD.dtype],
        value_TD.data_ptr(),
        value_TD.stride(0),
        IS_BF16[value_TD.dtype],
        gain_query_SD.data_ptr(),
        gain_key_SD.data_ptr(),
        rows,
        streams,
        width,
        eps,
        out_TSD.data_ptr(),
    )
    return out_TSD


def route(logits_TE: Tensor, experts_a_token: int) -> tuple[Tensor, Tensor]:
    """Best experts by probability, ties to the lower id, weights of sum 1; see `Ops.route`.

    Raises ValueError for more slots than experts.
    """
    logits_TE = logits_TE.to(torch.float32).contiguous()
    rows, count = logits_TE.shape
    ids_TM = torch.empty((rows, experts_a_token), dtype=torch.int64)
    weights_TM = torch.empty((rows, experts_a_token), dtype=torch.float32)
    _native.route(
        logits_TE.data_ptr(),
        rows,
        count,
        experts_a_token,
        ids_TM.data_ptr(),
        weights_TM.data_ptr(),
    )
    return ids_TM, weights_TM


def index_pool(
    raw_BNX: Tensor, gain_X: Tensor, eps: float, cos_BR: Tensor, sin_BR: Tensor
) -> Tensor:
    """Mean of a block's raw keys, then norm, then rope at its first token; see `Ops.index_pool`."""
    raw_BNX, cos_BR, sin_BR = side_by_side(raw_BNX), cos_BR.contiguous(), sin_BR.contiguous()
    assert is_plain(gain_X), "gains are float32"
    blocks, ratio, width = raw_BNX.shape
    key_BX = torch.empty((blocks, width), dtype=raw_BNX.dtype)
    _native.index_pool(
        raw_BNX.data_ptr(),
        raw_BNX.stride(0),
        raw_BNX.stride(1),
        IS_BF16[raw_BNX.dtype],
        blocks,
        ratio,
        width,
        gain_X.data_ptr(),
        eps,
        cos_BR.data_ptr(),
        sin_BR.data_ptr(),
        cos_BR.shape[1],
        key_BX.data_ptr(),
    )
    return key_BX


def view_of(x_THA: Tensor) -> _native.View:
    """x as the extension reads it: [T, H, A] float32 or bfloat16, values of a row side by side.

    The caller keeps x alive during the call.
    """
    return _native.View(x_THA.data_ptr(), x_THA.stride(0), x_THA.stride(1), IS_BF16[x_THA.dtype])


def is_plain(x: Tensor) -> bool:
    """Whether the extension may read x as one array of float32."""
    return x.dtype == torch.float32 and x.is_contiguous()


def side_by_side(x: Tensor) -> Tensor:
    """x itself when its last dimension lies side by side, else a copy that does."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _rows_of_heads(x: Tensor) -> Tensor:
    """Any [..., A] as [T, S, A]."""
    x = side_by_side(x)
    if x.ndim == 3:
        return x
    return x.reshape(-1, 1, x.shape[-1])
