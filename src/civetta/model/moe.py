"""Routed experts plus the shared one (model.md A.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.kernels.elementwise import sigmoid
from civetta.kernels.hidden import hidden_dtype

if TYPE_CHECKING:
    from civetta.kernels.ops import Ops
    from civetta.model.config import ModelConfig
    from civetta.model.weights import MoeWeights


def moe(ops: Ops, c: ModelConfig, w: MoeWeights, h_TD: Tensor) -> Tensor:
    """y_TD float32: experts in slot order, then the gated shared expert."""
    h32 = h_TD.float()
    ids_TM, weights_TM = ops.route(ops.matmul(h32, w.router, torch.float32), c.experts_a_token)
    routed = ops.experts(h_TD, ids_TM, weights_TM, w.experts)
    dtype = hidden_dtype(h_TD.dtype)
    hidden = ops.swiglu(
        ops.matmul(h_TD, w.shared_gate, dtype), ops.matmul(h_TD, w.shared_up, dtype)
    )
    shared = ops.matmul(hidden, w.shared_down, torch.float32)
    return routed + sigmoid(ops.matmul(h32, w.shared_mix, torch.float32)) * shared
