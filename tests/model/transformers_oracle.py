"""transformers' qwen4_exp as the oracle: random models saved the way transformers saves them."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

if TYPE_CHECKING:
    from pathlib import Path

EOS = 7


def text_config(**changes: Any) -> Qwen4ExpTextConfig:
    """A small configuration with the real model's ratios of heads."""
    values: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 40,
        "hc_count": 4,
        "hc_lowrank": 8,
        "output_gate_type": "sigmoid",
        "ple_layer_ids": [2],
        "ple_embed_dim": 64,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 1000,
        "make_ngram_vocab_size_divisible_by": 8,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "max_position_embeddings": 8192,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }
    return Qwen4ExpTextConfig(**{**values, **changes})


def random_model(config: Qwen4ExpTextConfig, seed: int) -> Qwen4ExpForCausalLM:
    """A model whose every parameter is random, norms included."""
    torch.manual_seed(seed)
    model = Qwen4ExpForCausalLM(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.08 if value.dim() > 1 else 0.1)
    return model


def save(model: Qwen4ExpForCausalLM, folder: Path) -> Path:
    """As transformers saves it."""
    model.save_pretrained(folder)
    return folder


def stable_topk(self: torch.Tensor, k: int, dim: int = -1, **_: Any) -> Any:
    """topk with ties to the lower index: the rule that leaves the selection no choice."""
    order = torch.sort(self, dim=dim, descending=True, stable=True)
    return types.SimpleNamespace(
        values=order.values.narrow(dim, 0, k), indices=order.indices.narrow(dim, 0, k)
    )
