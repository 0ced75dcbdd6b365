"""Mixers on the CPU by the compiled extension: delta rule, attention, choice of blocks.

Signatures of `Ops`; the rules of `cpu_rows` hold here too. A GDN row adds its terms in the order of
the earlier rows, an attention row in the order of its keys, so neither depends on the launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from civetta.kernels import _native
from civetta.kernels.cpu_rows import IS_BF16, is_plain, side_by_side, view_of


def short_conv(u_TC: Tensor, history_JC: Tensor, w_CK: Tensor, dilation: int) -> Tensor:
    """silu of a causal depthwise convolution over history and u; see `Ops.short_conv`.

    Raises ValueError for more than 16 taps.
    """
    u_TC, history_JC, w_CK = side_by_side(u_TC), side_by_side(history_JC), w_CK.contiguous()
    assert is_plain(w_CK), "taps are float32"
    (rows, channels), taps = u_TC.shape, w_CK.shape[1]
    assert history_JC.shape == ((taps - 1) * dilation, channels), "history reaches back far enough"
    y_TC = torch.empty((rows, channels), dtype=u_TC.dtype)
    _native.short_conv(
        u_TC.data_ptr(),
        u_TC.stride(0),
        IS_BF16[u_TC.dtype],
        history_JC.data_ptr(),
        history_JC.stride(0),
        IS_BF16[history_JC.dtype],
        w_CK.data_ptr(),
        taps,
        dilation,
        rows,
        channels,
        y_TC.data_ptr(),
    )
    return y_TC


def gdn_gates(
    a_TV: Tensor, b_TV: Tensor, decay_scale_V: Tensor, dt_bias_V: Tensor
) -> tuple[Tensor, Tensor]:
    """Log decay and write strength of each head, float32; see `Ops.gdn_gates`."""
    a_TV, b_TV = a_TV.to(torch.float32).contiguous(), b_TV.to(torch.float32).contiguous()
    assert is_plain(decay_scale_V), "gates are float32"
    assert is_plain(dt_bias_V), "gates are float32"
    log_decay_TV, beta_TV = torch.empty_like(a_TV), torch.empty_like(a_TV)
    rows, heads = a_TV.shape
    _native.delta_gates(
        a_TV.data_ptr(),
        b_TV.data_ptr(),
        decay_scale_V.data_ptr(),
        dt_bias_V.data_ptr(),
        rows,
        heads,
        log_decay_TV.data_ptr(),
        beta_TV.data_ptr(),
    )
    return log_decay_TV, beta_TV


def gdn_norm(o_TVA: Tensor, z_TVA: Tensor, gain_A: Tensor, eps: float) -> Tensor:
    """Per-head RMS norm gated by sigmoid(z); see `Ops.gdn_norm`."""
    o_TVA, z_TVA = side_by_side(o_TVA), side_by_side(z_TVA)
    assert is_plain(gain_A), "gains are float32"
    rows, heads, width = z_TVA.shape
    y_TVA = torch.empty((rows, heads, width), dtype=z_TVA.dtype)
    _native.delta_norm(
        view_of(o_TVA),
        view_of(z_TVA),
        gain_A.data_ptr(),
        rows,
        heads,
        width,
        eps,
        y_TVA.data_ptr(),
    )
    return y_TVA


def gdn_chunks(
    q_THA: Tensor,
    k_THA: Tensor,
    v_TVA: Tensor,
    log_decay_TV: Tensor,
    beta_TV: Tensor,
    state_VAA: Tensor,
    tiled: bool,
    first_new: int,
    fold: int,
) -> tuple[Tensor, Tensor]:
    """Outputs of the new rows and the state after row `fold`; see `Ops.gdn_chunks`."""
    q_THA, k_THA, v_TVA = side_by_side(q_THA), side_by_side(k_THA), side_by_side(v_TVA)
    state_VAA = state_VAA.contiguous()
    assert state_VAA.dtype == log_decay_TV.dtype == beta_TV.dtype == torch.float32, "all float32"
    rows, value_heads, width = v_TVA.shape
    assert log_decay_TV.stride() == beta_TV.stride(), "gates lie alike"
    assert log_decay_TV.stride(1) == 1 or value_heads == 1, "gates of a row lie side by side"
    o_TVA = torch.empty((rows - first_new, value_heads, width), dtype=v_TVA.dtype)
    folded = torch.empty_like(state_VAA) if fold else state_VAA
    _native.delta_chunks(
        view_of(q_THA),
        view_of(k_THA),
        view_of(v_TVA),
        log_decay_TV.data_ptr(),
        beta_TV.data_ptr(),
        log_decay_TV.stride(0),
        state_VAA.data_ptr(),
        rows,
        k_THA.shape[1],
        value_heads,
        width,
        tiled,
        first_new,
        fold,
        o_TVA.data_ptr(),
        folded.data_ptr(),
    )
    return o_TVA, folded


def index_select(
    q_TIX: Tensor, key_pages: Tensor, table_P: Tensor, blocks_T: Tensor, keep: int
) -> Tensor:
    """The `keep` best complete blocks of each query, ascending; see `Ops.index_select`."""
    q_TIX, blocks_T = side_by_side(q_TIX), blocks_T.contiguous()
    rows, heads, width = q_TIX.shape
    assert key_pages[0].is_contiguous(), "blocks of a page lie side by side"
    out_TK = torch.empty((rows, keep), dtype=torch.int64)
    _native.choose_blocks(
        view_of(q_TIX),
        key_pages.data_ptr(),
        IS_BF16[key_pages.dtype],
        key_pages.stride(0),
        key_pages.shape[1],
        table_P.data_ptr(),
        blocks_T.data_ptr(),
        rows,
        heads,
        width,
        keep,
        out_TK.data_ptr(),
    )
    return out_TK


def attend_dense(
    q_TQA: Tensor, k_pages: Tensor, v_pages: Tensor, table_P: Tensor, first: int
) -> Tensor:
    """Causal attention over all keys; see `Ops.attend_dense`."""
    q_TQA = side_by_side(q_TQA)
    rows, heads, width = q_TQA.shape
    o_TQA = torch.empty((rows, heads, width), dtype=q_TQA.dtype)
    _native.attend_dense(
        view_of(q_TQA),
        _cache(k_pages, v_pages),
        table_P.data_ptr(),
        rows,
        heads,
        first,
        o_TQA.data_ptr(),
    )
    return o_TQA


def attend_sparse(
    q_TQA: Tensor, k_pages: Tensor, v_pages: Tensor, table_P: Tensor, tokens_TK: Tensor
) -> Tensor:
    """Attention over each query's own token list; see `Ops.attend_sparse`."""
    q_TQA, tokens_TK = side_by_side(q_TQA), tokens_TK.contiguous()
    rows, heads, width = q_TQA.shape
    o_TQA = torch.empty((rows, heads, width), dtype=q_TQA.dtype)
    _native.attend_sparse(
        view_of(q_TQA),
        _cache(k_pages, v_pages),
        table_P.data_ptr(),
        rows,
        heads,
        tokens_TK.data_ptr(),
        tokens_TK.shape[1],
        o_TQA.data_ptr(),
    )
    return o_TQA


