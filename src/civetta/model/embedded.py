"""Where the model lies that the package carries: civetta-nano, with its sidecars beside it.

What it can do, and how it was made and from what: docs/nano.md.
"""

from __future__ import annotations

from pathlib import Path

from civetta.errors import CheckpointNotFound

MODEL_ID = "civetta-nano"
FILE = Path(__file__).with_name("nano") / "civetta-nano-Q8_0.gguf"


def embedded_model_path() -> Path:
    """The GGUF file of the embedded model; draft head and vision tower lie in the same folder.

    Raises CheckpointNotFound when the installation has none.
    """
    if not FILE.exists():
        raise CheckpointNotFound(
            "This installation has no embedded model; name one with -m or install civetta again."
        )
    return FILE
