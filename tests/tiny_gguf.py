"""The tiny model as GGUF: trunk, draft sidecar and vision sidecar (model.md C).

The package that writes the files has no constants for this model, so the names are spelled here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType

from civetta.model.tiny import MERGE, SPECIALS, special_id, tiny_vocabulary
from tiny import ROOT, TABLE, Tensors, Tiny

if TYPE_CHECKING:
    from pathlib import Path


def gguf_tensors(tiny: Tiny, *, fuse: bool = False) -> Tensors:
    """All trunk tensors by GGUF name, float32, transformed as in model.md C.3."""
    t, text = tiny.tensors, tiny.text
    out = {
        "token_embd.weight": t[ROOT + "embed_tokens.weight"],
        "output.weight": t["lm_head.weight"],
        **_gguf_hyper(t, ROOT + "hyper_connection_mixer.", "output_hc_"),
    }
    for layer, kind in enumerate(text["layer_types"]):
        hf, at = f"{ROOT}layers.{layer}.", f"blk.{layer}."
        out |= _gguf_hyper(t, hf + "attn_hyper_connection.", at + "hc_attn_")
        out |= _gguf_hyper(t, hf + "mlp_hyper_connection.", at + "hc_ffn_")
        out |= _gguf_mlp(t, hf + "mlp.", at, fuse)
        if kind == "linear_attention":
            out |= _gguf_gdn(t, hf + "linear_attn.", at, text)
        else:
            out |= _gguf_attention(t, hf + "self_attn.", at, text)
    shards = [t[f"{TABLE}shard_{k}.weight"] for k in range(text["split_ngram_parts"])]
    return out | _gguf_ple(t, f"{ROOT}layers.1.ple.", shards)


def _gguf_hyper(t: Tensors, hf: str, at: str) -> Tensors:
    out = {
        at + "norm.weight": t[hf + "hc_norm.weight"] + 1,
        at + "down.weight": t[hf + "input_mix_weight_down.weight"],
        at + "up.weight": t[hf + "input_mix_weight_up.weight"],
    }
    if hf + "block_inject_weight.weight" in t:
        out[at + "inject.weight"] = t[hf + "block_inject_weight.weight"]
    return out


def _gguf_mlp(t: Tensors, hf: str, at: str, fuse: bool) -> Tensors:
    both = t[hf + "experts.gate_up_proj"]
    half = both.shape[1] // 2
    banks = (
        {"ffn_gate_up_exps": both}
        if fuse
        else {"ffn_gate_exps": both[:, :half], "ffn_up_exps": both[:, half:]}
    )
    named = banks | {
        "ffn_down_exps": t[hf + "experts.down_proj"],
        "ffn_gate_inp": t[hf + "gate.weight"],
        "ffn_gate_inp_shexp": t[hf + "shared_expert_gate.weight"].reshape(-1),
        "ffn_gate_shexp": t[hf + "shared_expert.gate_proj.weight"],
        "ffn_up_shexp": t[hf + "shared_expert.up_proj.weight"],
        "ffn_down_shexp": t[hf + "shared_expert.down_proj.weight"],
    }
    return {f"{at}{name}.weight": values for name, values in named.items()}


def _gguf_gdn(t: Tensors, hf: str, at: str, text: dict[str, Any]) -> Tensors:
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    dim = text["linear_key_head_dim"]
    ratio = values // keys
    tiled = [k * ratio + j for j in range(ratio) for k in range(keys)]
    rows = np.concatenate([np.arange(h * dim, (h + 1) * dim) for h in tiled])
    channels = np.concatenate([np.arange(2 * keys * dim), 2 * keys * dim + rows])
    return {
        at + "attn_qkv.weight": t[hf + "in_proj_qkv.weight"][channels],
        at + "attn_gate.weight": t[hf + "in_proj_z.weight"][rows],
        at + "ssm_alpha.weight": t[hf + "in_proj_a.weight"][tiled],
        at + "ssm_beta.weight": t[hf + "in_proj_b.weight"][tiled],
        at + "ssm_conv1d.weight": t[hf + "conv1d.weight"][channels, 0],
        at + "ssm_a": -np.exp(t[hf + "A_log"][tiled]),
        at + "ssm_dt.bias": t[hf + "dt_bias"][tiled],
        at + "ssm_norm.weight": t[hf + "norm.weight"],
        at + "ssm_out.weight": t[hf + "out_proj.weight"][:, rows],
    }


def _gguf_attention(t: Tensors, hf: str, at: str, text: dict[str, Any]) -> Tensors:
    split = text["indexer_n_heads"] * text["indexer_head_dim"]
    index = t[hf + "indexer.index_qk_proj.weight"]
    return {
        at + "attn_q.weight": t[hf + "q_proj.weight"],
        at + "attn_k.weight": t[hf + "k_proj.weight"],
        at + "attn_v.weight": t[hf + "v_proj.weight"],
        at + "attn_output.weight": t[hf + "o_proj.weight"],
        at + "attn_q_norm.weight": t[hf + "q_norm.weight"] + 1,
        at + "attn_k_norm.weight": t[hf + "k_norm.weight"] + 1,
        at + "indexer.q_proj.weight": index[:split],
        at + "indexer.k_proj.weight": index[split:],
        at + "indexer.q_norm.weight": t[hf + "indexer.q_layernorm.weight"] + 1,
        at + "indexer.k_norm.weight": t[hf + "indexer.k_layernorm.weight"] + 1,
    }


def _gguf_ple(t: Tensors, hf: str, shards: list[np.ndarray]) -> Tensors:
    return {
        "per_layer_token_embd.weight": np.concatenate(shards),
        "blk.1.ple_key.weight": t[hf + "key_proj.weight"],
        "blk.1.ple_value.weight": t[hf + "value_proj.weight"],
        "blk.1.ple_norm_key.weight": t[hf + "norm_key.weight"] + 1,
        "blk.1.ple_norm_query.weight": t[hf + "norm_query.weight"] + 1,
        "blk.1.ple_norm_conv.weight": t[hf + "norm_conv.weight"] + 1,
        "blk.1.ple_conv1d.weight": t[hf + "conv1d.weight"][:, 0],
    }


def gguf_metadata(tiny: Tiny) -> dict[str, Any]:
    """The keys of model.md C.1, without prefix; `u64` lists marked by their array type."""
    text = tiny.text
    at = f"{ROOT}layers.1.ple.ple_embedding."
    full = [word == "full_attention" for word in text["layer_types"]]

    def u64(name: str) -> np.ndarray:
        return tiny.tensors[at + name].astype(np.uint64)

    return {
        "block_count": text["num_hidden_layers"],
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.key_length": text["head_dim"],
        "attention.value_length": text["head_dim"],
        "attention.layer_norm_rms_epsilon": text["rms_norm_eps"],
        "rope.dimension_sections": [*text["rope_parameters"]["mrope_section"], 0],
        "rope.freq_base": text["rope_parameters"]["rope_theta"],
        "rope.dimension_count": int(text["head_dim"] * text["partial_rotary_factor"]),
        "expert_count": text["num_experts"],
        "expert_used_count": text["num_experts_per_tok"],
        "expert_feed_forward_length": text["moe_intermediate_size"],
        "expert_shared_feed_forward_length": text["shared_expert_intermediate_size"],
        "ssm.conv_kernel": text["linear_conv_kernel_dim"],
        "ssm.state_size": text["linear_key_head_dim"],
        "ssm.group_count": text["linear_num_key_heads"],
        "ssm.time_step_rank": text["linear_num_value_heads"],
        "ssm.inner_size": text["linear_num_value_heads"] * text["linear_value_head_dim"],
        "attention.recurrent_layers": [not x for x in full],
        "full_attention_interval": text["full_attention_interval"],
        "hyper_connection.count": text["hc_count"],
        "hyper_connection.low_rank": text["hc_lowrank"],
        "attention.indexer.head_count": text["indexer_n_heads"],
        "attention.indexer.key_length": text["indexer_head_dim"],
        "attention.indexer.top_k": text["indexer_budget"],
        "attention.compress_ratios": [4 if x else 0 for x in full],
        "ple.layers": [text["ple_layer_ids"][0] - 1],
        "ple.ngram_size": text["ngram_size"],
        "ple.heads_per_ngram": text["heads_per_ngram"],
        "ple.conv_kernel": text["ple_conv_kernel_size"],
        "ple.eos_token_id": text["eos_token_id"],
        "ple.image_token_id": tiny.config["image_token_id"],
        "embedding_length_per_layer_input": tiny.tensors[TABLE + "shard_0.weight"].shape[1],
        "ple.layer_multipliers": u64("layer_multipliers"),
        "ple.head_offsets": u64("ngram_heads_offsets"),
        "ple.head_vocab_sizes": u64("ngram_heads_vocab_sizes"),
    }


KEPT_F32 = re.compile(r"norm|gate_inp|inject|ssm_(alpha|beta|a$|dt|conv)|ple_conv1d")


def quantize(name: str, values: np.ndarray, kind: Type) -> tuple[np.ndarray, Type]:
    """Stored bytes of a tensor, F32 where its name or width rules the wanted type out."""
    values = np.ascontiguousarray(values, np.float32)
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if kind == Type.F32 or values.ndim < 2 or KEPT_F32.search(name) or values.shape[-1] % block:
        return values, Type.F32
    if kind == Type.IQ4_NL:
        return _iq4_nl(values), kind
    if block == 256:
        return _super_blocks(values, kind), kind
    return gguf.quants.quantize(values, kind), kind


def _iq4_nl(values: np.ndarray) -> np.ndarray:
    levels = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    blocks = values.reshape(-1, 32)
    d = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    unit = blocks / np.maximum(d.astype(np.float32), 1e-8)
    codes = np.abs(unit[..., None] - levels).argmin(-1).astype(np.uint8)
    packed = codes[:, :16] | (codes[:, 16:] << 4)
    return np.concatenate([d.view(np.uint8), packed], axis=1).reshape(*values.shape[:-1], -1)


def _super_blocks(values: np.ndarray, kind: Type) -> np.ndarray:
    """Random bytes with small scales: no encoder is at hand, and any bytes are valid weights."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(1).integers(0, 256, (values.size // 256, size), np.uint8)
    small = np.full((len(raw), 1), 1e-4, np.float16).view(np.uint8)
    scales = {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}[kind]
    for start in scales:
        raw[:, start : start + 2] = small
    return raw.reshape(*values.shape[:-1], -1)


