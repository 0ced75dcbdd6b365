"""`Files`: the few operations on files that the disk tier needs; tests put failing ones in place.

A file appears under its final name whole or not at all: it is written under another name, made
durable, then renamed, and the folder is made durable after that.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    Chunk = bytes | memoryview


class Files:
    """Real files. Every method raises OSError as the system does."""

    def write(self, path: Path, chunks: Iterable[Chunk]) -> int:
        """Write a new file and make its contents durable; its size in bytes."""
        size = 0
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                while view:
                    written = os.write(handle, view)
                    size += written
                    view = view[written:]
            os.fsync(handle)
        finally:
            os.close(handle)
        return size

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its final name, in place of another if there is one."""
        source.replace(target)

    def sync_folder(self, folder: Path) -> None:
        """Make names in a folder durable."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """Bytes of a file; fewer than `size` at its end."""
        with path.open("rb") as file:
            file.seek(start)
            return file.read() if size is None else file.read(size)

    def remove(self, path: Path) -> None:
        """Remove a file; one that is gone already is no error."""
        path.unlink(missing_ok=True)

    def touch(self, path: Path) -> None:
        """Note that a file was used now."""
        os.utime(path)

    def sizes(self, folder: Path) -> dict[Path, tuple[int, float]]:
        """Files of a folder with size in bytes and time of last use in seconds of the epoch."""
        found = {}
        with os.scandir(folder) as listing:
            for item in listing:
                if item.is_file(follow_symlinks=False):
                    stat = item.stat(follow_symlinks=False)
                    found[Path(item.path)] = (stat.st_size, stat.st_mtime)
        return found
