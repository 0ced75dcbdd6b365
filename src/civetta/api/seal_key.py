"""The key of sealed thoughts that a folder of responses brings: random, kept, for its owner alone."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from civetta.errors import StoreUnusable

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "thoughts.key"
KEY_BYTES = 32


def kept_key(folder: Path) -> bytes:
    """The key in `folder`; made when there is none, by one of several servers that start at once.

    Raises StoreUnusable when it cannot be made or read, or is no key.
    """
    path = folder / FILE_NAME
    try:
        if not path.exists():
            _make(path)
        key = path.read_bytes()
    except OSError as error:
        raise StoreUnusable(
            f"The key of thoughts in {path} cannot be kept ({error.strerror}): give another --store."
        ) from error
    if len(key) != KEY_BYTES:
        raise StoreUnusable(
            f"{path} has {len(key)} bytes and is no key of thoughts, which has {KEY_BYTES}: delete"
            " it, and a new one is made."
        )
    return key


def _make(path: Path) -> None:
    """Put a new key there whole, unless somebody else has in the meantime."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(secrets.token_bytes(KEY_BYTES))
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()
