"""GGUF tensor names to our weights (model.md C.2, C.3).

Norms are stored as 1 + w already. GDN value heads stay in the file's tiled order, which the mixer
computes with (`ModelConfig.head_order`), so nothing is copied to un-tile them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    from civetta.model.config import ModelConfig


def bind_gguf(b: Binder, c: ModelConfig) -> TrunkWeights:
    """All trunk weights; raises the CheckpointError that names the first tensor at fault."""
    embed = b.matrix("token_embd.weight", c.vocab, c.hidden)
    head = b.matrix("output.weight", c.vocab, c.hidden) if b.has("output.weight") else embed
    weights = TrunkWeights(
        embed=embed,
        blocks=tuple(_block(b, c, i) for i in range(c.layers)),
        mixer=gguf_hyper(b, c, "output_hc_", inject=False),
        head=head,
    )
    if b.has(f"blk.{c.layers}.nextn.enorm.weight"):
        b.ignore(f"blk.{c.layers}.", "the draft head is read when drafting is on")
    return weights


def _block(b: Binder, c: ModelConfig, layer: int) -> BlockWeights:
    at = f"blk.{layer}."
    has_ple = c.ple is not None and c.ple.layer == layer
    return BlockWeights(
        attn_hyper=gguf_hyper(b, c, at + "hc_attn_", inject=True),
        mixer=_gdn(b, c, at) if c.layer_kinds[layer] == "gdn" else _qsa(b, c, at),
        mlp_hyper=gguf_hyper(b, c, at + "hc_ffn_", inject=True),
        moe=_moe(b, c, at),
        ple=_ple(b, c, at) if has_ple else None,
    )


def gguf_attention_block(b: Binder, c: ModelConfig, at: str) -> BlockWeights:
    """A sparse attention layer without n-gram part, under the prefix `at`."""
    return BlockWeights(
        attn_hyper=gguf_hyper(b, c, at + "hc_attn_", inject=True),
        mixer=_qsa(b, c, at),
        mlp_hyper=gguf_hyper(b, c, at + "hc_ffn_", inject=True),
        moe=_moe(b, c, at),
        ple=None,
    )


def gguf_hyper(b: Binder, c: ModelConfig, at: str, *, inject: bool) -> HyperWeights:
    """One hyper-connection site under the prefix `at`; the one at the end has no inject."""
    return HyperWeights(
        gain_SD=b.vector(at + "norm.weight", c.streams, c.hidden),
        down=b.matrix(at + "down.weight", c.stream_rank, c.wide),
        up=b.matrix(at + "up.weight", c.wide, c.stream_rank),
        inject=b.matrix(at + "inject.weight", c.streams, c.wide) if inject else None,
    )


def _gdn(b: Binder, c: ModelConfig, at: str) -> GdnWeights:
    values = c.gdn_value_heads * c.gdn_head_dim
    return GdnWeights(
        in_qkv=b.matrix(at + "attn_qkv.weight", c.gdn_channels, c.hidden),
        in_z=b.matrix(at + "attn_gate.weight", values, c.hidden),
        in_a=b.matrix(at + "ssm_alpha.weight", c.gdn_value_heads, c.hidden),
        in_b=b.matrix(at + "ssm_beta.weight", c.gdn_value_heads, c.hidden),
        conv_CK=b.vector(at + "ssm_conv1d.weight", c.gdn_channels, c.gdn_conv_kernel),
        decay_scale_V=b.vector(at + "ssm_a", c.gdn_value_heads),
        dt_bias_V=b.vector(at + "ssm_dt.bias", c.gdn_value_heads),
        norm_A=b.vector(at + "ssm_norm.weight", c.gdn_head_dim),
        out=b.matrix(at + "ssm_out.weight", c.hidden, values),
    )


def _qsa(b: Binder, c: ModelConfig, at: str) -> QsaWeights:
    kv = c.kv_heads * c.head_dim
    return QsaWeights(
        q=b.matrix(at + "attn_q.weight", 2 * c.heads * c.head_dim, c.hidden),
        k=b.matrix(at + "attn_k.weight", kv, c.hidden),
        v=b.matrix(at + "attn_v.weight", kv, c.hidden),
        out=b.matrix(at + "attn_output.weight", c.hidden, c.heads * c.head_dim),
        q_norm_A=b.vector(at + "attn_q_norm.weight", c.head_dim),
        k_norm_A=b.vector(at + "attn_k_norm.weight", c.head_dim),
        index_q=b.matrix(at + "indexer.q_proj.weight", c.index_heads * c.index_dim, c.hidden),
        index_k=b.matrix(at + "indexer.k_proj.weight", c.index_dim, c.hidden),
        index_q_norm_X=b.vector(at + "indexer.q_norm.weight", c.index_dim),
        index_k_norm_X=b.vector(at + "indexer.k_norm.weight", c.index_dim),
    )


def _moe(b: Binder, c: ModelConfig, at: str) -> MoeWeights:
    return MoeWeights(
        router=b.matrix(at + "ffn_gate_inp.weight", c.experts, c.hidden),
        experts=_experts(b, c, at),
        shared_gate=b.matrix(at + "ffn_gate_shexp.weight", c.shared_width, c.hidden),
        shared_up=b.matrix(at + "ffn_up_shexp.weight", c.shared_width, c.hidden),
        shared_down=b.matrix(at + "ffn_down_shexp.weight", c.hidden, c.shared_width),
        shared_mix=b.matrix(at + "ffn_gate_inp_shexp.weight", 1, c.hidden),
    )


def _experts(b: Binder, c: ModelConfig, at: str) -> ExpertWeights:
    down = b.bank(at + "ffn_down_exps.weight", c.experts, c.hidden, c.expert_width)
    fused = at + "ffn_gate_up_exps.weight"
    if b.has(fused):
        both = b.bank(fused, c.experts, 2 * c.expert_width, c.hidden)
        gate = tuple(slice_rows(w, 0, c.expert_width) for w in both)
        up = tuple(slice_rows(w, c.expert_width, 2 * c.expert_width) for w in both)
        return ExpertWeights(gate=gate, up=up, down=down)
    return ExpertWeights(
        gate=b.bank(at + "ffn_gate_exps.weight", c.experts, c.expert_width, c.hidden),
        up=b.bank(at + "ffn_up_exps.weight", c.experts, c.expert_width, c.hidden),
        down=down,
    )


def _ple(b: Binder, c: ModelConfig, at: str) -> PleWeights:
    p = c.ple
    assert p is not None
    return PleWeights(
        key=b.matrix(at + "ple_key.weight", c.wide, p.embed),
        value=b.matrix(at + "ple_value.weight", c.hidden, p.embed),
        norm_key_SD=b.vector(at + "ple_norm_key.weight", c.streams, c.hidden),
        norm_query_SD=b.vector(at + "ple_norm_query.weight", c.streams, c.hidden),
        norm_conv_SD=b.vector(at + "ple_norm_conv.weight", c.streams, c.hidden),
        conv_WK=b.vector(at + "ple_conv1d.weight", c.wide, p.conv_kernel),
    )
