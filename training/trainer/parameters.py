"""The trained tensors by Hugging Face name: shapes and first values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from training.trainer.network import ROOT

if TYPE_CHECKING:
    from civetta.model.config import ModelConfig


def create(c: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Float32 parameters on the CPU, the same for the same seed."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float | None = None) -> Tensor:
        scale = std if std is not None else 0.7 / math.sqrt(shape[-1])
        return torch.randn(shape, generator=g) * scale

    p = {
        ROOT + "embed_tokens.weight": normal(c.vocab, c.hidden, std=0.1),
        "lm_head.weight": normal(c.vocab, c.hidden, std=0.02),
    }
    hyper(p, c, ROOT + "hyper_connection_mixer.", normal, inject=False)
    for i, kind in enumerate(c.layer_kinds):
        at = f"{ROOT}layers.{i}."
        for site in ("attn", "mlp"):
            hyper(p, c, f"{at}{site}_hyper_connection.", normal, inject=True)
        if kind == "gdn":
            _gdn(p, c, at + "linear_attn.", normal, g)
        else:
            qsa(p, c, at + "self_attn.", normal)
        moe(p, c, at + "mlp.", normal)
        if c.ple is not None and c.ple.layer == i:
            _ple(p, c, at + "ple.", normal)
    return p


def hyper(p, c, at, normal, *, inject):  # type: ignore[no-untyped-def]
    p[at + "hc_norm.weight"] = torch.zeros(c.wide)
    p[at + "input_mix_weight_down.weight"] = normal(c.stream_rank, c.wide)
    p[at + "input_mix_weight_up.weight"] = normal(c.wide, c.stream_rank, std=0.02)
    if inject:
        p[at + "block_inject_weight.weight"] = normal(c.streams, c.wide, std=0.01)


def _gdn(p, c, at, normal, g):  # type: ignore[no-untyped-def]
    values = c.gdn_value_heads * c.gdn_head_dim
    p[at + "in_proj_qkv.weight"] = normal(c.gdn_channels, c.hidden)
    p[at + "in_proj_z.weight"] = normal(values, c.hidden)
    p[at + "in_proj_a.weight"] = normal(c.gdn_value_heads, c.hidden, std=0.02)
    p[at + "in_proj_b.weight"] = normal(c.gdn_value_heads, c.hidden, std=0.02)
    p[at + "conv1d.weight"] = torch.rand(c.gdn_channels, 1, c.gdn_conv_kernel, generator=g) - 0.5
    p[at + "A_log"] = torch.log(1.0 + 7.0 * torch.rand(c.gdn_value_heads, generator=g))
    step = torch.exp(math.log(1e-3) + math.log(100.0) * torch.rand(c.gdn_value_heads, generator=g))
    p[at + "dt_bias"] = step + torch.log(-torch.expm1(-step))
    p[at + "norm.weight"] = torch.ones(c.gdn_head_dim)
    p[at + "out_proj.weight"] = normal(c.hidden, values, std=0.2 / math.sqrt(values))


def qsa(p, c, at, normal):  # type: ignore[no-untyped-def]
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    p[at + "q_proj.weight"] = normal(2 * q, c.hidden)
    p[at + "k_proj.weight"] = normal(kv, c.hidden)
    p[at + "v_proj.weight"] = normal(kv, c.hidden)
    p[at + "o_proj.weight"] = normal(c.hidden, q, std=0.2 / math.sqrt(q))
    p[at + "q_norm.weight"] = torch.zeros(c.head_dim)
    p[at + "k_norm.weight"] = torch.zeros(c.head_dim)
    p[at + "indexer.index_qk_proj.weight"] = normal((c.index_heads + 1) * c.index_dim, c.hidden)
    p[at + "indexer.q_layernorm.weight"] = torch.zeros(c.index_dim)
    p[at + "indexer.k_layernorm.weight"] = torch.zeros(c.index_dim)


def moe(p, c, at, normal):  # type: ignore[no-untyped-def]
    p[at + "gate.weight"] = normal(c.experts, c.hidden, std=0.02)
    p[at + "experts.gate_up_proj"] = normal(c.experts, 2 * c.expert_width, c.hidden)
    p[at + "experts.down_proj"] = normal(
        c.experts, c.hidden, c.expert_width, std=0.3 / math.sqrt(c.expert_width)
    )
    p[at + "shared_expert.gate_proj.weight"] = normal(c.shared_width, c.hidden)
    p[at + "shared_expert.up_proj.weight"] = normal(c.shared_width, c.hidden)
    p[at + "shared_expert.down_proj.weight"] = normal(
        c.hidden, c.shared_width, std=0.3 / math.sqrt(c.shared_width)
    )
    p[at + "shared_expert_gate.weight"] = normal(1, c.hidden, std=0.02)


def _ple(p, c, at, normal):  # type: ignore[no-untyped-def]
    p[at + "key_proj.weight"] = normal(c.wide, c.ple.embed)
    p[at + "value_proj.weight"] = normal(c.hidden, c.ple.embed, std=0.2 / math.sqrt(c.ple.embed))
    for name in ("key", "query", "conv"):
        p[at + f"norm_{name}.weight"] = torch.zeros(c.wide)
    p[at + "conv1d.weight"] = normal(c.wide, 1, c.ple.conv_kernel, std=0.1)
    rows = c.ple.hash.rows
    p[at + "ple_embedding.ngram_embedding.shard_0.weight"] = normal(rows, c.ple.row_values, std=0.5)
