"""Where the model lies that the package carries: civetta-nano, text only in this version.

How it was made, from what, and what it can do: training/README.md.
"""

from __future__ import annotations

from pathlib import Path

from civetta.errors import CheckpointNotFound

MODEL_ID = "civetta-nano"
FOLDER = Path(__file__).with_name("nano")


def embedded_model_path() -> Path:
    """The Hugging Face folder of the embedded model; raises CheckpointNotFound without it."""
    if not (FOLDER / "model.safetensors").exists():
        raise CheckpointNotFound(
            "This installation has no embedded model; name one with -m or install civetta again."
        )
    return FOLDER
