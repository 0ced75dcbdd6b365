"""The n-gram layer's gate in plain torch (model.md A.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.kernels.elementwise import sigmoid
from civetta.kernels.residual.reference import rms_norm

if TYPE_CHECKING:
    from torch import Tensor


def ple_gate(
    x_TSD: Tensor,
    key_TSD: Tensor,
    value_TD: Tensor,
    gain_query_SD: Tensor,
    gain_key_SD: Tensor,
    eps: float,
) -> Tensor:
    """sigmoid(signed root of <key, query>) * value for each stream; see `Ops.ple_gate`."""
    query = rms_norm(x_TSD.float(), gain_query_SD, eps)
    key = rms_norm(key_TSD.float(), gain_key_SD, eps)
    s_TS1 = (key * query).sum(-1, keepdim=True) / x_TSD.shape[-1] ** 0.5
    gate = s_TS1.abs().clamp(min=1e-6).sqrt() * s_TS1.sign()
    return sigmoid(gate) * value_TD.float().unsqueeze(1)
