"""The tiny model with a vision tower, as a Hugging Face folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

import tiny

if TYPE_CHECKING:
    from pathlib import Path

VISION: dict[str, Any] = {
    "model_type": "qwen4_exp_vision",
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 40,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}


def write(folder: Path, seed: int = 0, *, min_tokens: int = 4) -> Path:
    """Write the model; an image has at least `min_tokens` tokens."""
    made = tiny.make(seed)
    hidden = made.text["hidden_size"]
    config = made.config | {"vision_config": VISION | {"out_hidden_size": hidden}}
    tower = tower_tensors(config["vision_config"], seed)
    tiny.write_hf(folder, config, tiny.stored(made.tensors | tower))
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "patch_size": 16,
                "merge_size": 2,
                "temporal_patch_size": 2,
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
                "size": {"shortest_edge": min_tokens * 1024, "longest_edge": 1 << 20},
            }
        )
    )
    return folder


def tower_tensors(c: dict[str, Any], seed: int) -> tiny.Tensors:
    """Random tensors of the tower by their names in the file (model.md A.4)."""
    d, wide, merged = c["hidden_size"], c["intermediate_size"], c["hidden_size"] * 4
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (d, 3, 2, 16, 16),
        "patch_embed.proj.bias": (d,),
        "pos_embed.weight": (c["num_position_embeddings"], d),
        "merger.norm.weight": (d,),
        "merger.norm.bias": (d,),
        "merger.linear_fc1.weight": (merged, merged),
        "merger.linear_fc1.bias": (merged,),
        "merger.linear_fc2.weight": (c["out_hidden_size"], merged),
        "merger.linear_fc2.bias": (c["out_hidden_size"],),
    }
    for i in range(c["depth"]):
        for name, rows, cols in (
            ("attn.qkv", 3 * d, d),
            ("attn.proj", d, d),
            ("mlp.linear_fc1", wide, d),
            ("mlp.linear_fc2", d, wide),
        ):
            shapes[f"blocks.{i}.{name}.weight"] = (rows, cols)
            shapes[f"blocks.{i}.{name}.bias"] = (rows,)
        for name in ("norm1", "norm2"):
            shapes[f"blocks.{i}.{name}.weight"] = (d,)
            shapes[f"blocks.{i}.{name}.bias"] = (d,)
    random = np.random.default_rng(seed + 100)
    return {
        f"model.visual.{name}": random.normal(0, 0.2, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
