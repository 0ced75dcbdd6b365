"""Gated delta-net mixer: projections, short convolution, chunked delta rule (model.md E.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.state.recurrent import RecurrentState

if TYPE_CHECKING:
    from civetta.kernels.ops import Ops
    from civetta.model.config import ModelConfig
    from civetta.model.inputs import Span, Wanted
    from civetta.model.weights import GdnWeights
    from civetta.state.recurrent import GdnState


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Projected rows of one sequence."""

    q_THA: Tensor
    k_THA: Tensor
    v_TVA: Tensor
    log_decay_TV: Tensor
    beta_TV: Tensor


def gdn(
    ops: Ops,
    c: ModelConfig,
    w: GdnWeights,
    h_TD: Tensor,
    spans: tuple[Span, ...],
    index: int,
    needed: Wanted | None = None,
) -> Tensor:
    """y_TD of GDN layer number `index`, of the rows `needed` or of all.

    Advances each session's convolution and delta state by every row.
    """
    u_TC = ops.matmul(h_TD, w.in_qkv, h_TD.dtype)
    h32 = h_TD.float()
    log_decay, beta = ops.gdn_gates(
        ops.matmul(h32, w.in_a, torch.float32),
        ops.matmul(h32, w.in_b, torch.float32),
        w.decay_scale_V,
        w.dt_bias_V,
    )
    outs = []
    for span in spans:
        state = span.session.recurrent
        assert isinstance(state, RecurrentState)
        mixed = ops.short_conv(u_TC[span.part], state.conv[index].last(), w.conv_CK, 1)
        state.conv[index].push(u_TC[span.part])
        rows = _split(c, mixed, log_decay[span.part], beta[span.part])
        outs.append(_delta(ops, c, rows, state, index, span.first))
    o_TVA = torch.cat(outs) if len(outs) > 1 else outs[0]
    if needed is not None:
        h_TD, o_TVA = h_TD[needed.rows_N], o_TVA[needed.rows_N]
        if not len(h_TD):
            return h_TD
    z_TVA = ops.matmul(h_TD, w.in_z, h_TD.dtype).view(-1, c.gdn_value_heads, c.gdn_head_dim)
    y_TVA = ops.gdn_norm(o_TVA, z_TVA, w.norm_A, c.rms_eps)
    return ops.matmul(y_TVA.flatten(1), w.out, h_TD.dtype)


def _split(c: ModelConfig, mixed_TC: Tensor, log_decay: Tensor, beta: Tensor) -> _Rows:
    key_width = c.gdn_key_heads * c.gdn_head_dim
    q, k = mixed_TC[:, :key_width], mixed_TC[:, key_width : 2 * key_width]
    v = mixed_TC[:, 2 * key_width :]
    return _Rows(
        q_THA=q.reshape(-1, c.gdn_key_heads, c.gdn_head_dim),
        k_THA=k.reshape(-1, c.gdn_key_heads, c.gdn_head_dim),
        v_TVA=v.reshape(-1, c.gdn_value_heads, c.gdn_head_dim),
        log_decay_TV=log_decay,
        beta_TV=beta,
    )


def _delta(
    ops: Ops, c: ModelConfig, new: _Rows, state: RecurrentState, index: int, first: int
) -> Tensor:
    """Run the chunk form over the open rows and the new ones; keep what is open afterwards."""
    layer, opened = state.gdn[index], first - state.base
    total = opened + new.beta_TV.shape[0]
    fold = state.base_after(first + new.beta_TV.shape[0]) - state.base
    in_place = total <= layer.k.shape[0]
    rows = _appended(layer, new, opened, total) if in_place else _joined(layer, new, opened)
    o_TVA, layer.s_VAA = ops.gdn_chunks(
        rows.q_THA,
        rows.k_THA,
        rows.v_TVA,
        rows.log_decay_TV,
        rows.beta_TV,
        layer.s_VAA,
        c.head_order == "tiled",
        opened,
        fold,
    )
    if fold or not in_place:
        _keep(layer, rows, fold, total)
    return o_TVA


def _appended(layer: GdnState, new: _Rows, opened: int, total: int) -> _Rows:
    """All rows where the open ones lie: a token of decode copies its own row only."""
    layer.k[opened:total] = new.k_THA
    layer.v[opened:total] = new.v_TVA
    layer.log_decay[opened:total] = new.log_decay_TV
    layer.beta[opened:total] = new.beta_TV
    return _Rows(
        q_THA=_behind(new.q_THA, opened),
        k_THA=layer.k[:total],
        v_TVA=layer.v[:total],
        log_decay_TV=layer.log_decay[:total],
        beta_TV=layer.beta[:total],
    )


def _joined(layer: GdnState, new: _Rows, opened: int) -> _Rows:
    if not opened:
        return new
    return _Rows(
        q_THA=_behind(new.q_THA, opened),
        k_THA=torch.cat([layer.k[:opened], new.k_THA]),
        v_TVA=torch.cat([layer.v[:opened], new.v_TVA]),
        log_decay_TV=torch.cat([layer.log_decay[:opened], new.log_decay_TV]),
        beta_TV=torch.cat([layer.beta[:opened], new.beta_TV]),
    )


def _behind(q_THA: Tensor, opened: int) -> Tensor:
    """Queries of the new rows after as many zero rows as are open."""
    return torch.nn.functional.pad(q_THA, (0, 0, 0, 0, opened, 0)) if opened else q_THA


def _keep(layer: GdnState, rows: _Rows, fold: int, total: int) -> None:
    """Move the rows after `fold` to the front; they may lie in the same memory."""
    count = total - fold
    layer.k[:count] = rows.k_THA[fold:].clone()
    layer.v[:count] = rows.v_TVA[fold:].clone()
    layer.log_decay[:count] = rows.log_decay_TV[fold:].clone()
    layer.beta[:count] = rows.beta_TV[fold:].clone()
