"""`Ops`: the table of every operation the network uses; shapes and dtypes are written here once.

Legend for shape suffixes, here and in model/, kernels/, state/:
  T tokens of one launch (several sequences packed one after another for row-local ops, one
    sequence for the rest) · D hidden width · S residual streams · R low rank of the streams
  N, K outputs, inputs of a matmul · L vocabulary
  H key heads of GDN · V its value heads · C conv channels · J rows of history
  Q query heads · G key/value heads · A head width · I indexer heads · X indexer width
  B blocks of 4 tokens · P pages · E experts · M selected experts a token

Rules every implementation keeps (design.md section 2):
  * a row's result depends on that row (and its own sequence's past) alone: not on T, on its place
    among the rows, nor on what else shares the launch;
  * reductions run in one fixed order; ties go to the lower index;
  * results have the dtype of the activations unless a signature says float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from civetta.checkpoint.quant import Weight

GDN_CHUNK = 64
"""Rows of a GDN chunk; chunks are anchored at absolute positions that are multiples of it."""

PAGE_TOKENS = 64
"""Tokens of one page of keys, values and index keys."""

ATTENTION_PARTITION = 512
"""Keys of one softmax partition, counted from position 0 (dense) or the list's start (sparse)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperWeights:
    """One hyper-connection site (model.md A.6). gain_W folds the 1 + w; inject is None at the end.

    gain_SD float32 [S, D]; down [R, S*D]; up [S*D, R]; inject [S, S*D] or None.
    """

    gain_SD: Tensor
    down: Weight
    up: Weight
    inject: Weight | None


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class ExpertWeights:
    """Routed experts, one matrix an expert, never stacked: gate/up [F, D], down [D, F] each."""

    gate: tuple[Weight, ...]
    up: tuple[Weight, ...]
    down: tuple[Weight, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """Callables of one implementation, built once by `select` and handed to the model."""

    name: str

    embed: Callable[[Tensor, Weight, torch.dtype], Tensor]
    """(ids_T int64, table [L, D], dtype) -> x_TD."""

    matmul: Callable[[Tensor, Weight, torch.dtype], Tensor]
    """(x_TK, w [N, K], out dtype) -> y_TN = x w^T, operands in x's dtype, float32 accumulation."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x_[..., A], gain_A or [..., A] float32, eps) -> same dtype; float32 inside."""

    hyper_read: Callable[[Tensor, HyperWeights, float, torch.dtype], tuple[Tensor, Tensor | None]]
    """(x_TSD float32, w, eps, dtype) -> (h_TD dtype, inject_TS float32 or None)."""

    hyper_write: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(x_TSD, y_TD, inject_TS) -> x_TSD + inject_TS * y_TD, float32."""

    short_conv: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    """(u_TC, history_JC, w_CK float32, dilation) -> silu(causal depthwise conv)_TC.

    history holds the J = (K - 1) * dilation rows before u (zeros before the sequence's start);
    w[:, K-1] multiplies the newest row.
    """

    gdn_gates: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(a_TV, b_TV, decay_scale_V, dt_bias_V) -> (log_decay_TV, beta_TV) float32, model.md E.2;
    decay_scale is -exp(A_log)."""

    gdn_chunks: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, int, int],
        tuple[Tensor, Tensor],
    ]
    """(q_THA, k_THA, v_TVA, log_decay_TV, beta_TV, state_VAA float32, tiled, first_new, fold)
    -> (o_[T - first_new]VA in v's dtype, state_VAA after row `fold`).

    Row 0 sits on a multiple of GDN_CHUNK; rows before first_new are open rows met again (their q
    and output do not matter); fold is a multiple of GDN_CHUNK, at most T. q and k come before
    L2 norm and scaling. `tiled`: value head v uses key head v mod H
    (GGUF order), else v // (V / H).
    """

    gdn_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(o_TVA, z_TVA, gain_A float32, eps) -> gain * rms(o) * sigmoid(z)."""

    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(x_THA, cos_TR, sin_TR float32) -> x with its first 2R columns rotated (rotate-half)."""

    index_pool: Callable[[Tensor, Tensor, float, Tensor, Tensor], Tensor]
    """(raw_[B, ratio, X], gain_X, eps, cos_BR, sin_BR of each block's first token) -> key_BX."""

    index_select: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    """(q_TIX roped, key_pages_[P, PAGE/ratio, X], table_P int64, blocks_T int64, keep)
    -> kept block ids [T, keep] int64 ascending. blocks_T: complete blocks each query sees (> keep);
    ties to the lower block."""

    attend_dense: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    """(q_TQA, k_pages_[P, PAGE, G, A], v_pages, table_P int64, first position) -> o_TQA.

    Query t sees keys 0 .. first + t; scale A ** -0.5."""

    attend_sparse: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    """(q_TQA, k_pages, v_pages, table_P, tokens_TK int64 ascending, -1 padded at the end) -> o_TQA."""

    route: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    """(logits_TE float32, M) -> (experts_TM int64 by falling score, weights_TM float32, sum 1)."""

    experts: Callable[[Tensor, Tensor, Tensor, ExpertWeights], Tensor]
    """(h_TD, experts_TM, weights_TM, w) -> y_TD float32, summed in slot order."""

    swiglu: Callable[[Tensor, Tensor], Tensor]
    """(gate, up) -> silu(gate) * up."""

    ple_gate: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
    """(x_TSD float32, key_TSD, value_TD, gain_query_SD, gain_key_SD, eps) -> gated value_TSD float32,
    model.md A.5."""

    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x_[..., D], gain_D, shift_D float32, eps) -> float32."""

    gelu_tanh: Callable[[Tensor], Tensor]
    """x -> float32, tanh approximation."""

    gelu: Callable[[Tensor], Tensor]
    """x -> float32, exact (erf)."""

    attend_image: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(q_THA, k_PHA, v_PHA) -> o_THA: every query sees every key of its image; scale A ** -0.5.

    The one op whose bits may follow T where no compiled one is at hand: the tower cuts an image
    always in the same way."""
