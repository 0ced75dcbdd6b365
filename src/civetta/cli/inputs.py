"""Texts that commands read from files and from stdin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.errors import UsageError

if TYPE_CHECKING:
    from typing import BinaryIO

MAX_TEXT_BYTES = 64 << 20
"""Far more than a context holds; a device or a wrong file is not read for ever."""


def read_text(file: BinaryIO, name: str) -> str:
    """All of an open file as text. Raises UsageError when it is too long or not UTF-8."""
    raw = file.read(MAX_TEXT_BYTES + 1)
    if len(raw) > MAX_TEXT_BYTES:
        raise UsageError(f"{name} has more than {MAX_TEXT_BYTES} bytes; give a shorter text.")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text ({error.reason}); convert it.") from error
