"""Gated sparse attention with its indexer (model.md E.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.kernels.elementwise import sigmoid
from civetta.kernels.ops import PAGE_TOKENS

if TYPE_CHECKING:
    from civetta.kernels.ops import Ops
    from civetta.model.config import ModelConfig
    from civetta.model.inputs import Span, Wanted
    from civetta.model.rope import RopeTable
    from civetta.model.weights import QsaWeights
    from civetta.state.pages import LayerPages
    from civetta.state.session import Session


def qsa(
    ops: Ops,
    c: ModelConfig,
    w: QsaWeights,
    h_TD: Tensor,
    spans: tuple[Span, ...],
    index: int,
    rope: RopeTable,
    rope_3T: Tensor,
    needed: Wanted | None = None,
) -> Tensor:
    """y_TD of QSA layer number `index`, of the rows `needed` or of all.

    Writes keys, values and index keys of every row.
    """
    qsa_write(ops, c, w, h_TD, spans, index, rope, rope_3T)
    if needed is not None:
        h_TD, rope_3T, spans = h_TD[needed.rows_N], rope_3T[:, needed.rows_N], needed.spans
        if not spans:
            return h_TD
    return qsa_read(ops, c, w, h_TD, spans, index, rope, rope_3T)


def qsa_write(
    ops: Ops,
    c: ModelConfig,
    w: QsaWeights,
    h_TD: Tensor,
    spans: tuple[Span, ...],
    index: int,
    rope: RopeTable,
    rope_3T: Tensor,
) -> None:
    """Keys, values and index keys of the rows, into the pages of layer number `index`."""
    cos, sin = rope.angles(rope_3T)
    dtype = h_TD.dtype
    k_TGA = ops.matmul(h_TD, w.k, dtype).view(-1, c.kv_heads, c.head_dim)
    k_TGA = ops.rope(ops.rms_norm(k_TGA, w.k_norm_A, c.rms_eps), cos, sin)
    v_TGA = ops.matmul(h_TD, w.v, dtype).view(-1, c.kv_heads, c.head_dim)
    ik_TX = ops.matmul(h_TD, w.index_k, dtype)
    for span in spans:
        pages = span.session.pool.layers[index]
        _write(pages, span, k_TGA[span.part], v_TGA[span.part], ik_TX[span.part])
        _pool_blocks(ops, c, w, pages, span, rope)


def qsa_read(
    ops: Ops,
    c: ModelConfig,
    w: QsaWeights,
    h_TD: Tensor,
    spans: tuple[Span, ...],
    index: int,
    rope: RopeTable,
    rope_3T: Tensor,
) -> Tensor:
    """y_TD of rows whose own keys, and all before them, have been written."""
    cos, sin = rope.angles(rope_3T)
    dtype = h_TD.dtype
    q_and_gate = ops.matmul(h_TD, w.q, dtype).view(-1, c.heads, 2, c.head_dim)
    q_TQA = ops.rope(ops.rms_norm(q_and_gate[:, :, 0], w.q_norm_A, c.rms_eps), cos, sin)
    iq_TIX = ops.matmul(h_TD, w.index_q, dtype).view(-1, c.index_heads, c.index_dim)
    iq_TIX = ops.rope(ops.rms_norm(iq_TIX, w.index_q_norm_X, c.rms_eps), cos, sin)
    outs = [
        _attend(ops, c, span.session.pool.layers[index], span, q_TQA[span.part], iq_TIX[span.part])
        for span in spans
    ]
    o_TQA = torch.cat(outs) if len(outs) > 1 else outs[0]
    gated = o_TQA.float() * sigmoid(q_and_gate[:, :, 1].float())
    return ops.matmul(gated.to(dtype).flatten(1), w.out, dtype)


def _slots(session: Session, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Page and place of token positions (int64)."""
    return session.table_P()[tokens // PAGE_TOKENS], tokens % PAGE_TOKENS


def _write(pages: LayerPages, span: Span, k: Tensor, v: Tensor, index_raw: Tensor) -> None:
    page, place = _slots(
        span.session, torch.arange(span.first, span.first + span.stop - span.start, device=k.device)
    )
    pages.k[page, place] = k
    pages.v[page, place] = v
    pages.index_raw[page, place] = index_raw


def _pool_blocks(
    ops: Ops,
    c: ModelConfig,
    w: QsaWeights,
    pages: LayerPages,
    span: Span,
    rope: RopeTable,
) -> None:
    """Index keys of the blocks that these rows complete."""
    ratio = c.index_ratio
    last = span.first + span.stop - span.start
    device = span.known_3N.device
    blocks = torch.arange(span.first // ratio, last // ratio, device=device)
    if not len(blocks):
        return
    page, place = _slots(
        span.session, (blocks[:, None] * ratio + torch.arange(ratio, device=device)).flatten()
    )
    raw_BNX = pages.index_raw[page, place].view(len(blocks), ratio, -1)
    cos, sin = rope.angles(span.known_3N[:, blocks * ratio])
    keys = ops.index_pool(raw_BNX, w.index_k_norm_X, c.rms_eps, cos, sin)
    page, place = _slots(span.session, blocks * ratio)
    pages.index_key[page, place // ratio] = keys


def _attend(
    ops: Ops, c: ModelConfig, pages: LayerPages, span: Span, q_TQA: Tensor, iq_TIX: Tensor
) -> Tensor:
    """Queries that see at most the budget take all keys, the others their best blocks."""
    ratio, keep = c.index_ratio, c.index_budget // c.index_ratio
    rows, table = span.stop - span.start, span.session.table_P()
    dense = min(max((keep + 1) * ratio - 1 - span.first, 0), rows)
    outs = []
    if dense:
        outs.append(ops.attend_dense(q_TQA[:dense], pages.k, pages.v, table, span.first))
    if dense < rows:
        visible_T = torch.arange(span.first + dense + 1, span.first + rows + 1, device=q_TQA.device)
        kept_TB = ops.index_select(iq_TIX[dense:], pages.index_key, table, visible_T // ratio, keep)
        tokens = _tokens(kept_TB, visible_T, ratio)
        outs.append(ops.attend_sparse(q_TQA[dense:], pages.k, pages.v, table, tokens))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def _tokens(kept_TB: Tensor, visible_T: Tensor, ratio: int) -> Tensor:
    """Tokens of the kept blocks, then the tail after the last complete block (-1: none)."""
    inside = (kept_TB[:, :, None] * ratio + torch.arange(ratio, device=kept_TB.device)).flatten(1)
    tail = (visible_T - visible_T % ratio)[:, None] + torch.arange(
        ratio - 1, device=visible_T.device
    )
    return torch.cat([inside, tail.masked_fill(tail >= visible_T[:, None], -1)], dim=1)
