"""The tiny model in every form a checkpoint comes in.

Each lossy form is made together with the numbers that its bytes stand for, by another decoder than
the engine's, so that a load can be held to those numbers and not only to "about right".
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType

from civetta.model.tiny import (
    MERGE,
    SPECIALS,
    special_id,
    tiny_config,
    tiny_tensors,
    tiny_vocabulary,
    to_bf16,
    write_json,
    write_safetensors,
    write_tokenizer,
)

if TYPE_CHECKING:
    from pathlib import Path

Tensors = dict[str, np.ndarray]
Stored = dict[str, tuple[str, np.ndarray]]
ROOT = "model.language_model."
TABLE = f"{ROOT}layers.1.ple.ple_embedding.ngram_embedding."


@dataclass(frozen=True)
class Tiny:
    """Config and tensors under their HF names: float32, hash constants int64."""

    config: dict[str, Any]
    tensors: Tensors

    @property
    def text(self) -> dict[str, Any]:
        return self.config["text_config"]

    def with_tensors(self, changed: Tensors) -> Tiny:
        return Tiny(self.config, self.tensors | changed)


def make(seed: int = 0, **text: Any) -> Tiny:
    """The tiny model, with other values in `text_config` where given."""
    config = tiny_config()
    config["text_config"].update(text)
    return Tiny(config, tiny_tensors(config, seed))


# Hugging Face forms


def stored(tensors: Tensors, dtype: str = "F32") -> Stored:
    """All floats as `dtype`: F32, F16 or BF16."""
    out: Stored = {}
    for name, values in tensors.items():
        if values.dtype == np.int64:
            out[name] = ("I64", values)
        elif dtype == "BF16":
            out[name] = ("BF16", to_bf16(values))
        else:
            out[name] = (dtype, values.astype({"F32": np.float32, "F16": np.float16}[dtype]))
    return out


def write_hf(folder: Path, config: dict[str, Any], tensors: Stored, shards: int = 1) -> Path:
    """A Hugging Face folder; more than one shard comes with an index."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    write_tokenizer(folder)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    names, where = list(tensors), {}
    for part in range(shards):
        file = f"model-{part + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / file, {n: tensors[n] for n in names[part::shards]})
        where |= dict.fromkeys(names[part::shards], file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    write_json(folder / "model.safetensors.index.json", index)
    return folder


def per_expert(tensors: Tensors) -> Tensors:
    """Fused expert banks as one tensor a matrix (model.md A.7)."""
    out: Tensors = {}
    for name, values in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            half = values.shape[1] // 2
            for e, both in enumerate(values):
                at = f"{name.removesuffix('gate_up_proj')}{e}."
                out[at + "gate_proj.weight"] = both[:half].copy()
                out[at + "up_proj.weight"] = both[half:].copy()
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(values):
                out[f"{name.removesuffix('down_proj')}{e}.down_proj.weight"] = down.copy()
        else:
            out[name] = values
    return out


def is_expert(name: str) -> bool:
    return re.search(r"experts\.\d+\.", name) is not None


def is_table(name: str) -> bool:
    return name.startswith(TABLE)


def fp8_release(tiny: Tiny) -> tuple[Stored, Tensors]:
    """Block-FP8 experts and an FP8 table with one scale (A.7); and the numbers this stores."""
    out, real = stored(per_expert(tiny.tensors), "BF16"), per_expert(tiny.tensors)
    for name in filter(is_expert, list(real)):
        codes, scale, real[name] = _fp8_blocks(real[name])
        out[name] = ("F8_E4M3", codes)
        out[name.removesuffix("weight") + "weight_scale_inv"] = ("BF16", to_bf16(scale))
    _fp8_table(out, real)
    return out, real


def _fp8_table(out: Stored, real: Tensors) -> None:
    peak = max(float(np.abs(real[n]).max()) for n in filter(is_table, real))
    scale = _bf16_values(np.array([peak / 448 * 1.01], np.float32))
    out[TABLE + "weight_scale"] = ("BF16", to_bf16(scale))
    for name in filter(is_table, list(real)):
        codes, real[name] = _fp8(real[name] / scale)
        real[name] = real[name] * scale
        out[name] = ("F8_E4M3", codes)


def _fp8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    f8 = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(torch.float8_e4m3fn)
    return f8.view(torch.uint8).numpy(), f8.float().numpy()


def _bf16_values(values: np.ndarray) -> np.ndarray:
    return (to_bf16(values).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _fp8_blocks(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales [ceil(rows/128), ceil(cols/128)], and the values they mean."""
    grid = np.zeros((-(-w.shape[0] // 128), -(-w.shape[1] // 128)), np.float32)
    for i, j in np.ndindex(grid.shape):
        block = w[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        grid[i, j] = np.abs(block).max() / 448 * 1.01
    grid = _bf16_values(grid)
    wide = grid.repeat(128, 0).repeat(128, 1)[: w.shape[0], : w.shape[1]]
    codes, values = _fp8(w / wide)
    return codes, grid, values * wide


def nvfp4_release(tiny: Tiny) -> tuple[Stored, Tensors]:
    """NVFP4 experts with all companions, FP8 table (A.8); and the numbers this stores."""
    out, real = stored(per_expert(tiny.tensors), "BF16"), per_expert(tiny.tensors)
    for name in filter(is_expert, list(real)):
        codes, scales, scale_2, real[name] = _nvfp4(real[name])
        at = name.removesuffix("weight")
        out[name] = ("U8", codes)
        out[at + "weight_scale"] = ("F8_E4M3", scales)
        out[at + "weight_scale_2"] = ("F32", scale_2)
        out[at + "input_scale"] = ("F32", np.float32(0.01).reshape(()))
    _fp8_table(out, real)
    return out, real


def nvfp4_table(tiny: Tiny) -> tuple[Stored, Tensors]:
    """Table rows of codes then scales, one global scale (A.8); the rest BF16."""
    out, real = stored(tiny.tensors, "BF16"), dict(tiny.tensors)
    names = [name for name in real if is_table(name)]
    codes, scales, scale_2, values = _nvfp4(np.concatenate([real[n] for n in names]))
    rows = len(real[names[0]])
    out[TABLE + "weight_scale_2"] = ("F32", scale_2)
    for i, name in enumerate(names):
        part = slice(i * rows, (i + 1) * rows)
        out[name] = ("U8", np.concatenate([codes[part], scales[part]], axis=1))
        real[name] = values[part]
    return out, real


def _nvfp4(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes [rows, cols/2] (low nibble first), e4m3 scales [rows, cols/16], scale_2, values."""
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    scale_2 = np.float32(np.abs(w).max() / (6 * 448))
    groups = w.reshape(w.shape[0], -1, 16)
    scale_codes, scales = _fp8(np.maximum(np.abs(groups).max(-1) / 6 / scale_2, 2**-6))
    unit = groups / (scales[..., None] * scale_2)
    nearest = np.abs(np.abs(unit)[..., None] - levels).argmin(-1)
    values = np.sign(unit) * levels[nearest] * scales[..., None] * scale_2
    nibbles = (nearest + 8 * (unit < 0)).astype(np.uint8).reshape(w.shape)
    codes = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    return codes, scale_codes, scale_2.reshape(()), values.reshape(w.shape).astype(np.float32)


def fused(real: Tensors) -> Tensors:
    """The inverse of `per_expert`."""
    out = {name: values for name, values in real.items() if not is_expert(name)}
    banks: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    for name in filter(is_expert, real):
        at, e, part = re.fullmatch(r"(.+experts\.)(\d+)\.(\w+)_proj\.weight", name).groups()
        banks.setdefault(at, {}).setdefault(int(e), {})[part] = real[name]
    for at, experts in banks.items():
        each = [experts[e] for e in range(len(experts))]
        out[at + "gate_up_proj"] = np.stack([np.concatenate([x["gate"], x["up"]]) for x in each])
        out[at + "down_proj"] = np.stack([x["down"] for x in each])
    return out


def text_only(tiny: Tiny) -> tuple[dict[str, Any], Tensors]:
    """transformers' text-only form: `model.` and the flat config, with its word for attention."""
    config = copy.deepcopy(tiny.text)
    words = {"full_attention": "indexed_attention"}
    config["layer_types"] = [words.get(word, word) for word in config["layer_types"]]
    return config, {n.replace(ROOT, "model."): v for n, v in tiny.tensors.items()}


# GGUF


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


def draft_tensors(tiny: Tiny, *, shared: bool) -> Tensors:
    """Tensors of an MTP sidecar (C.7): the full-attention layer again, at the block behind it."""
    layers, hidden = tiny.text["num_hidden_layers"], tiny.text["hidden_size"]
    whole = gguf_tensors(tiny)
    last, at = f"blk.{layers - 1}.", f"blk.{layers}."
    out = {at + n.removeprefix(last): v for n, v in whole.items() if n.startswith(last)}
    wide = tiny.text["hc_count"] * hidden
    out |= {
        at + "nextn.eh_proj.weight": np.zeros((hidden, 2 * hidden), np.float32),
        at + "nextn.enorm.weight": np.ones(hidden, np.float32),
        at + "nextn.hnorm.weight": np.ones(wide, np.float32),
        at + "nextn.hc_head_norm.weight": whole["output_hc_norm.weight"],
        at + "nextn.hc_head_down.weight": whole["output_hc_down.weight"],
        at + "nextn.hc_head_up.weight": whole["output_hc_up.weight"],
    }
    if not shared:
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
