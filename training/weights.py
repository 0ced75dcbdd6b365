"""Reads trained parameters: parts of a run, a Hugging Face folder, or the three GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from civetta.checkpoint.quant import quant_tensor
from civetta.checkpoint.source import open_checkpoint
from civetta.kernels.dequant.reference import dequantize
from training.gguf_names import PATCHES, draft_pieces, model_pieces, restored, vision_pieces
from training.nano_config import nano_config
from training.trainer.tower import PATCH, from_file

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

EMBEDDED = Path(__file__).parent.parent / "src" / "civetta" / "model" / "nano"


def read_parameters(folder: Path) -> dict[str, Tensor]:
    """Float32 parameters on the CPU, as they are trained; what a folder lacks is left out."""
    params: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, value in load_file(path).items():
            if value.dtype != torch.int64:
                params[name] = from_file(name, value.float())
    if params:
        return params
    config = nano_config()
    text, vision = config["text_config"], config["vision_config"]
    for path in sorted(folder.glob("*.gguf")):
        stored = read_gguf_tensors(path)
        if path.name.startswith("mmproj"):
            params |= restored(vision_pieces(vision), stored)
            both = sum(torch.from_numpy(stored[name]) for name in PATCHES)
            assert isinstance(both, torch.Tensor)
            params[PATCH] = both.flatten(1)
        elif path.name.startswith("mtp"):
            params |= restored(draft_pieces(text), stored)
        else:
            params |= restored(model_pieces(text), stored)
    return params


def read_gguf_tensors(path: Path) -> dict[str, np.ndarray]:
    """What a GGUF file holds, by name, as float32 arrays of its shapes."""
    with open_checkpoint(path) as checkpoint:
        found = {}
        for name, info in checkpoint.tensors.items():
            rows = info.rows if len(info.shape) > 1 else 1
            q = quant_tensor(checkpoint.bytes_of(name), info.format, rows, info.cols)
            found[name] = dequantize(q).view(info.shape).numpy().copy()
    return found
