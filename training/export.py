"""Writes a trained model as a Hugging Face folder: config, tokenizer, safetensors.

python -m training.export src/civetta/model/nano training/work/hf     (or the folder of a run)

Every tensor is there, `model.visual.*` and `mtp.*` too, in float32, which holds the values of the
released GGUF files exactly; transformers reads the folder, but for the draft head.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from civetta.model.config import from_hf
from training.nano_config import nano_config, preprocessor_config
from training.trainer.network import ROOT
from training.trainer.tower import to_file
from training.weights import read_parameters

if TYPE_CHECKING:
    from torch import Tensor

TOKENIZER = Path(__file__).parent / "tokenizer" / "nano"
EXACT = ("A_log", "dt_bias")
"""Tensors that stay float32."""


def export_hf(
    params: dict[str, Tensor],
    config: dict[str, Any],
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the folder that civetta, transformers and others open."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "eos_token_id": [6133, 6131],
        "pad_token_id": 6131,
        "bos_token_id": 6131,
        "do_sample": False,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    preprocessor = json.dumps(preprocessor_config(), indent=2) + "\n"
    (folder / "preprocessor_config.json").write_text(preprocessor)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    tensors = {
        name: value.detach().cpu().to(torch.float32 if name.endswith(EXACT) else dtype).contiguous()
        for name, value in to_file(params).items()
    }
    tensors |= _hash_constants(config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _hash_constants(config: dict[str, Any]) -> dict[str, Tensor]:
    ple = from_hf(config, "config.json").ple
    if ple is None:
        return {}
    at = f"{ROOT}layers.{ple.layer}.ple.ple_embedding."
    values = {
        "layer_multipliers": ple.hash.multipliers,
        "ngram_heads_vocab_sizes": ple.hash.vocab_sizes,
        "ngram_heads_offsets": ple.hash.offsets,
    }
    return {at + name: torch.tensor(v, dtype=torch.int64) for name, v in values.items()}


if __name__ == "__main__":
    export_hf(read_parameters(Path(sys.argv[1])), nano_config(), Path(sys.argv[2]), torch.float32)
