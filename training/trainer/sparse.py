"""Sparse attention in training: which tokens a query sees, and the loss that teaches the indexer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from civetta.model.config import ModelConfig

SAMPLED = 8192
"""Queries of one batch that the indexer learns from."""


def seen(segment_BT: Tensor) -> Tensor:
    """bool [B, T, T]: keys of the same sample, up to the query."""
    t = segment_BT.shape[1]
    same = segment_BT[:, :, None] == segment_BT[:, None, :]
    return same & torch.ones(t, t, dtype=torch.bool, device=same.device).tril()


def visible_blocks(segment_BT: Tensor, rows_BM: Tensor, ratio: int) -> Tensor:
    """bool [B, M, T / ratio]: complete blocks of its own sample that the query in a row sees."""
    ends = torch.arange(ratio - 1, segment_BT.shape[1], ratio, device=segment_BT.device)
    mine = segment_BT.gather(1, rows_BM)
    same = segment_BT[:, ends][:, None, :] == mine[:, :, None]
    return same & (ends <= rows_BM[:, :, None])


def block_scores(q_BMIX: Tensor, keys_BNX: Tensor) -> Tensor:
    """sum over heads of relu(q . k) / sqrt(X), float32 [B, M, N] (model.md E.1)."""
    total: Tensor | float = 0.0
    for i in range(q_BMIX.shape[2]):
        total = total + (q_BMIX[:, :, i] @ keys_BNX.transpose(1, 2)).relu()
    assert isinstance(total, Tensor)
    return total.float() * q_BMIX.shape[-1] ** -0.5


@torch.no_grad()
def chosen(c: ModelConfig, q_BTIX: Tensor, keys_BNX: Tensor, segment_BT: Tensor) -> Tensor:
    """bool [B, T, T]: tokens of the best blocks and of the tail, not yet cut to what is seen."""
    rows, tokens = segment_BT.shape
    ratio, keep = c.index_ratio, c.index_budget // c.index_ratio
    place = torch.arange(tokens, device=segment_BT.device)
    tail = place[None, :] >= ((place + 1) // ratio * ratio)[:, None]
    visible = visible_blocks(segment_BT, place.expand(rows, -1), ratio)
    scores = block_scores(q_BTIX, keys_BNX).masked_fill(~visible, -1.0)
    best = scores.topk(min(keep, scores.shape[-1]), dim=-1, sorted=False).indices
    taken = torch.zeros_like(visible).scatter_(2, best, True)
    return taken.repeat_interleave(ratio, dim=2) | tail


def attend(q_BQTA: Tensor, k_BGTA: Tensor, v_BGTA: Tensor, mask_BTT: Tensor) -> Tensor:
    """Grouped-query attention [B, Q, T, A] under a mask."""
    share = q_BQTA.shape[1] // k_BGTA.shape[1]
    k, v = (x.repeat_interleave(share, dim=1) for x in (k_BGTA, v_BGTA))
    return scaled_dot_product_attention(q_BQTA, k, v, attn_mask=mask_BTT.unsqueeze(1))


def index_loss(
    c: ModelConfig,
    q_BQTA: Tensor,
    k_BGTA: Tensor,
    iq_BTIX: Tensor,
    keys_BNX: Tensor,
    segment_BT: Tensor,
) -> Tensor:
    """Cross-entropy of the indexer's block distribution against the attention's mass a block.

    Measured at random queries; the attention is taken over all seen keys, averaged over heads, and
    gets no gradient.
    """
    rows, tokens = segment_BT.shape
    count = max(1, min(tokens, SAMPLED // rows if tokens <= 4096 else SAMPLED // rows // 4))
    at = torch.randint(0, tokens, (rows, count), device=segment_BT.device)
    visible = visible_blocks(segment_BT, at, c.index_ratio)
    with torch.no_grad():
        mass = _block_mass(c, q_BQTA, k_BGTA, at, segment_BT) * visible
        total = mass.sum(-1, keepdim=True)
        target = mass / total.clamp(min=1e-6)
    iq = iq_BTIX.gather(1, at[:, :, None, None].expand(-1, -1, *iq_BTIX.shape[2:]))
    scores = block_scores(iq, keys_BNX).masked_fill(~visible, -1e4)
    loss = -(target * scores.log_softmax(-1)).sum(-1)
    return loss.sum() / (target.sum() + 1.0)


def _block_mass(
    c: ModelConfig, q_BQTA: Tensor, k_BGTA: Tensor, at_BM: Tensor, segment_BT: Tensor
) -> Tensor:
    """Attention mass of each block, averaged over heads, [B, M, N]."""
    heads = q_BQTA.shape[1]
    share = heads // k_BGTA.shape[1]
    place = torch.arange(segment_BT.shape[1], device=at_BM.device)
    allowed = (segment_BT[:, None, :] == segment_BT.gather(1, at_BM)[:, :, None]) & (
        place <= at_BM[:, :, None]
    )
    total = torch.zeros(allowed.shape, device=at_BM.device)
    for head in range(heads):
        q = q_BQTA[:, head].gather(1, at_BM[:, :, None].expand(-1, -1, q_BQTA.shape[-1]))
        scores = (q @ k_BGTA[:, head // share].transpose(1, 2)).float() * q.shape[-1] ** -0.5
        total += scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return total.unflatten(2, (-1, c.index_ratio)).sum(-1) / heads