def dequantized(tensors: Tensors, kind: Type) -> Tensors:
    """The numbers that a file of type `kind` holds, by the decoder of the gguf package."""
    out = {}
    for name, values in tensors.items():
        raw, stored_as = quantize(name, values, kind)
        out[name] = gguf.quants.dequantize(raw, stored_as).reshape(values.shape)
    return out


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: Tensors,
    kind: Type = Type.F32,
    *,
    arch: str = "qwen4exp",
    parts: int = 1,
) -> Path:
    """A GGUF file; with several `parts` the returned path is the first of them."""
    most = -(-len(tensors) // parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=most)
    for key, value in metadata.items():
        _add_key(writer, f"{arch}.{key}", value)
    if arch == "qwen4exp":
        _add_tokenizer(writer)
    for name, values in tensors.items():
        raw, stored_as = quantize(name, values, kind)
        writer.add_tensor(name, raw, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        kinds = GGUFValueType.ARRAY, GGUFValueType.UINT64
        writer.add_key_value(key, [int(x) for x in value], *kinds)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_uint32(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    ordinary = {index: text for text, index in tiny_vocabulary().items()}
    control = set(SPECIALS[:7])
    tokens = [ordinary.get(i) or SPECIALS[i - 256] for i in range(257 + len(SPECIALS))]
    types = [1 if i in ordinary else 3 if text in control else 4 for i, text in enumerate(tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_eos_token_id(special_id("<|im_end|>"))
    writer.add_pad_token_id(special_id("<|endoftext|>"))


def draft_tensors(tiny: Tiny, *, shared: bool, split: bool = False) -> Tensors:
    """Tensors of an MTP sidecar (C.7), its block behind the trunk's; `split`: #27739's combiner."""
    t, at = tiny.tensors, f"blk.{tiny.text['num_hidden_layers']}."
    halves = t["mtp.fc_embedding.weight"], t["mtp.fc_hidden.weight"]
    names = ["nextn.embed_proj.weight", "nextn.hidden_proj.weight"]
    combiner = (
        dict(zip(names, halves, strict=True))
        if split
        else {"nextn.eh_proj.weight": np.concatenate(halves, axis=1)}
    )
    layer = "mtp.layers.0."
    out = {
        **{at + name: values for name, values in combiner.items()},
        at + "nextn.enorm.weight": t["mtp.pre_fc_norm_embedding.weight"] + 1,
        at + "nextn.hnorm.weight": t["mtp.pre_fc_norm_hidden.weight"] + 1,
        **_gguf_hyper(t, "mtp.hyper_connection_mixer.", at + "nextn.hc_head_"),
        **_gguf_hyper(t, layer + "attn_hyper_connection.", at + "hc_attn_"),
        **_gguf_hyper(t, layer + "mlp_hyper_connection.", at + "hc_ffn_"),
        **_gguf_mlp(t, layer + "mlp.", at, False),
        **_gguf_attention(t, layer + "self_attn.", at, tiny.text),
    }
    if not shared:
        whole = gguf_tensors(tiny)
        out |= {name: whole[name] for name in ("token_embd.weight", "output.weight")}
    return out


def draft_metadata(tiny: Tiny, *, shared: bool) -> dict[str, Any]:
    """Keys of a file that has the draft head, with or without the trunk."""
    keys = gguf_metadata(tiny)
    more = {"block_count": keys["block_count"] + 1, "nextn_predict_layers": 1}
    for name, value in (("recurrent_layers", False), ("compress_ratios", 0)):
        more[f"attention.{name}"] = [*keys[f"attention.{name}"], value]
    return keys | more | ({"nextn_shared_target_tensors": True} if shared else {})


def write_mmproj(path: Path) -> Path:
    """A vision sidecar by its words; its tensors are a token of the real ones (C.8)."""
    metadata = {"projector_type": "qwen3vl_merger", "has_vision_encoder": True}
    tensors = {"v.patch_embd.bias": np.zeros(64, np.float32)}
    return write_gguf(path, metadata, tensors, arch="clip")
