"""transformers' whole qwen4_exp as the oracle for images: random towers, sidecars, pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
import transformers_oracle as text_oracle
from transformers import Qwen4ExpConfig, Qwen4ExpForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import pictures
from civetta.chat.images import PreparedImage, prepare_image

if TYPE_CHECKING:
    from pathlib import Path

    from civetta.chat.image_rules import ImageRules

IMAGE, VIDEO, START, END = 300, 301, 302, 303

VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 48,
    "num_heads": 4,
    "intermediate_size": 100,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 144,
    "hidden_act": "gelu_pytorch_tanh",
}


def random_model(
    seed: int, *, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None
) -> Qwen4ExpForConditionalGeneration:
    """A model with a tower, whose every parameter is random, norms included."""
    inner = text_oracle.text_config(**(text or {}))
    config = Qwen4ExpConfig(
        text_config=inner.to_dict(),
        vision_config={**VISION, "out_hidden_size": inner.hidden_size, **(vision or {})},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(seed)
    model = Qwen4ExpForConditionalGeneration(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.08 if value.dim() > 1 else 0.1)
    return model


def processor(**size: int) -> Qwen2VLImageProcessorPil:
    """The image processor with the values of model.md D.1."""
    bounds = {"shortest_edge": 65536, "longest_edge": 16777216, **size}
    return Qwen2VLImageProcessorPil(
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size=bounds,
    )


def save(model: Qwen4ExpForConditionalGeneration, folder: Path, *, min_pixels: int = 65536) -> Path:
    """As transformers saves it, with a preprocessor_config.json."""
    model.save_pretrained(folder)
    processor(shortest_edge=min_pixels).save_pretrained(folder)
    return folder


def prepared(width: int, height: int, seed: int, rules: ImageRules) -> PreparedImage:
    """A random picture of this size as the engine prepares it."""
    return prepare_image(pictures.encoded(pictures.noise(width, height, seed)), rules)


def patches(image: PreparedImage) -> tuple[torch.Tensor, torch.Tensor]:
    """`pixel_values` and `image_grid_thw` of an image."""
    values = torch.from_numpy(image.normalised(0, image.grid_h * image.grid_w))
    return values, torch.tensor([[1, image.grid_h, image.grid_w]])


def write_mmproj(path: Path, model: Qwen4ExpForConditionalGeneration) -> Path:
    """The model's tower as a vision sidecar (model.md C.8)."""
    c = model.config.vision_config
    weights = {
        name.removeprefix("model.visual."): value.detach().numpy()
        for name, value in model.state_dict().items()
        if name.startswith("model.visual.")
    }
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "qwen3vl_merger")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    for key, value in {
        "projection_dim": c.out_hidden_size,
        "image_size": 768,
        "patch_size": c.patch_size,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "block_count": c.depth,
        "attention.head_count": c.num_heads,
        "spatial_merge_size": c.spatial_merge_size,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    writer.add_array("clip.vision.is_deepstack_layers", [False] * c.depth)
    for name, values in _sidecar_tensors(weights).items():
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_BLOCK = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
_OUTER = {
    "patch_embed.proj": "v.patch_embd",
    "pos_embed": "v.position_embd",
    "merger.norm": "v.post_ln",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
}


def _sidecar_tensors(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for name, values in weights.items():
        stem, _, leaf = name.rpartition(".")
        if stem.startswith("blocks."):
            _, number, part = stem.split(".", 2)
            out[f"v.blk.{number}.{_BLOCK[part]}.{leaf}"] = values
        elif name == "patch_embed.proj.weight":
            out["v.patch_embd.weight"] = values[:, :, 0]
            out["v.patch_embd.weight.1"] = values[:, :, 1]
        else:
            out[f"{_OUTER[stem]}.{leaf}"] = values
    return out
