"""Norms, rotary positions and hyper-connections in plain torch (model.md A.6, E.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.kernels.elementwise import sigmoid, silu
from civetta.kernels.matmul.reference import matmul

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.checkpoint.quant import Weight
    from civetta.kernels.ops import HyperWeights


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / rms(x) * gain over the last dimension, float32 inside, x's dtype out."""
    x32 = x.float()
    scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (x32 * scale * gain).to(x.dtype)


def rope(x_THA: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first 2R columns, pairing column i with i + R; see `Ops.rope`."""
    half = cos_TR.shape[-1]
    x32 = x_THA.float()
    cos, sin = cos_TR.unsqueeze(-2), sin_TR.unsqueeze(-2)
    first, second, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, dim=-1).to(x_THA.dtype)


def hyper_read(
    x_TSD: Tensor,
    w: HyperWeights,
    eps: float,
    dtype: torch.dtype,
    *,
    matmul: Callable[[Tensor, Weight, torch.dtype], Tensor] = matmul,
) -> tuple[Tensor, Tensor | None]:
    """Mix the streams into one row and say how strongly to write back; see `Ops.hyper_read`.

    `matmul` is the product to use, so that a faster one serves here too.
    """
    streams = x_TSD.shape[1]
    normed_TSD = rms_norm(x_TSD.float(), w.gain_SD, eps)
    flat32_TW = normed_TSD.flatten(1)
    flat_TW = flat32_TW.to(dtype)
    mix = silu(matmul(flat_TW, w.down, torch.float32) / streams).to(dtype)
    gate_TSD = sigmoid(matmul(mix, w.up, torch.float32)).view_as(normed_TSD)
    gated = gate_TSD * normed_TSD
    total = gated[:, 0]
    for j in range(1, streams):
        total = total + gated[:, j]
    h_TD = (total / streams).to(dtype)
    if w.inject is None:
        return h_TD, None
    return h_TD, 2.0 * sigmoid(matmul(flat32_TW, w.inject, torch.float32) / streams)


def hyper_write(x_TSD: Tensor, y_TD: Tensor, inject_TS: Tensor) -> Tensor:
    """Add the layer's output to every stream with its own strength; see `Ops.hyper_write`."""
    return x_TSD + inject_TS.unsqueeze(-1) * y_TD.float().unsqueeze(1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in float32, gate's dtype out."""
    return (silu(gate.float()) * up.float()).to(gate.dtype)
