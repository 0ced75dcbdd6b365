"""The folder of the disk tier: where files lie, who may use it, what is in it at the start."""

from __future__ import annotations

import fcntl
import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from civetta.cache.disk_format import BadEntry, EntryHead, decode_head, head_bytes
from civetta.log import log_event

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from civetta.cache.disk_files import Files

_log = logging.getLogger(__name__)
FOLDER = "civetta-cache"
ENTRY, RUN = ".entry", ".run"
_NAME = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An entry on disk: its name, head, file size, and last use in seconds of the epoch."""

    key: str
    entry: EntryHead
    file_bytes: int
    used_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Paths of a cache folder."""

    root: Path

    @staticmethod
    def of(folder: Path) -> Layout:
        """The layout within the folder that a user named."""
        return Layout(root=folder / FOLDER)

    @property
    def entries(self) -> Path:
        """Folder of the states."""
        return self.root / "entries"

    @property
    def runs(self) -> Path:
        """Folder of the pages."""
        return self.root / "runs"

    @property
    def tmp(self) -> Path:
        """Folder of what is being written."""
        return self.root / "tmp"

    @property
    def lock(self) -> Path:
        """The file that says who uses the folder."""
        return self.root / "LOCK"

    def entry(self, key: str) -> Path:
        """File of a state."""
        return self.entries / f"{key}{ENTRY}"

    def run(self, digest: str) -> Path:
        """File of a run of pages."""
        return self.runs / f"{digest}{RUN}"

    def make(self) -> None:
        """Make the folders that are missing. Raises OSError."""
        for part in (self.entries, self.runs, self.tmp):
            part.mkdir(parents=True, exist_ok=True)


def claim(path: Path) -> int:
    """Hold a lock file until the returned handle is closed; OSError when another process does."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise OSError(error.errno, "another civetta uses it") from error
    return handle


def scan(files: Files, layout: Layout) -> list[Record]:
    """Every entry whose head is whole and whose runs are there; others go, with a line in the log.

    Raises OSError when the folder itself cannot be read.
    """
    runs = {path: size for path, (size, _) in files.sizes(layout.runs).items()}
    found = []
    for path, (size, used_s) in files.sizes(layout.entries).items():
        if not _is_ours(path, ENTRY):
            log_event(_log, logging.WARNING, "cache_foreign_file", file=path.name)
            continue
        try:
            entry = read_head(files, path, size)
            _require_runs(entry, runs, layout)
        except (OSError, BadEntry) as error:
            log_event(
                _log, logging.WARNING, "cache_entry_dropped",
                entry=path.stem[:16], reason=str(error),
            )  # fmt: skip
            try_remove(files, path)
        else:
            found.append(Record(key=path.stem, entry=entry, file_bytes=size, used_s=used_s))
    return found


def tidy(files: Files, layout: Layout, used: Collection[str]) -> None:
    """Remove what a crash left: half-written files, and runs that no entry uses."""
    for path in files.sizes(layout.tmp):
        try_remove(files, path)
    for path in files.sizes(layout.runs):
        if not _is_ours(path, RUN):
            log_event(_log, logging.WARNING, "cache_foreign_file", file=path.name)
        elif path.stem not in used:
            try_remove(files, path)


def read_head(files: Files, path: Path, size: int) -> EntryHead:
    """The checked head of an entry file of `size` bytes. Raises OSError or BadEntry."""
    start = files.read(path, 0, 16)
    entry = decode_head(files.read(path, 0, head_bytes(start)))
    if entry.file_bytes != size:
        raise BadEntry(f"{size} bytes where its head says {entry.file_bytes}")
    return entry


def try_remove(files: Files, path: Path) -> None:
    """Remove a file; when that fails, say so in the log and go on."""
    try:
        files.remove(path)
    except OSError as error:
        log_event(
            _log, logging.WARNING, "cache_remove_failed", file=path.name, reason=error.strerror
        )


def _require_runs(entry: EntryHead, runs: Mapping[Path, int], layout: Layout) -> None:
    for run in entry.head.runs:
        size = runs.get(layout.run(run.digest))
        if size != run.nbytes or size != run.pages * entry.head.page_bytes:
            raise BadEntry("pages that it needs are missing or cut short")


def _is_ours(path: Path, suffix: str) -> bool:
    return path.suffix == suffix and _NAME.fullmatch(path.stem) is not None
