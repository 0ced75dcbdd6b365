"""The tiny model in every form a Hugging Face checkpoint comes in; tiny_gguf.py has the others.

Each lossy form is made together with the numbers that its bytes stand for, by another decoder than
the engine's, so that a load can be held to those numbers and not only to "about right".
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from civetta.model.tiny import (
    tiny_config,
    tiny_tensors,
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
