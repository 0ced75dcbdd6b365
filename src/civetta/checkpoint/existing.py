"""Whether there is anything where a file is said to be; known before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from civetta.errors import CheckpointNotFound


def existing(path: Path | str, *, of: str = "the model") -> Path:
    """The path of a file or folder that is there, `~` replaced. Raises CheckpointNotFound.

    `of` says in the error what should be there, and the flag that names it where one does.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointNotFound(f"There is nothing at {path}. Check the path of {of}.")
    return path
