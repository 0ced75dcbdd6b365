"""Readers of table rows: what they share, and the choice of one.

`uring` keeps a deep queue of reads in flight from one thread; `pool` has up to 128 blocking
threads, for kernels that do not allow io_uring; `python` does the same without the compiled module.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from civetta.errors import UsageError
from civetta.log import log_event

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from civetta.ngram.layout import Pieces

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
