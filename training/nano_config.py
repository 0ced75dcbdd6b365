"""Sizes of civetta-nano as a Hugging Face config.json (model.md A.2)."""

from __future__ import annotations

from typing import Any

TOKENS = {
    "endoftext": 6131,
    "im_end": 6133,
    "vision_start": 6134,
    "vision_end": 6135,
    "image_pad": 6136,
    "video_pad": 6137,
}


def nano_config() -> dict[str, Any]:
    """The config of civetta-nano; every proportion of the real model is kept but the depth."""
    return _config(
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=6,
        vocab_size=6144,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=96,
        shared_expert_intermediate_size=96,
        hc_lowrank=32,
        ple_embed_dim=256,
        ngram_vocab_size_base=4096,
        indexer_head_dim=32,
        indexer_budget=256,
    ) | {"vision_config": _vision(depth=4, width=192, heads=6, inner=480, out=256, table_side=16)}


def tiny_config() -> dict[str, Any]:
    """A config of the same form for tests: four layers, selection after 32 tokens."""
    return _config(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=6144,
        head_dim=32,
        linear_num_key_heads=1,
        linear_num_value_heads=3,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        hc_lowrank=8,
        ple_embed_dim=32,
        ngram_vocab_size_base=64,
        indexer_head_dim=16,
        indexer_budget=32,
    ) | {"vision_config": _vision(depth=2, width=32, heads=2, inner=64, out=32, table_side=6)}


def preprocessor_config() -> dict[str, Any]:
    """How pictures are prepared (model.md D.1).

    The real model takes 65,536 to 16,777,216 pixels; a 16th of the largest suits a context of
    16,384 tokens, and the smallest is one 128 x 128 picture.
    """
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": 128 * 128, "longest_edge": 1024 * 1024},
    }


def _vision(
    *, depth: int, width: int, heads: int, inner: int, out: int, table_side: int
) -> dict[str, Any]:
    """The tower's config; names as in the real file."""
    return {
        "model_type": "qwen4_exp_vision",
        "depth": depth,
        "hidden_size": width,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": inner,
        "num_heads": heads,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": out,
        "num_position_embeddings": table_side**2,
        "deepstack_visual_indexes": [],
    }


def _config(**sizes: Any) -> dict[str, Any]:
    layers = sizes["num_hidden_layers"]
    rope_half = sizes["head_dim"] // 8
    section = [rope_half - 2 * (rope_half // 3), rope_half // 3, rope_half // 3]
    text: dict[str, Any] = {
        "model_type": "qwen4_exp_text",
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": TOKENS["endoftext"],
        "eos_token_id": TOKENS["endoftext"],
        "pad_token_id": None,
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "layer_types": [
            "full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)
        ],
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "output_gate_type": "sigmoid",
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "hc_count": 4,
        "ple_layer_ids": [2],
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 1,
        "seed": 1234,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_compress_ratio": 4,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": section,
        },
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "mtp": {
            "hybrid": True,
            "layer_types": ["full_attention"],
            "num_hidden_layers": 1,
            "rope_theta": 1e7,
            "mtp_use_hidden_state_from_layer": None,
        },
        **sizes,
    }
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "image_token_id": TOKENS["image_pad"],
        "video_token_id": TOKENS["video_pad"],
        "vision_start_token_id": TOKENS["vision_start"],
        "vision_end_token_id": TOKENS["vision_end"],
        "language_model_only": False,
        "tie_word_embeddings": False,
        "text_config": text,
    }
