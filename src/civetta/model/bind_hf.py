"""Hugging Face tensor names to our weights (model.md A.3, A.7, A.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from civetta.kernels.ops import ExpertWeights, HyperWeights
from civetta.model.binder import Binder, slice_rows
from civetta.model.weights import (
    BlockWeights,
    GdnWeights,
    MoeWeights,
    PleWeights,
    QsaWeights,
    TrunkWeights,
)

if TYPE_CHECKING:
    from civetta.checkpoint.quant import Weight
    from civetta.model.config import ModelConfig

MTP_PREFIX = "mtp."


def bind_hf(b: Binder, c: ModelConfig) -> TrunkWeights:
    """All trunk weights; raises the CheckpointError that names the first tensor at fault."""
    root = "model.language_model."
    if not b.has(root + "embed_tokens.weight"):
        root = "model."  # transformers' text-only form
    embed = b.matrix(root + "embed_tokens.weight", c.vocab, c.hidden)
    head = embed
    if b.has("lm_head.weight") or not c.tied_head:
        head = b.matrix("lm_head.weight", c.vocab, c.hidden)
    weights = TrunkWeights(
        embed=embed,
        blocks=tuple(_block(b, c, f"{root}layers.{i}.", i) for i in range(c.layers)),
        mixer=hf_hyper(b, c, root + "hyper_connection_mixer.", inject=False),
        head=head,
    )
    b.ignore(MTP_PREFIX, "the draft head is read when drafting is on")
    return weights


def _block(b: Binder, c: ModelConfig, at: str, layer: int) -> BlockWeights:
    mixer: GdnWeights | QsaWeights
    if c.layer_kinds[layer] == "gdn":
        mixer = _gdn(b, c, at + "linear_attn.")
    else:
        mixer = _qsa(b, c, at + "self_attn.")
    return BlockWeights(
        attn_hyper=hf_hyper(b, c, at + "attn_hyper_connection.", inject=True),
        mixer=mixer,
        mlp_hyper=hf_hyper(b, c, at + "mlp_hyper_connection.", inject=True),
        moe=_moe(b, c, at + "mlp."),
        ple=_ple(b, c, at + "ple.") if c.ple is not None and c.ple.layer == layer else None,
    )


def hf_attention_block(b: Binder, c: ModelConfig, at: str) -> BlockWeights:
    """A sparse attention layer without n-gram part, under the prefix `at`."""
    return BlockWeights(
        attn_hyper=hf_hyper(b, c, at + "attn_hyper_connection.", inject=True),
        mixer=_qsa(b, c, at + "self_attn."),
        mlp_hyper=hf_hyper(b, c, at + "mlp_hyper_connection.", inject=True),
        moe=_moe(b, c, at + "mlp."),
        ple=None,
    )


def hf_hyper(b: Binder, c: ModelConfig, at: str, *, inject: bool) -> HyperWeights:
    """One hyper-connection site under the prefix `at`; the one at the end has no inject."""
    return HyperWeights(
        gain_SD=b.vector(at + "hc_norm.weight", c.streams, c.hidden, add=1.0),
        down=b.matrix(at + "input_mix_weight_down.weight", c.stream_rank, c.wide),
        up=b.matrix(at + "input_mix_weight_up.weight", c.wide, c.stream_rank),
        inject=b.matrix(at + "block_inject_weight.weight", c.streams, c.wide) if inject else None,
    )


def _gdn(b: Binder, c: ModelConfig, at: str) -> GdnWeights:
    values = c.gdn_value_heads * c.gdn_head_dim
    a_log = b.vector(at + "A_log", c.gdn_value_heads)
    return GdnWeights(
        in_qkv=b.matrix(at + "in_proj_qkv.weight", c.gdn_channels, c.hidden),
        in_z=b.matrix(at + "in_proj_z.weight", values, c.hidden),
        in_a=b.matrix(at + "in_proj_a.weight", c.gdn_value_heads, c.hidden),
        in_b=b.matrix(at + "in_proj_b.weight", c.gdn_value_heads, c.hidden),
        conv_CK=b.vector(at + "conv1d.weight", c.gdn_channels, c.gdn_conv_kernel),
        decay_scale_V=-torch.exp(a_log),
        dt_bias_V=b.vector(at + "dt_bias", c.gdn_value_heads),
        norm_A=b.vector(at + "norm.weight", c.gdn_head_dim),
        out=b.matrix(at + "out_proj.weight", c.hidden, values),
    )


def _qsa(b: Binder, c: ModelConfig, at: str) -> QsaWeights:
    kv, split = c.kv_heads * c.head_dim, c.index_heads * c.index_dim
    qk = b.matrix(at + "indexer.index_qk_proj.weight", split + c.index_dim, c.hidden)
    return QsaWeights(
        q=b.matrix(at + "q_proj.weight", 2 * c.heads * c.head_dim, c.hidden),
        k=b.matrix(at + "k_proj.weight", kv, c.hidden),
        v=b.matrix(at + "v_proj.weight", kv, c.hidden),
        out=b.matrix(at + "o_proj.weight", c.hidden, c.heads * c.head_dim),
        q_norm_A=b.vector(at + "q_norm.weight", c.head_dim, add=1.0),
        k_norm_A=b.vector(at + "k_norm.weight", c.head_dim, add=1.0),
        index_q=slice_rows(qk, 0, split),
        index_k=slice_rows(qk, split, split + c.index_dim),
        index_q_norm_X=b.vector(at + "indexer.q_layernorm.weight", c.index_dim, add=1.0),
        index_k_norm_X=b.vector(at + "indexer.k_layernorm.weight", c.index_dim, add=1.0),
    )


def _moe(b: Binder, c: ModelConfig, at: str) -> MoeWeights:
    shared = at + "shared_expert."
    return MoeWeights(
        router=b.matrix(at + "gate.weight", c.experts, c.hidden),
        experts=_experts(b, c, at + "experts."),
        shared_gate=b.matrix(shared + "gate_proj.weight", c.shared_width, c.hidden),
        shared_up=b.matrix(shared + "up_proj.weight", c.shared_width, c.hidden),
        shared_down=b.matrix(shared + "down_proj.weight", c.hidden, c.shared_width),
        shared_mix=b.matrix(at + "shared_expert_gate.weight", 1, c.hidden),
    )


def _experts(b: Binder, c: ModelConfig, at: str) -> ExpertWeights:
    if b.has(at + "gate_up_proj"):
        both = b.bank(at + "gate_up_proj", c.experts, 2 * c.expert_width, c.hidden)
        return ExpertWeights(
            gate=tuple(slice_rows(w, 0, c.expert_width) for w in both),
            up=tuple(slice_rows(w, c.expert_width, 2 * c.expert_width) for w in both),
            down=b.bank(at + "down_proj", c.experts, c.hidden, c.expert_width),
        )

    def each(part: str, rows: int, cols: int) -> tuple[Weight, ...]:
        return tuple(b.matrix(f"{at}{e}.{part}.weight", rows, cols) for e in range(c.experts))

    return ExpertWeights(
        gate=each("gate_proj", c.expert_width, c.hidden),
        up=each("up_proj", c.expert_width, c.hidden),
        down=each("down_proj", c.hidden, c.expert_width),
    )


def _ple(b: Binder, c: ModelConfig, at: str) -> PleWeights:
    p = c.ple
    assert p is not None
    return PleWeights(
        key=b.matrix(at + "key_proj.weight", c.wide, p.embed),
        value=b.matrix(at + "value_proj.weight", c.hidden, p.embed),
        norm_key_SD=b.vector(at + "norm_key.weight", c.streams, c.hidden, add=1.0),
        norm_query_SD=b.vector(at + "norm_query.weight", c.streams, c.hidden, add=1.0),
        norm_conv_SD=b.vector(at + "norm_conv.weight", c.streams, c.hidden, add=1.0),
        conv_WK=b.vector(at + "conv1d.weight", c.wide, p.conv_kernel),
    )
