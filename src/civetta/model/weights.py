"""The network's parameters as frozen data; `build` fills them from a checkpoint.

Matrices are [out, in] in any stored format; vectors are float32 with the norms' 1 + w folded in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.checkpoint.quant import Weight
    from civetta.kernels.ops import ExpertWeights, HyperWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnWeights:
    """Gated delta-net mixer (model.md E.2); in_qkv rows are q, k, v in that order."""

    in_qkv: Weight
    in_z: Weight
    in_a: Weight
    in_b: Weight
    conv_CK: Tensor
    decay_scale_V: Tensor
    dt_bias_V: Tensor
    norm_A: Tensor
    out: Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class QsaWeights:
    """Sparse attention mixer (model.md E.1); q rows are, head by head, query then gate."""

    q: Weight
    k: Weight
    v: Weight
    out: Weight
    q_norm_A: Tensor
    k_norm_A: Tensor
    index_q: Weight
    index_k: Weight
    index_q_norm_X: Tensor
    index_k_norm_X: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    """Router, routed experts, shared expert and its gate [1, D]."""

    router: Weight
    experts: ExpertWeights
    shared_gate: Weight
    shared_up: Weight
    shared_down: Weight
    shared_mix: Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class PleWeights:
    """N-gram layer (model.md A.5); gains are [S, D]."""

    key: Weight
    value: Weight
    norm_key_SD: Tensor
    norm_query_SD: Tensor
    norm_conv_SD: Tensor
    conv_WK: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """One layer."""

    attn_hyper: HyperWeights
    mixer: GdnWeights | QsaWeights
    mlp_hyper: HyperWeights
    moe: MoeWeights
    ple: PleWeights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrunkWeights:
    """The whole text network."""

    embed: Weight
    blocks: tuple[BlockWeights, ...]
    mixer: HyperWeights
    head: Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpWeights:
    """The draft head (model.md B.1). `embed` and `head` are the trunk's unless the file has own ones.

    hidden_norm_SD is the gain of the norm over the streams, whichever way that norm runs.
    """

    embed: Weight
    embed_norm_D: Tensor
    hidden_norm_SD: Tensor
    embed_in: Weight
    hidden_in: Weight
    block: BlockWeights
    mixer: HyperWeights
    head: Weight
