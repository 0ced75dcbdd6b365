"""A tiny random qwen4_exp checkpoint saved by transformers, and its rounding to Q8_0 values."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen4ExpConfig,
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
    Qwen4ExpTextConfig,
)

if TYPE_CHECKING:
    from pathlib import Path

VOCAB, EOS, BUDGET, RATIO = 512, 7, 64, 4

# Every row is a multiple of 32 values (Q8_0 blocks); 96 is no multiple of 256, like the real 640.
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
    "hc_count": 4,
    "hc_lowrank": 32,
    "output_gate_type": "sigmoid",
    "ple_layer_ids": [2],
    "ple_embed_dim": 256,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 1000,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 8,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": BUDGET,
    "indexer_compress_ratio": RATIO,
    "max_position_embeddings": 8192,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 256,
    "num_position_embeddings": 16,
}

# transformers' names (below the layer) to the GGUF names whose type decides the rounding.
NAMES = {
    "embed_tokens.weight": "token_embd",
    "lm_head.weight": "output",
    "hyper_connection_mixer.input_mix_weight_down.weight": "output_hc_down",
    "hyper_connection_mixer.input_mix_weight_up.weight": "output_hc_up",
    "attn_hyper_connection.input_mix_weight_down.weight": "hc_attn_down",
    "attn_hyper_connection.input_mix_weight_up.weight": "hc_attn_up",
    "attn_hyper_connection.block_inject_weight.weight": "hc_attn_inject",
    "mlp_hyper_connection.input_mix_weight_down.weight": "hc_ffn_down",
    "mlp_hyper_connection.input_mix_weight_up.weight": "hc_ffn_up",
    "mlp_hyper_connection.block_inject_weight.weight": "hc_ffn_inject",
    "mlp.gate.weight": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": "ffn_gate_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv.weight": "attn_qkv",
    "linear_attn.in_proj_z.weight": "attn_gate",
    "linear_attn.in_proj_a.weight": "ssm_alpha",
    "linear_attn.in_proj_b.weight": "ssm_beta",
    "linear_attn.conv1d.weight": "ssm_conv1d",
    "linear_attn.out_proj.weight": "ssm_out",
    "self_attn.q_proj.weight": "attn_q",
    "self_attn.k_proj.weight": "attn_k",
    "self_attn.v_proj.weight": "attn_v",
    "self_attn.o_proj.weight": "attn_output",
    "self_attn.indexer.index_qk_proj.weight": "indexer.q_proj",
    "ple.key_proj.weight": "ple_key",
    "ple.value_proj.weight": "ple_value",
    "ple.conv1d.weight": "ple_conv1d",
    "ple.ple_embedding.ngram_embedding.weight": "per_layer_token_embd",
}


def random_model(form: str, seed: int) -> torch.nn.Module:
    """`form` "causal" (text only) or "conditional" (the release's); float32 holding bf16 values."""
    torch.manual_seed(seed)
    if form == "causal":
        model: torch.nn.Module = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**TEXT))
    else:
        config = Qwen4ExpConfig(
            text_config=dict(TEXT), vision_config=dict(VISION), image_token_id=9
        )
        model = Qwen4ExpForConditionalGeneration(config)
    for name, p in model.named_parameters():
        if ".visual." not in name:
            p.data.normal_(0, 0.05 if p.dim() > 1 else 0.1)
            p.data = p.data.to(torch.bfloat16).float()
    return model.eval()


def save(model: torch.nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """transformers' own save_pretrained in `dtype`, with a byte-level tokenizer."""
    # A copy: casting a model there and back would leave its rotary frequencies rounded.
    twin: Any = copy.deepcopy(model).to(dtype)
    twin.save_pretrained(folder)
    words = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("a", "b"), ("ab", "c")]  # llama.cpp refuses a file without any
    words |= {left + right: len(words) + i for i, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrap: Any = PreTrainedTokenizerFast
    fast = wrap(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(folder)


def token_ids(count: int, seed: int) -> list[int]:
    """Random ids with three EOS inside, two of them adjacent."""
    ids: list[int] = torch.randint(0, VOCAB, (count,), generator=torch.manual_seed(seed)).tolist()
    for at in (count // 6, count // 6 + 1, 2 * count // 5):
        ids[at] = EOS
    return ids


def transformers_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """float32 [T, vocab]."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return logits


def round_as(model: torch.nn.Module, file: Path) -> int:
    """Round `model` in place to the Q8_0 values of a GGUF file of it; how many tensors were.

    Blocks run along rows and no conversion step cuts one, so rounding before the converter's
    reordering gives the same values as after it. The rounding is gguf's, not civetta's.
    """
    found = {t.name.removesuffix(".weight"): t.tensor_type for t in gguf.GGUFReader(file).tensors}
    rounded = 0
    for name, p in model.named_parameters():
        layer = re.search(r"layers\.(\d+)\.(.+)$", name)
        short = layer[2] if layer else re.sub(r"^model\.(language_model\.)?", "", name)
        target = NAMES.get(short)
        if target is None or ".visual." in name:
            continue
        here = f"blk.{layer[1]}.{target}" if layer and target != "per_layer_token_embd" else target
        if found[here] == gguf.GGMLQuantizationType.Q8_0:
            packed = gguf.quants.quantize(p.data.numpy(), gguf.GGMLQuantizationType.Q8_0)
            values = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
            p.data = torch.from_numpy(np.ascontiguousarray(values)).reshape(p.shape)
            rounded += 1
    return rounded
