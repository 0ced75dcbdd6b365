"""Whether there is a model at all where one is said to be; known before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from civetta.errors import CheckpointNotFound


def existing(path: Path | str) -> Path:
    """The path of a file or folder that is there, `~` replaced. Raises CheckpointNotFound."""
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointNotFound(f"There is nothing at {path}. Check the path of the model.")
    return path
