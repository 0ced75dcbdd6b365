"""`--trace FILE`: one JSON line for each event of a request; times and counts, never text."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

import msgspec

from civetta.errors import UsageError
from civetta.log import log_event

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger("civetta.api")


class Trace:
    """Appends to one file, readable by its owner alone. A full disk ends it, never a request."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; raises UsageError when that cannot be done."""
        self._path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        try:
            self._file: int | None = os.open(path, flags, 0o600)
        except OSError as error:
            raise UsageError(
                f"Cannot write the file of --trace, {path}: {error.strerror}. Give another path."
            ) from error

    def write(self, request_id: str, event: str, **fields: object) -> None:
        """Append one line; fields that are None are left out."""
        if self._file is None:
            return
        line = {"time": round(time.time(), 6), "id": request_id, "event": event}
        line |= {name: value for name, value in fields.items() if value is not None}
        data = msgspec.json.encode(line) + b"\n"
        try:
            written = os.write(self._file, data)
            if written < len(data):  # no half lines: what follows could not be read
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise OSError("no space is left")  # noqa: TRY301
        except OSError as error:
            log_event(_log, logging.ERROR, "trace_ended", file=self._path, reason=error)
            self.close()

    def close(self) -> None:
        """Write nothing more; idempotent."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