def attend_image(q_THA: Tensor, k_PHA: Tensor, v_PHA: Tensor) -> Tensor:
    """Attention without mask; see `Ops.attend_image`. A query's bits do not depend on the others."""
    q_THA, k_PHA, v_PHA = side_by_side(q_THA), side_by_side(k_PHA), side_by_side(v_PHA)
    (rows, heads, width), keys = q_THA.shape, k_PHA.shape[0]
    assert k_PHA.shape == v_PHA.shape == (keys, heads, width), "a key and a value for each patch"
    o_THA = torch.empty((rows, heads, width), dtype=q_THA.dtype)
    _native.attend_image(
        view_of(q_THA),
        view_of(k_PHA),
        view_of(v_PHA),
        rows,
        keys,
        heads,
        width,
        o_THA.data_ptr(),
    )
    return o_THA


def _cache(k_pages: Tensor, v_pages: Tensor) -> _native.Cache:
    """Pages [P, PAGE, G, A] of keys and values as the extension reads them."""
    strides = k_pages.stride()
    assert strides == v_pages.stride(), "keys and values lie alike"
    assert strides[3] == 1 or k_pages.shape[3] == 1, "values of a key lie side by side"
    _, page_tokens, groups, width = k_pages.shape
    return _native.Cache(
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        IS_BF16[k_pages.dtype],
        strides[0],
        strides[1],
        strides[2],
        page_tokens,
        groups,
        width,
    )
