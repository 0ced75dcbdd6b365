"""Router and experts on a GPU (model.md A.6): rows sorted by expert, one product kernel for all.

The sort is on the device and nothing waits for the host: the number of tiles is bounded by what the
batch can need, and tiles without rows return at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.hidden import hidden_dtype
from civetta.kernels.matmul.tiling import tile_rows_for
from civetta.kernels.matmul.triton import Groups, matmul_grouped
from civetta.kernels.residual.triton import swiglu

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.kernels.packed import PackedExperts


@triton.jit
def route_kernel(logits, ids, weights, stride, M: tl.constexpr, E: tl.constexpr,
                 BLOCK: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Softmax of one row and its M best, ties to the lower id, weights scaled to sum 1.

    Probabilities are not negative: their bits order as they do, and the id below them breaks ties.
    """
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    ok = e < E
    b = tl.load(logits + t * stride + e, mask=ok, other=float("-inf"))
    p = tl.exp(b - tl.max(b, axis=0))
    p = p / tl.sum(p, axis=0)
    key = (p.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (E - 1 - e).to(tl.int64)
    left = tl.where(ok, key, -1)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), dtype=tl.int64)
    value = tl.zeros((SLOTS,), dtype=tl.float32)
    total = 0.0
    for j in tl.static_range(M):
        best = tl.max(left, axis=0)
        left = tl.where(left == best, -1, left)
        share = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        chosen = tl.where(slot == j, E - 1 - (best & 0xFFFFFFFF), chosen)
        value = tl.where(slot == j, share, value)
        total += share
    tl.store(ids + t * M + slot, chosen, mask=slot < M)
    tl.store(weights + t * M + slot, value / total, mask=slot < M)


def route(logits_TE: Tensor, experts_a_token: int) -> tuple[Tensor, Tensor]:
    """The best experts (ties to the lower id), weights scaled to sum 1; see `Ops.route`."""
    logits = logits_TE.float()  # rows may be strided, their numbers not
    assert logits.stride(1) == 1
    rows, experts = logits.shape
    ids = torch.empty((rows, experts_a_token), dtype=torch.int64, device=logits.device)
    weights = torch.empty((rows, experts_a_token), dtype=torch.float32, device=logits.device)
    route_kernel[(rows,)](
        logits, ids, weights, logits.stride(0), M=experts_a_token, E=experts,
        BLOCK=triton.next_power_of_2(experts), SLOTS=triton.next_power_of_2(experts_a_token),
        num_warps=1,
    )  # fmt: skip
    return ids, weights


@triton.jit
def combine_kernel(slots, weights, y, D, M: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of a token's expert outputs in slot order."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < D
    total = tl.load(slots + t * M * D + c, mask=ok, other=0.0) * tl.load(weights + t * M)
    for j in tl.static_range(1, M):
        b = tl.load(slots + (t * M + j) * D + c, mask=ok, other=0.0)
        total += b * tl.load(weights + t * M + j)
    tl.store(y + t * D + c, total, mask=ok)


def experts(h_TD: Tensor, experts_TM: Tensor, weights_TM: Tensor, w: PackedExperts) -> Tensor:
    """Each token through its experts, summed in slot order; see `Ops.experts`."""
    rows, slots = experts_TM.shape
    count = rows * slots
    groups = group_rows(experts_TM, w.gate.experts)
    inside = hidden_dtype(h_TD.dtype)
    gate = matmul_grouped(h_TD, w.gate, inside, groups, count, slots)
    up = matmul_grouped(h_TD, w.up, inside, groups, count, slots)
    y_slots = matmul_grouped(swiglu(gate, up), w.down, torch.float32, groups, count, 1)
    width = w.down.rows
    y_TD = torch.empty((rows, width), dtype=torch.float32, device=h_TD.device)
    block = min(1024, triton.next_power_of_2(width))
    combine_kernel[(rows, -(-width // block))](
        y_slots, weights_TM.contiguous(), y_TD, width, M=slots, BLOCK=block
    )
    return y_TD


def group_rows(experts_TM: Tensor, experts_total: int) -> Groups:
    """Slots sorted by expert and cut into tiles that hold rows of one expert."""
    flat = experts_TM.flatten()
    count, device = flat.numel(), flat.device
    tile = tile_rows_for(-(-count // min(experts_total, count)))
    key = torch.int16 if experts_total < 1 << 15 else torch.int64  # a radix sort walks all its bits
    slot_S = torch.sort(flat.to(key), stable=True).indices.to(torch.int32)
    sizes_E = torch.zeros(experts_total, dtype=torch.int64, device=device)
    sizes_E.scatter_add_(0, flat, torch.ones_like(flat))
    end_E = sizes_E.cumsum(0)
    tiles_E = (sizes_E + (tile - 1)) // tile
    last_tile_E = tiles_E.cumsum(0)
    most = min(count, count // tile + experts_total)
    tiles_I = torch.arange(most, device=device)
    expert_I = torch.searchsorted(last_tile_E, tiles_I, right=True)
    there = expert_I < experts_total
    known_I = expert_I.clamp(max=experts_total - 1)
    first_tile_I = (last_tile_E - tiles_E)[known_I]
    row_I = (end_E - sizes_E)[known_I] + (tiles_I - first_tile_I) * tile
    return Groups(
        tile_rows=tile,
        slot_S=slot_S,
        tile_expert_I=torch.where(there, known_I, -1).to(torch.int32),
        tile_row_I=row_I.to(torch.int32),
        end_E=end_E.to(torch.int32),
    )
