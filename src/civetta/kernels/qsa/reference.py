"""Sparse attention in plain torch: pooled index keys, exact block choice, paged attention (E.1).

Softmax runs over partitions of 512 keys, each started afresh and merged in order, and each query is
its own product, so that its result depends on its own keys alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from civetta.kernels.ops import ATTENTION_PARTITION
from civetta.kernels.residual.reference import rms_norm, rope

INDEX_TILE_BLOCKS = 512
"""Blocks scored in one product."""

QUERY_GROUP_VALUES = 1 << 24
"""Scores or gathered keys held at one time."""


def index_pool(
    raw_BNX: Tensor, gain_X: Tensor, eps: float, cos_BR: Tensor, sin_BR: Tensor
) -> Tensor:
    """Mean of a block's raw keys, then norm, then rope at its first token; see `Ops.index_pool`."""
    raw = raw_BNX.float()
    total = raw[:, 0]
    for i in range(1, raw.shape[1]):
        total = total + raw[:, i]
    mean_BX = (total / raw.shape[1]).to(raw_BNX.dtype)
    return rope(rms_norm(mean_BX, gain_X, eps).unsqueeze(1), cos_BR, sin_BR).squeeze(1)


def index_select(
    q_TIX: Tensor, key_pages: Tensor, table_P: Tensor, blocks_T: Tensor, keep: int
) -> Tensor:
    """The `keep` best complete blocks of each query, ascending; see `Ops.index_select`."""
    most = int(blocks_T.max())
    tiles = -(-most // INDEX_TILE_BLOCKS)
    pages = -(-tiles * INDEX_TILE_BLOCKS // key_pages.shape[1])
    keys_BX = key_pages.index_select(0, table_P[:pages]).flatten(0, 1).float()
    keys_BX = pad(keys_BX, (0, 0, 0, tiles * INDEX_TILE_BLOCKS - keys_BX.shape[0]))
    group = max(1, QUERY_GROUP_VALUES // (tiles * INDEX_TILE_BLOCKS * q_TIX.shape[1]))
    chosen = [
        _best_blocks(_block_scores(q_TIX[i : i + group], keys_BX), blocks_T[i : i + group], keep)
        for i in range(0, q_TIX.shape[0], group)
    ]
    return torch.cat(chosen)


def attend_dense(
    q_TQA: Tensor, k_pages: Tensor, v_pages: Tensor, table_P: Tensor, first: int
) -> Tensor:
    """Causal attention over all keys; see `Ops.attend_dense`."""
    rows = q_TQA.shape[0]
    limit_T = torch.arange(first + 1, first + 1 + rows)
    merge = _Merge(q_TQA, k_pages.shape[2])
    pages_a_part = ATTENTION_PARTITION // k_pages.shape[1]
    for part, start in enumerate(range(0, first + rows, ATTENTION_PARTITION)):
        pages = table_P[part * pages_a_part : (part + 1) * pages_a_part]
        begin = max(0, start - first)
        k, v = (
            _padded(x.index_select(0, pages).flatten(0, 1), ATTENTION_PARTITION)
            for x in (k_pages, v_pages)
        )
        seen = torch.arange(start, start + ATTENTION_PARTITION) < limit_T[begin:, None]
        merge.add_shared(begin, k, v, seen)
    return merge.result().to(q_TQA.dtype)


def attend_sparse(
    q_TQA: Tensor, k_pages: Tensor, v_pages: Tensor, table_P: Tensor, tokens_TK: Tensor
) -> Tensor:
    """Attention over each query's own token list; see `Ops.attend_sparse`."""
    page_tokens = k_pages.shape[1]
    flat_k, flat_v = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    where_TK = tokens_TK.clamp(min=0)
    where_TK = table_P[where_TK // page_tokens] * page_tokens + where_TK % page_tokens
    width = tokens_TK.shape[1] * flat_k.shape[1] * flat_k.shape[2]
    group = max(1, QUERY_GROUP_VALUES // width)
    outs = []
    for i in range(0, q_TQA.shape[0], group):
        part = slice(i, i + group)
        merge = _Merge(q_TQA[part], k_pages.shape[2])
        for start in range(0, tokens_TK.shape[1], ATTENTION_PARTITION):
            cols = slice(start, start + ATTENTION_PARTITION)
            where = where_TK[part, cols]
            merge.add_own(flat_k[where], flat_v[where], tokens_TK[part, cols] >= 0)
        outs.append(merge.result().to(q_TQA.dtype))
    return torch.cat(outs)


class _Merge:
    """Running softmax over partitions: maximum, weight and weighted values of each query."""

    def __init__(self, q_TQA: Tensor, groups: int) -> None:
        rows, heads, width = q_TQA.shape
        q = q_TQA.float().view(rows, groups, heads // groups, width) * width**-0.5
        self.q_GTRA = q.transpose(0, 1).contiguous()
        self.best = q.new_full((groups, rows, heads // groups, 1), float("-inf"))
        self.weight = torch.zeros_like(self.best)
        self.value = torch.zeros_like(self.q_GTRA)

    def add_shared(self, begin: int, k_NGA: Tensor, v_NGA: Tensor, seen_TN: Tensor) -> None:
        """Queries from `begin` on meet the same keys."""
        for g in range(self.q_GTRA.shape[0]):
            q = self.q_GTRA[g, begin:]
            k = k_NGA[:, g].float().t().expand(q.shape[0], -1, -1)
            scores = torch.bmm(q, k).masked_fill(~seen_TN[:, None], float("-inf"))
            v = v_NGA[:, g].float().expand(q.shape[0], -1, -1)
            self._fold(g, begin, scores, v)

    def add_own(self, k_TNGA: Tensor, v_TNGA: Tensor, seen_TN: Tensor) -> None:
        """Every query meets keys of its own."""
        for g in range(self.q_GTRA.shape[0]):
            scores = torch.bmm(self.q_GTRA[g], k_TNGA[:, :, g].float().transpose(1, 2))
            scores = scores.masked_fill(~seen_TN[:, None], float("-inf"))
            self._fold(g, 0, scores, v_TNGA[:, :, g].float())

    def _fold(self, g: int, begin: int, scores_TRN: Tensor, v: Tensor) -> None:
        old = self.best[g, begin:]
        new = torch.maximum(old, scores_TRN.amax(-1, keepdim=True))
        # a query that has met no key yet has both at -inf; any finite shift keeps its zeros
        shift = new.masked_fill(new == float("-inf"), 0.0)
        p = (scores_TRN - shift).exp()
        fade = (old - shift).exp()
        self.weight[g, begin:] = self.weight[g, begin:] * fade + p.sum(-1, keepdim=True)
        self.value[g, begin:] = self.value[g, begin:] * fade + torch.bmm(p, v)
        self.best[g, begin:] = new

    def result(self) -> Tensor:
        """[T, Q, A] float32."""
        out_GTRA = self.value / self.weight
        return out_GTRA.transpose(0, 1).flatten(1, 2)


def _padded(x_NGA: Tensor, rows: int) -> Tensor:
    return pad(x_NGA, (0, 0, 0, 0, 0, rows - x_NGA.shape[0]))


def _block_scores(q_TIX: Tensor, keys_BX: Tensor) -> Tensor:
    """sum over heads of relu(q . k) / sqrt(X), [T, B] float32."""
    q = q_TIX.float()
    rows, heads, width = q.shape
    scores = []
    for start in range(0, keys_BX.shape[0], INDEX_TILE_BLOCKS):
        keys = keys_BX[start : start + INDEX_TILE_BLOCKS].t().expand(rows, -1, -1)
        dots = torch.bmm(q, keys).clamp_(min=0.0)
        total = dots[:, 0]
        for h in range(1, heads):
            total = total + dots[:, h]
        scores.append(total * width**-0.5)
    return torch.cat(scores, dim=1)


def _best_blocks(scores_TB: Tensor, blocks_T: Tensor, keep: int) -> Tensor:
    ids = torch.arange(scores_TB.shape[1])
    scores = scores_TB.masked_fill(ids >= blocks_T[:, None], float("-inf"))
    last_kept = scores.topk(keep, dim=1).values[:, -1:]
    above = scores > last_kept
    level = scores == last_kept
    room = keep - above.sum(1, keepdim=True)
    taken = above | (level & (level.cumsum(1) <= room))
    return taken.nonzero()[:, 1].view(-1, keep)
