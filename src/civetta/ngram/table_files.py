"""`TableFiles`: the files of a table, open, and whether they are still what they were.

Rows are only right while the bytes are those that were there at the start. A file whose time of
change moved is looked at: when the kernel saw no write to it (write_watch.py), and its size and
samples spread over it are the same, it was merely touched, and what was read meanwhile is read
again. Everything else fails, until a restart.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING

from civetta.errors import CheckpointMalformed, ReadFailed
from civetta.log import log_event
from civetta.ngram.reader import END_OF_FILE, PAGE_BYTES, READER_ENDED
from civetta.ngram.write_watch import WriteWatch

if TYPE_CHECKING:
    from pathlib import Path

    from civetta.ngram.layout import TableLayout
    from civetta.ngram.reader import Failure

LOOK_S = 1.0
"""How often the paths are looked at; the open files are at every gather that reads."""
SAMPLES = 64
"""Pages of each file that are compared when it was touched."""

_log = logging.getLogger(__name__)


class TableFiles:
    """The files of a table, open for reading past the page cache where the filesystem allows it."""

    def __init__(self, layout: TableLayout, *, direct: bool = True) -> None:
        self.paths = layout.paths
        self.direct = direct
        self.fds: list[int] = []
        self._lock = threading.Lock()
        self._touches = 0
        self._gone: set[int] = set()  # files whose path no longer leads to them
        self._looked_s = -LOOK_S
        self._watch: WriteWatch | None = None
        try:
            for path in self.paths:
                self._open(path)
        except BaseException:
            self.close()
            raise
        self._watch = WriteWatch(self.fds)
        self._seen = [_version(fd) for fd in self.fds]
        self._samples = [_sample(fd) for fd in self.fds]
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

    @property
    def touches(self) -> int:
        """How often files were found touched."""
        return self._touches

    def verify(self) -> int:
        """`touches` now. Raises ReadFailed when a file was written to or cut since it was opened.

        Bytes that were read while `touches` was another one may be those of a moment between. A
        file that was replaced by another of the same name, or removed, is still the old one here,
        as the weights in memory are; the log says so once.
        """
        with self._lock:
            if len(self.fds) != len(self.paths):
                raise ReadFailed("The n-gram table was closed while rows were read; start again.")
            assert self._watch is not None, "files that are open are watched"
            written = self._watch.written()
            for number, path in enumerate(self.paths):
                now = _version(self.fds[number])
                same = now == self._seen[number] or self._is_touch(number, now)
                if number in written or not same:
                    raise ReadFailed(
                        f"{path} was changed while it was in use, so rows of the n-gram table"
                        " cannot be trusted. Put the model's file back and restart."
                    )
            self._look_at_paths()
            return self._touches

    def _look_at_paths(self) -> None:
        """Tell, once a file, that its path leads elsewhere or nowhere."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for number, path in enumerate(self.paths):
            if number in self._gone:
                continue
            try:
                there: os.stat_result | None = path.stat()
            except FileNotFoundError:
                there = None
            except OSError:  # a folder that cannot be searched for now says nothing of the file
                continue
            if there is None or not os.path.samestat(there, os.fstat(self.fds[number])):
                self._gone.add(number)
                log_event(
                    _log,
                    logging.WARNING,
                    "ngram_file_removed" if there is None else "ngram_file_replaced",
                    path=path,
                    rows="still read from the file that was opened",
                    cure="restart to serve what is there now",
                )

    def _is_touch(self, number: int, now: tuple[int, int]) -> bool:
        """Whether only a file's time of change is another one; it counts from now on."""
        sample = self._samples[number]
        told = self._watch is not None and self._watch.tells
        if not told or now[0] != self._seen[number][0] or sample is None:
            return False
        if _sample(self.fds[number]) != sample:
            return False
        self._seen[number] = now
        self._touches += 1
        log_event(_log, logging.WARNING, "ngram_file_touched", path=self.paths[number])
        return True

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
        with self._lock:
            if self._watch is not None:
                self._watch.close()
            while self.fds:
                os.close(self.fds.pop())


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


def _sample(fd: int) -> bytes | None:
    """A digest of pages spread over a file, the last one among them; None when one is unreadable."""
    last = max(os.fstat(fd).st_size - 1, 0) // PAGE_BYTES
    digest = hashlib.blake2b(digest_size=16)
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            for i in sorted({last * k // (SAMPLES - 1) for k in range(SAMPLES)}):
                digest.update(page[: os.preadv(fd, [page], i * PAGE_BYTES)])
    except OSError:
        return None
    return digest.digest()
