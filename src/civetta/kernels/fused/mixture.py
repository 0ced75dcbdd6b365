"""Router and experts of a launch (model.md A.6): few rows meet their experts directly, many sorted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from civetta.kernels.fused.streams import Written
from civetta.kernels.hidden import hidden_dtype
from civetta.kernels.matmul.triton import Product, product, two_products
from civetta.kernels.moe.triton import group_rows, route

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.kernels.fused.launch import Batch
    from civetta.kernels.packed import PackedWeight

DIRECT_ROWS = 16
"""Up to so many rows no sorting pays: each slot is a tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Weights of one layer: router rows, then the shared expert's mix row; experts stacked; gate and
    up rows as pairs."""

    router: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    shared_gate_up: PackedWeight
    shared_down: PackedWeight
    slots: int


def mixture(batch: Batch, w: Mixture, h_TD: Tensor, inject: Tensor) -> Written:
    """What the experts and the shared expert add to the streams, not yet added up."""
    t, device, dtype = h_TD.shape[0], h_TD.device, h_TD.dtype
    experts, width = w.gate_up.experts, w.down.rows
    inside = hidden_dtype(dtype)
    inner = torch.empty((t, w.shared_gate_up.rows // 2), dtype=inside, device=device)
    shared = torch.empty((t, width), dtype=torch.float32, device=device)
    logits = torch.empty((t, w.router.rows), dtype=torch.float32, device=device)
    two_products(
        Product(x_TK=h_TD, w=w.router, y_MN=logits, wide=True),
        Product(x_TK=h_TD, w=w.shared_gate_up, y_MN=inner),
        batch.counts,
    )
    ids, weights = route(logits[:, :experts], w.slots)
    count = t * w.slots
    hidden = torch.empty((count, w.gate_up.rows // 2), dtype=inside, device=device)
    y = torch.empty((t, w.slots, width), dtype=torch.float32, device=device)
    flat = y.view(count, width)
    if t <= DIRECT_ROWS:
        each = ids.view(-1)
        product(h_TD, w.gate_up, hidden, None, experts_M=each, divisor=w.slots)
        two_products(
            Product(x_TK=hidden, w=w.down, y_MN=flat, experts_M=each),
            Product(x_TK=inner, w=w.shared_down, y_MN=shared),
            batch.counts,
        )
    else:
        groups = group_rows(ids, experts)
        product(h_TD, w.gate_up, hidden, None, groups=groups, divisor=w.slots)
        product(hidden, w.down, flat, None, groups=groups)
        product(inner, w.shared_down, shared, batch.counts)
    return Written(
        y=y, inject=inject, weights_TM=weights, shared=shared, shared_mix=logits[:, experts]
    )
