"""Readers of table rows: what they share, the files they read, and the choice of one.

`uring` keeps a deep queue of reads in flight from one thread; `pool` has up to 128 blocking
threads, for kernels that do not allow io_uring; `python` does the same without the compiled module.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from civetta.errors import CheckpointMalformed, ReadFailed, UsageError
from civetta.log import log_event

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from civetta.ngram.layout import Pieces, TableLayout

KINDS = ("uring", "pool", "python")
DEPTHS = {"uring": 128, "pool": 128, "python": 32}
"""Reads in flight at most. docs/measurements/ngram-store.md has the figures behind them."""
PAGE_BYTES = 4096
END_OF_FILE = -1
READER_ENDED = -2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What reads [after, after + count) from now on suffer, for tests.

    error is an errno, short_bytes the most that a read answers (-1: all), die ends the thread.
    """

    error: int = 0
    short_bytes: int = -1
    delay_us: int = 0
    die: bool = False
    after: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a gather failed: an errno, END_OF_FILE or READER_ENDED, and where."""

    code: int
    file: int
    offset: int


class ReadJob(Protocol):
    """A gather on its way; it owns its memory."""

    @property
    def state(self) -> str:
        """One of running, done, failed, cancelled."""
        ...

    @property
    def left(self) -> int:
        """Reads that are not done."""
        ...

    @property
    def failure(self) -> Failure:
        """Why it failed."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Whether it was over in time."""
        ...

    def cancel(self) -> None:
        """Give it up; any thread may. Reads in flight finish into memory that nobody sees."""
        ...

    def data(self) -> NDArray[np.uint8]:
        """The bytes of a job that is done, [out_bytes]."""
        ...


class Reader(Protocol):
    """Reads pieces of open files. Gathers are served in the order they come."""

    kind: str

    def submit(self, pieces: Pieces, out_bytes: int) -> ReadJob:
        """Start to read; never waits for the disk."""
        ...

    def inject(self, fault: Fault) -> None:
        """Make coming reads fail."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Counters: threads, wakes, reads, bytes, retries, died."""
        ...

    def close(self) -> None:
        """End its threads; what is on its way fails. Idempotent."""
        ...


class TableFiles:
    """The files of a table, open for reading past the page cache where the filesystem allows it."""

    def __init__(self, layout: TableLayout, *, direct: bool = True) -> None:
        self.paths = layout.paths
        self.direct = direct
        self.fds: list[int] = []
        try:
            for path in self.paths:
                self._open(path)
        except BaseException:
            self.close()
            raise
        self._seen = [_version(fd) for fd in self.fds]
        try:
            self._check_sizes(layout)
        except CheckpointMalformed:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        flags = os.O_RDONLY
        if self.direct:
            fd = _open_direct(path)
            if fd is not None:
                self.fds.append(fd)
                return
            self.direct = False
            log_event(_log, logging.WARNING, "ngram_direct_io_refused", path=path, reads="buffered")
        try:
            self.fds.append(os.open(path, flags))
        except OSError as error:
            raise ReadFailed(f"Cannot open {path}: {error.strerror}. Check the path.") from error

    def _check_sizes(self, layout: TableLayout) -> None:
        sizes = {path: size for path, (size, _) in zip(self.paths, self._seen, strict=True)}
        for field in layout.fields:
            for shard in field.shards:
                if shard.offset + shard.rows * field.row_bytes > sizes[shard.path]:
                    raise CheckpointMalformed(
                        f"{shard.path} ends before the n-gram table does; it is truncated,"
                        " download it again."
                    )

    def verify(self) -> None:
        """Raise ReadFailed when a file was written to or cut since it was opened.

        A file that was replaced by another of the same name is still the old one here.
        """
        fds = tuple(self.fds)
        if len(fds) != len(self.paths):
            raise ReadFailed("The n-gram table was closed while rows were read; start again.")
        for path, fd, seen in zip(self.paths, fds, self._seen, strict=True):
            if _version(fd) != seen:
                raise ReadFailed(
                    f"{path} was changed while it was in use, so rows of the n-gram table cannot be"
                    " trusted. Put the model's file back and restart."
                )

    def error(self, failure: Failure) -> ReadFailed:
        """The error of a failed read, with the file, the place and what to do."""
        where = f"{self.paths[failure.file]} at byte {failure.offset}"
        if failure.code == END_OF_FILE:
            return ReadFailed(
                f"Reading the n-gram table failed: the file ended too early, {where}. It was"
                " truncated while in use; put the model's file back and restart."
            )
        if failure.code == READER_ENDED:
            return ReadFailed(
                f"Reading the n-gram table failed: a reader thread ended, {where}. Send the request"
                " again."
            )
        return ReadFailed(
            f"Reading the n-gram table failed: {os.strerror(failure.code)}, {where}. Check the disk"
            " and send the request again."
        )

    def close(self) -> None:
        """Close all files; idempotent."""
        while self.fds:
            os.close(self.fds.pop())


def open_reader(
    fds: Sequence[int], *, largest_bytes: int, kind: str = "auto", depth: int = 0
) -> Reader:
    """A reader over open files; `auto` takes the best that this machine allows and logs it.

    largest_bytes is the size of the largest piece, depth (0: the kind's own) the reads in flight.
    Raises UsageError when a kind that was asked for is not to be had.
    """
    chosen = kind if kind != "auto" else _best()
    refusal = _refusal(chosen)
    if refusal:
        raise UsageError(f"--ngram-reader {kind} is not possible here: {refusal}; use auto.")
    depth = depth or DEPTHS[chosen]
    log_event(_log, logging.DEBUG, "ngram_reader", kind=chosen, depth=depth)
    if chosen == "python":
        from civetta.ngram.thread_reader import ThreadReader

        return ThreadReader(fds, threads=depth, largest_bytes=largest_bytes)
    from civetta.ngram.native_reader import NativeReader

    return NativeReader(chosen, fds, depth=depth, largest_bytes=largest_bytes)


def available_kinds() -> tuple[str, ...]:
    """The kinds that this machine allows, best first."""
    return tuple(kind for kind in KINDS if not _refusal(kind))


def _best() -> str:
    return available_kinds()[0]


def _refusal(kind: str) -> str:
    """Why a kind is not to be had, or nothing."""
    if kind == "python":
        return ""
    try:
        from civetta.ngram import _reader
    except ImportError:
        return "the compiled reader is missing"
    if kind == "uring" and not _reader.uring_allowed():
        return "the kernel does not allow io_uring"
    return ""


def _open_direct(path: Path) -> int | None:
    """A descriptor whose reads go past the page cache; None when the filesystem refuses that."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | flag)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise ReadFailed(f"Cannot open {path}: {error.strerror}. Check the path.") from error
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(fd, [page], 0)
    except OSError:
        os.close(fd)
        return None
    return fd


def _version(fd: int) -> tuple[int, int]:
    state = os.fstat(fd)
    return state.st_size, state.st_mtime_ns
