"""Router and experts in plain torch (model.md A.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.kernels.hidden import hidden_dtype
from civetta.kernels.matmul.reference import matmul
from civetta.kernels.residual.reference import swiglu

if TYPE_CHECKING:
    from civetta.checkpoint.quant import Weight
    from civetta.kernels.ops import ExpertWeights


def route(logits_TE: Tensor, experts_a_token: int) -> tuple[Tensor, Tensor]:
    """Softmax, the best experts (ties to the lower id), weights scaled to sum 1; see `Ops.route`."""
    probs_TE = torch.softmax(logits_TE.float(), dim=-1)
    order = torch.sort(probs_TE, dim=-1, descending=True, stable=True)
    weights, ids = order.values[:, :experts_a_token], order.indices[:, :experts_a_token]
    total = weights[:, :1]
    for j in range(1, experts_a_token):
        total = total + weights[:, j : j + 1]
    return ids.contiguous(), weights / total


def experts(h_TD: Tensor, experts_TM: Tensor, weights_TM: Tensor, w: ExpertWeights) -> Tensor:
    """Each token through its experts, summed in slot order; see `Ops.experts`."""
    rows, slots = experts_TM.shape
    flat = experts_TM.flatten()
    order = torch.sort(flat, stable=True).indices
    y_slots = h_TD.new_empty((rows * slots, w.down[0].shape[0]), dtype=torch.float32)
    counts = torch.bincount(flat, minlength=len(w.gate)).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        where = order[start : start + count]
        start += count
        y_slots[where] = expert_mlp(
            h_TD[where // slots], w.gate[expert], w.up[expert], w.down[expert]
        )
    y_TMD = y_slots.view(rows, slots, -1)
    total = y_TMD[:, 0] * weights_TM[:, :1]
    for j in range(1, slots):
        total = total + y_TMD[:, j] * weights_TM[:, j : j + 1]
    return total


def expert_mlp(h_TD: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
    """down(silu(gate h) * up h), float32 out."""
    inside = hidden_dtype(h_TD.dtype)
    hidden = swiglu(matmul(h_TD, gate, inside), matmul(h_TD, up, inside))
    return matmul(hidden, down, torch.float32)
