"""Writes the trained model as three GGUF files: text model, draft head (MTP), vision tower (mmproj).

python -m training.export_gguf training/work/count src/civetta/model/nano --draft training/work/draft
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType

from civetta.model.config import from_hf
from training.gguf_names import (
    draft_pieces,
    model_pieces,
    stored_patches,
    stored_tensors,
    vision_pieces,
)
from training.nano_config import nano_config, preprocessor_config
from training.trainer.draft import DRAFT
from training.weights import read_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

TOKENIZER = Path(__file__).parent / "tokenizer" / "nano" / "tokenizer.json"
NAMES = ("civetta-nano-Q8_0.gguf", "mtp-civetta-nano-Q8_0.gguf", "mmproj-civetta-nano-BF16.gguf")
EXACT = re.compile(
    r"norm|gate_inp|inject|ssm_(alpha|beta|a$|dt|conv)|ple_conv1d|bias|\.ln|post_ln|_embd\.weight\.?1?$"
)
"""Kept in float32: small, and rounding them is felt (model.md F.6)."""

HALF = re.compile(r"indexer\.[qk]_proj|per_layer_token_embd|^v\.|^mm\.")
"""BF16: the indexer as in the published files; the table, whose rows of 16 values fit no block."""

Q8_BLOCK = 32


def stored_type(name: str, value: np.ndarray) -> Type:
    """The type in which a tensor is stored."""
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return Type.Q8_0 if name.startswith("token") else Type.BF16
    if value.ndim < 2 or EXACT.search(name):
        return Type.F32
    return Type.BF16 if HALF.search(name) or value.shape[-1] % Q8_BLOCK else Type.Q8_0


def export_gguf(params: Mapping[str, Tensor], config: dict[str, Any], folder: Path) -> list[Path]:
    """Write the three files; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    text, vision = config["text_config"], config["vision_config"]
    paths = [folder / name for name in NAMES]
    keys = text_keys(config)
    model = _writer(paths[0], "qwen4exp", "civetta-nano", keys)
    _tokenizer(model, text)
    _finish(model, stored_tensors(model_pieces(text), params))
    draft = _writer(paths[1], "qwen4exp", "civetta-nano draft head", keys | draft_keys(config))
    _finish(draft, stored_tensors(draft_pieces(text), params))
    seen = stored_tensors(vision_pieces(vision), params) | stored_patches(params)
    _finish(_writer(paths[2], "clip", "civetta-nano vision tower", vision_keys(vision)), seen)
    return paths


