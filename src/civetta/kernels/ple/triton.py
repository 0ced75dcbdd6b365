"""The n-gram layer's gate on a GPU (model.md A.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.residual.triton import sigmoid32

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def stream_gate(b_x, b_k, gain_query, gain_key, at, ok, eps, root, D: tl.constexpr):
    """sigmoid(signed root of <key, query>) of one stream; its gains lie at `at`."""
    b_q = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / D + eps)
    b_q *= tl.load(gain_query + at, mask=ok, other=0.0)
    b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k, axis=0) / D + eps)
    b_k *= tl.load(gain_key + at, mask=ok, other=0.0)
    s = tl.sum(b_q * b_k, axis=0) / root
    z = tl.sqrt(tl.maximum(tl.abs(s), 1e-6))
    z = tl.where(s > 0, z, tl.where(s < 0, -z, 0.0))
    return sigmoid32(z)


@triton.jit
def ple_gate_kernel(x, key, value, gain_query, gain_key, y, eps, root, S: tl.constexpr,
                    D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One stream of one token."""
    i = tl.program_id(0).to(tl.int64)
    stream, t = i % S, i // S
    c = tl.arange(0, BLOCK)
    ok = c < D
    b_x = tl.load(x + i * D + c, mask=ok, other=0.0)
    b_k = tl.load(key + i * D + c, mask=ok, other=0.0)
    gate = stream_gate(b_x, b_k, gain_query, gain_key, stream * D + c, ok, eps, root, D)
    b_v = tl.load(value + t * D + c, mask=ok, other=0.0)
    tl.store(y + i * D + c, gate * b_v, mask=ok)


def ple_gate(
    x_TSD: Tensor,
    key_TSD: Tensor,
    value_TD: Tensor,
    gain_query_SD: Tensor,
    gain_key_SD: Tensor,
    eps: float,
) -> Tensor:
    """sigmoid(signed root of <key, query>) * value for each stream; see `Ops.ple_gate`."""
    rows, streams, width = x_TSD.shape
    y = torch.empty((rows, streams, width), dtype=torch.float32, device=x_TSD.device)
    ple_gate_kernel[(rows * streams,)](
        x_TSD.float().contiguous(), key_TSD.float().contiguous(), value_TD.float().contiguous(),
        gain_query_SD, gain_key_SD, y, eps, width**0.5,
        S=streams, D=width, BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return y
