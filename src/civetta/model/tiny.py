"""A small random model in the Hugging Face form: what runs when no model is named, and in tests.

It has every part of the real one (GDN, sparse attention, experts, streams, n-gram table, draft
head) at sizes that load in an instant. Its text is noise.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from civetta.chat.vocabulary import byte_alphabet
from civetta.config import read_cache_folder
from civetta.errors import CheckpointNotFound
from civetta.ngram.hash import make_hash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)
_SHOWN = frozenset(SPECIALS[7:])  # what replies are read by; text, not structure
MERGE = ("h", "e")  # one, because a GGUF writer leaves an empty list out
_FIRST_SPECIAL = 256
_FOLDER = "tiny-2"  # the number grows whenever what is written changes


def special_id(text: str) -> int:
    """Id of a special token in the tiny vocabulary: 256 bytes, then SPECIALS."""
    return _FIRST_SPECIAL + SPECIALS.index(text)


def tiny_vocabulary() -> dict[str, int]:
    """Ordinary tokens in byte-level spelling: the bytes by value, and behind SPECIALS the merge."""
    return byte_alphabet() | {"".join(MERGE): _FIRST_SPECIAL + len(SPECIALS)}


def tiny_config() -> dict[str, Any]:
    """config.json in its full form (model.md A.2)."""
    text = {
        "model_type": "qwen4_exp_text",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 288,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": special_id("<|endoftext|>"),
        "eos_token_id": special_id("<|endoftext|>"),
        "pad_token_id": None,
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "output_gate_type": "sigmoid",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "hc_count": 4,
        "hc_lowrank": 16,
        "ple_layer_ids": [2],
        "ple_embed_dim": 128,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 61,
        "make_ngram_vocab_size_divisible_by": 96,
        "split_ngram_parts": 12,
        "mtp_num_hidden_layers": 1,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
    }
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "image_token_id": special_id("<|image_pad|>"),
        "video_token_id": special_id("<|video_pad|>"),
        "vision_start_token_id": special_id("<|vision_start|>"),
        "vision_end_token_id": special_id("<|vision_end|>"),
        "tie_word_embeddings": False,
        "text_config": text,
    }


def tiny_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, NDArray[Any]]:
    """Random tensors by their names in the file (model.md A.3) for any `config` of the full form.

    float32, each value exact in bfloat16; the constants of the hash int64.
    """
    random = np.random.default_rng(seed)
    text: Mapping[str, Any] = config["text_config"]
    root = "model.language_model."
    hidden, wide = text["hidden_size"], text["hc_count"] * text["hidden_size"]
    rank = text["hc_lowrank"]
    shapes: dict[str, tuple[int, ...]] = {
        root + "embed_tokens.weight": (text["vocab_size"], hidden),
        "lm_head.weight": (text["vocab_size"], hidden),
        root + "hyper_connection_mixer.hc_norm.weight": (wide,),
        root + "hyper_connection_mixer.input_mix_weight_down.weight": (rank, wide),
        root + "hyper_connection_mixer.input_mix_weight_up.weight": (wide, rank),
    }
    for layer, kind in enumerate(text["layer_types"]):
        at = f"{root}layers.{layer}."
        shapes |= _stream_shapes(at, text) | _mlp_shapes(at + "mlp.", text)
        if kind == "linear_attention":
            shapes |= _gdn_shapes(at + "linear_attn.", text)
        else:
            shapes |= _attention_shapes(at + "self_attn.", text)
    tensors: dict[str, NDArray[Any]] = {n: _draw(n, s, random) for n, s in shapes.items()}
    for one_based in text["ple_layer_ids"]:
        tensors |= _ple_tensors(f"{root}layers.{one_based - 1}.ple.", text, random)
    if text.get("mtp_num_hidden_layers"):
        tensors |= {n: _draw(n, s, random) for n, s in _head_shapes(text).items()}
    return tensors


def _head_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The draft head (model.md A.4)."""
    hidden, wide, rank = (
        text["hidden_size"],
        text["hc_count"] * text["hidden_size"],
        text["hc_lowrank"],
    )
    at, mixer = "mtp.layers.0.", "mtp.hyper_connection_mixer."
    return {
        "mtp.fc_embedding.weight": (hidden, hidden),
        "mtp.fc_hidden.weight": (hidden, hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (wide,),
        mixer + "hc_norm.weight": (wide,),
        mixer + "input_mix_weight_down.weight": (rank, wide),
        mixer + "input_mix_weight_up.weight": (wide, rank),
        **_stream_shapes(at, text),
        **_attention_shapes(at + "self_attn.", text),
        **_mlp_shapes(at + "mlp.", text),
    }


def _stream_shapes(at: str, text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    streams, rank = text["hc_count"], text["hc_lowrank"]
    wide = streams * text["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for part in ("attn", "mlp"):
        name = f"{at}{part}_hyper_connection."
        shapes[name + "hc_norm.weight"] = (wide,)
        shapes[name + "input_mix_weight_down.weight"] = (rank, wide)
        shapes[name + "input_mix_weight_up.weight"] = (wide, rank)
        shapes[name + "block_inject_weight.weight"] = (streams, wide)
    return shapes


def _mlp_shapes(at: str, text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, experts = text["hidden_size"], text["num_experts"]
    width, shared = text["moe_intermediate_size"], text["shared_expert_intermediate_size"]
    return {
        at + "gate.weight": (experts, hidden),
        at + "experts.gate_up_proj": (experts, 2 * width, hidden),
        at + "experts.down_proj": (experts, hidden, width),
        at + "shared_expert.gate_proj.weight": (shared, hidden),
        at + "shared_expert.up_proj.weight": (shared, hidden),
        at + "shared_expert.down_proj.weight": (hidden, shared),
        at + "shared_expert_gate.weight": (1, hidden),
    }


def _gdn_shapes(at: str, text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, dim = text["hidden_size"], text["linear_key_head_dim"]
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    channels = (2 * keys + values) * dim
    return {
        at + "in_proj_qkv.weight": (channels, hidden),
        at + "in_proj_z.weight": (values * dim, hidden),
        at + "in_proj_a.weight": (values, hidden),
        at + "in_proj_b.weight": (values, hidden),
        at + "conv1d.weight": (channels, 1, text["linear_conv_kernel_dim"]),
        at + "A_log": (values,),
        at + "dt_bias": (values,),
        at + "norm.weight": (dim,),
        at + "out_proj.weight": (hidden, values * dim),
    }


def _attention_shapes(at: str, text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, dim, index = text["hidden_size"], text["head_dim"], text["indexer_head_dim"]
    heads, kv = text["num_attention_heads"], text["num_key_value_heads"]
    return {
        at + "q_proj.weight": (2 * heads * dim, hidden),
        at + "k_proj.weight": (kv * dim, hidden),
        at + "v_proj.weight": (kv * dim, hidden),
        at + "o_proj.weight": (hidden, heads * dim),
        at + "q_norm.weight": (dim,),
        at + "k_norm.weight": (dim,),
        at + "indexer.index_qk_proj.weight": ((text["indexer_n_heads"] + 1) * index, hidden),
        at + "indexer.q_layernorm.weight": (index,),
        at + "indexer.k_layernorm.weight": (index,),
    }


def _ple_tensors(
    at: str, text: Mapping[str, Any], random: np.random.Generator
) -> dict[str, NDArray[Any]]:
    embed, wide = text["ple_embed_dim"], text["hc_count"] * text["hidden_size"]
    table = make_hash(
        vocab=text["vocab_size"],
        size=text["ngram_size"],
        heads_per_ngram=text["heads_per_ngram"],
        base=text["ngram_vocab_size_base"],
        seed=text.get("seed", 1234),
        eos_token_id=text["eos_token_id"],
        divisor=text["make_ngram_vocab_size_divisible_by"],
    )
    parts = text["split_ngram_parts"]
    shapes: dict[str, tuple[int, ...]] = {
        at + "key_proj.weight": (wide, embed),
        at + "value_proj.weight": (text["hidden_size"], embed),
        at + "norm_key.weight": (wide,),
        at + "norm_query.weight": (wide,),
        at + "norm_conv.weight": (wide,),
        at + "conv1d.weight": (wide, 1, text["ple_conv_kernel_size"]),
    }
    for part in range(parts):
        name = f"{at}ple_embedding.ngram_embedding.shard_{part}.weight"
        shapes[name] = (table.rows // parts, embed // table.heads)
    tensors: dict[str, NDArray[Any]] = {n: _draw(n, s, random) for n, s in shapes.items()}
    constants = {
        "layer_multipliers": table.multipliers,
        "ngram_heads_vocab_sizes": table.vocab_sizes,
        "ngram_heads_offsets": table.offsets,
    }
    for name, values in constants.items():
        tensors[f"{at}ple_embedding.{name}"] = np.array(values, np.int64)
    return tensors


def _draw(name: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    """Values at the scale that keeps activations near one."""
    if name.endswith("A_log"):
        values = np.log(random.uniform(0.5, 4.0, shape))
    elif name.endswith("linear_attn.norm.weight"):
        values = random.normal(1.0, 0.1, shape)
    elif len(shape) == 1:
        values = random.normal(0.0, 0.1, shape)
    elif "embed" in name and ".fc_" not in name:
        values = random.normal(0.0, 1.0, shape)
    else:
        values = random.normal(0.0, 1.0, shape) / np.sqrt(shape[-1])
    bits = to_bf16(values.astype(np.float32)).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 rounded to the bits of bfloat16, half to even; finite values only."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> None:
    """Write one file: tensor name to (dtype word, array whose bytes are the data).

    The shape written is the array's. Entries lie in the order given, without holes.
    """
    header: dict[str, object] = {}
    position = 0
    for name, (dtype, array) in tensors.items():
        end = position + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of one merge, and generation_config.json (model.md A.2, A.9)."""
    added = [
        {
            "id": special_id(text),
            "content": text,
            "special": text not in _SHOWN,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for text in SPECIALS
    ]
    model = {"type": "BPE", "vocab": tiny_vocabulary(), "merges": [list(MERGE)]}
    end, stop = special_id("<|endoftext|>"), special_id("<|im_end|>")
    documents: dict[str, object] = {
        "tokenizer.json": {"version": "1.0", "added_tokens": added, "model": model},
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        },
        "generation_config.json": {
            "bos_token_id": end,
            "pad_token_id": end,
            "eos_token_id": [stop, end],
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 20,
            "top_p": 0.95,
        },
    }
    for name, document in documents.items():
        write_json(folder / name, document)


def write_json(path: Path, document: object) -> None:
    """One JSON file."""
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")


def write_tiny(folder: Path, seed: int = 0) -> Path:
    """Write a complete tiny model into `folder`, made if absent; the same bytes for one seed."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config()
    stored: dict[str, tuple[str, NDArray[Any]]] = {}
    for name, values in tiny_tensors(config, seed).items():
        whole = values.dtype == np.int64
        stored[name] = ("I64", values) if whole else ("BF16", to_bf16(values))
    write_safetensors(folder / "model.safetensors", stored)
    write_json(folder / "config.json", config)
    write_tokenizer(folder)
    return folder


def default_model_path(cache: Path | None = None) -> Path:
    """Folder of the model that runs when none is named; written under `cache` on first use.

    `cache` None is the user's own cache folder. Processes that start at once may all write it:
    each writes its own copy and the first rename wins. Raises CheckpointNotFound when the folder
    cannot be written.
    """
    parent = (read_cache_folder() if cache is None else cache) / "civetta"
    folder = parent / _FOLDER
    if folder.is_dir():
        return folder
    try:
        parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}-", dir=parent))
        _write_and_rename(fresh, folder)
    except OSError as error:
        raise CheckpointNotFound(
            f"The built-in model cannot be written to {parent}: {error.strerror or error}. Name a"
            " model with -m, or set XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return folder


def _write_and_rename(fresh: Path, folder: Path) -> None:
    try:
        write_tiny(fresh)
        os.replace(fresh, folder)  # noqa: PTH105  # refuses a folder with files in it
    except OSError:
        if not folder.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