def text_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Metadata of the text model (model.md C.1), without the prefix."""
    text, rope = config["text_config"], config["text_config"]["rope_parameters"]
    ple = from_hf(config, "config.json").ple
    assert ple is not None
    full = [kind == "full_attention" for kind in text["layer_types"]]
    ratio = text["indexer_compress_ratio"]
    u64 = np.uint64
    return {
        "block_count": text["num_hidden_layers"],
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.key_length": text["head_dim"],
        "attention.value_length": text["head_dim"],
        "attention.layer_norm_rms_epsilon": text["rms_norm_eps"],
        "rope.dimension_sections": [*rope["mrope_section"], 0],
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(text["head_dim"] * rope["partial_rotary_factor"]),
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
        "attention.compress_ratios": [ratio if x else 0 for x in full],
        "ple.layers": [i - 1 for i in text["ple_layer_ids"]],
        "ple.ngram_size": text["ngram_size"],
        "ple.heads_per_ngram": text["heads_per_ngram"],
        "ple.conv_kernel": text["ple_conv_kernel_size"],
        "ple.eos_token_id": text["eos_token_id"],
        "ple.image_token_id": config["image_token_id"],
        "embedding_length_per_layer_input": ple.row_values,
        "ple.layer_multipliers": np.asarray(ple.hash.multipliers, u64),
        "ple.head_offsets": np.asarray(ple.hash.offsets, u64),
        "ple.head_vocab_sizes": np.asarray(ple.hash.vocab_sizes, u64),
    }


def draft_keys(config: dict[str, Any]) -> dict[str, Any]:
    """What differs in the draft head's file (model.md C.7): a block more, the trunk's embeddings."""
    keys = text_keys(config)
    return {
        "block_count": keys["block_count"] + 1,
        "nextn_predict_layers": 1,
        "nextn_shared_target_tensors": True,
        "attention.recurrent_layers": [*keys["attention.recurrent_layers"], False],
        "attention.compress_ratios": [
            *keys["attention.compress_ratios"],
            config["text_config"]["indexer_compress_ratio"],
        ],
    }


def vision_keys(vision: dict[str, Any]) -> dict[str, Any]:
    """Metadata of the tower (model.md C.8), without the prefix; pixel limits as llama.cpp has them."""
    prepared = preprocessor_config()
    return {
        "projector_type": "qwen3vl_merger",
        "has_vision_encoder": True,
        "use_gelu": True,
        "vision.projection_dim": vision["out_hidden_size"],
        "vision.image_size": vision["patch_size"] * round(vision["num_position_embeddings"] ** 0.5),
        "vision.patch_size": vision["patch_size"],
        "vision.embedding_length": vision["hidden_size"],
        "vision.feed_forward_length": vision["intermediate_size"],
        "vision.block_count": vision["depth"],
        "vision.attention.head_count": vision["num_heads"],
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.image_mean": prepared["image_mean"],
        "vision.image_std": prepared["image_std"],
        "vision.spatial_merge_size": vision["spatial_merge_size"],
        "vision.is_deepstack_layers": [False] * vision["depth"],
        "vision.image_min_pixels": prepared["size"]["shortest_edge"],
        "vision.image_max_pixels": prepared["size"]["longest_edge"],
    }


def _writer(path: Path, arch: str, name: str, keys: Mapping[str, Any]) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(name)
    writer.add_license("apache-2.0")
    for key, value in keys.items():
        _key(writer, f"{arch}.{key}", value)
    return writer


def _key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        values = [int(x) for x in value]
        writer.add_key_value(key, values, GGUFValueType.ARRAY, GGUFValueType.UINT64)
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


def _tokenizer(writer: gguf.GGUFWriter, text: Mapping[str, Any]) -> None:
    parsed = json.loads(TOKENIZER.read_text())
    names = {index: token for token, index in parsed["model"]["vocab"].items()}
    kinds = dict.fromkeys(names, gguf.TokenType.NORMAL)
    for added in parsed["added_tokens"]:
        names[added["id"]] = added["content"]
        special = added["special"]
        kinds[added["id"]] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
    count = text["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([names[i] for i in range(count)])
    writer.add_token_types([kinds[i] for i in range(count)])
    writer.add_token_merges([" ".join(pair) for pair in parsed["model"]["merges"]])
    ids = {token: index for index, token in names.items()}
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_pad_token_id(ids["<|endoftext|>"])
    writer.add_add_bos_token(False)


def _finish(writer: gguf.GGUFWriter, tensors: Mapping[str, np.ndarray]) -> None:
    for name, values in tensors.items():
        kind = stored_type(name, values)
        plain = np.ascontiguousarray(values, np.float32)
        raw = plain if kind == Type.F32 else gguf.quants.quantize(plain, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write the files; the draft head may come from a folder of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path, help="folder of a run or of GGUF files")
    parser.add_argument("out", type=Path)
    parser.add_argument("--draft", type=Path, help="folder whose draft head is taken")
    a = parser.parse_args()
    params = read_parameters(a.weights)
    if a.draft is not None:
        found = read_parameters(a.draft)
        params |= {name: value for name, value in found.items() if name.startswith(DRAFT)}
    for written in export_gguf(params, nano_config(), a.out):
        sys.stdout.write(f"{written} {written.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
