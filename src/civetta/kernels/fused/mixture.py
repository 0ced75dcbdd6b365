"""Router and experts of a launch (model.md A.6): few rows meet their experts directly, many sorted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.fused.streams import Written
from civetta.kernels.matmul.triton import product
from civetta.kernels.moe.triton import group_rows

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.kernels.fused.launch import Batch
    from civetta.kernels.packed import PackedWeight

DIRECT_ROWS = 16
"""Up to so many rows no sorting pays: each slot is a tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Weights of one layer: router rows, then the shared expert's mix row; experts stacked, gate
    rows then up rows."""

    router: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    shared_gate_up: PackedWeight
    shared_down: PackedWeight
    slots: int


@triton.jit
def route_kernel(logits, ids, weights, stride, M: tl.constexpr, E: tl.constexpr,
                 BLOCK: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Softmax of one row and its M best, ties to the lower id, weights scaled to sum 1."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    b = tl.load(logits + t * stride + e, mask=e < E, other=float("-inf"))
    p = tl.exp(b - tl.max(b, axis=0))
    p = p / tl.sum(p, axis=0)
    left = tl.where(e < E, p, -1.0)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), dtype=tl.int64)
    value = tl.zeros((SLOTS,), dtype=tl.float32)
    total = 0.0
    for j in tl.static_range(M):
        best = tl.max(left, axis=0)
        winner = tl.min(tl.where(left == best, e, E - 1), axis=0)
        left = tl.where(e == winner, -1.0, left)
        chosen = tl.where(slot == j, winner.to(tl.int64), chosen)
        value = tl.where(slot == j, best, value)
        total += best
    tl.store(ids + t * M + slot, chosen, mask=slot < M)
    tl.store(weights + t * M + slot, value / total, mask=slot < M)


def mixture(batch: Batch, w: Mixture, h_TD: Tensor, inject: Tensor) -> Written:
    """What the experts and the shared expert add to the streams, not yet added up."""
    t, device, dtype = h_TD.shape[0], h_TD.device, h_TD.dtype
    experts, width = w.gate_up.experts, w.down.rows
    logits = torch.empty((t, w.router.rows), dtype=torch.float32, device=device)
    product(h_TD, w.router, logits, batch.counts, wide=True)
    ids = torch.empty((t, w.slots), dtype=torch.int64, device=device)
    weights = torch.empty((t, w.slots), dtype=torch.float32, device=device)
    route_kernel[(t,)](
        logits, ids, weights, logits.stride(0), M=w.slots, E=experts,
        BLOCK=triton.next_power_of_2(experts), SLOTS=triton.next_power_of_2(w.slots),
        num_warps=4 if experts > 64 else 1,
    )  # fmt: skip
    count = t * w.slots
    hidden = torch.empty((count, w.gate_up.rows // 2), dtype=dtype, device=device)
    y = torch.empty((t, w.slots, width), dtype=torch.float32, device=device)
    flat = y.view(count, width)
    if t <= DIRECT_ROWS:
        each = ids.view(-1)
        product(h_TD, w.gate_up, hidden, None, experts_M=each, divisor=w.slots, pair=True)
        product(hidden, w.down, flat, None, experts_M=each)
    else:
        groups = group_rows(ids, experts)
        product(h_TD, w.gate_up, hidden, None, groups=groups, divisor=w.slots, pair=True)
        product(hidden, w.down, flat, None, groups=groups)
    inner = torch.empty((t, w.shared_gate_up.rows // 2), dtype=dtype, device=device)
    product(h_TD, w.shared_gate_up, inner, batch.counts, pair=True)
    shared = torch.empty((t, width), dtype=torch.float32, device=device)
    product(inner, w.shared_down, shared, batch.counts)
    return Written(
        y=y, inject=inject, weights_TM=weights, shared=shared, shared_mix=logits[:, experts]
    )
