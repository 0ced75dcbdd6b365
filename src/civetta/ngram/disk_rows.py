"""`DiskRows`: the table stays in its files; a gather reads the pages that hold its rows.

Rows are deduplicated and sorted, what the cache holds is not read, and a row reaches the caller
only when its read succeeded and its file is still the one that was opened.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

from civetta.errors import ReadFailed
from civetta.ngram.layout import RowLocator
from civetta.ngram.reader import open_reader
from civetta.ngram.row_cache import RowCache
from civetta.ngram.store import GIVEN_UP, StoredRows, StoreStats
from civetta.ngram.table_files import TableFiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from civetta.ngram.layout import TableLayout
    from civetta.ngram.reader import Reader, ReadJob

CACHE_BYTES = 128 << 20
STALL_S = 60.0
"""A gather fails when no read of it ends for so long: a disk that is gone, not one that is slow."""
MOST_READS = 5
"""Of a gather whose files are touched meanwhile."""
_GLANCE_S = 1.0  # how often a wait looks up, for Ctrl-C and for stalls


class DiskRows:
    """A table on disk. `submit` may be called from any thread.

    reader, depth: see `open_reader`. In a child after a fork the store opens a reader of its own;
    tickets from before fail there.
    """

    placement = "disk"

    def __init__(
        self,
        layout: TableLayout,
        *,
        reader: str = "auto",
        depth: int = 0,
        cache_bytes: int = CACHE_BYTES,
        direct: bool = True,
        stall_s: float = STALL_S,
    ) -> None:
        self.layout = layout
        self.stall_s = stall_s
        self._kind, self._depth = reader, depth
        self.files = TableFiles(layout, direct=direct)
        self._locator = RowLocator(layout)
        self._cache_bytes = cache_bytes
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._cache = RowCache(
            budget_bytes=self._cache_bytes,
            row_bytes=self.layout.row_bytes,
            table_rows=self.layout.rows,
        )
        self._gathers = self._rows = self._cached = 0
        self.reader: Reader = open_reader(
            self.files.fds,
            largest_bytes=max(field.row_bytes for field in self.layout.fields),
            kind=self._kind,
            depth=self._depth,
        )
        self._release = weakref.finalize(self, _release, self.reader, self.files, self._pid)

    def submit(self, rows_M: NDArray[np.int64]) -> DiskTicket:
        """Ask for rows [M]; never waits for the disk."""
        assert not self._closed, "used a closed store"
        if os.getpid() != self._pid:
            self._start()
        rows_N, back_M = np.unique(rows_M, return_inverse=True)
        assert not len(rows_N) or (rows_N[0] >= 0 and rows_N[-1] < self.layout.rows)
        with self._lock:
            held_N, found = self._cache.look_up(rows_N)
            self._gathers += 1
            self._rows += len(rows_N)
            self._cached += len(found)
        touches, missing = self.files.touches, rows_N[~held_N]
        job = self.read(missing) if len(missing) else None
        return DiskTicket(
            self, job, touches=touches, rows_N=rows_N, back_M=back_M, held_N=held_N, found=found
        )

    def read(self, rows_N: NDArray[np.int64]) -> ReadJob:
        """Start to read rows, ascending, each once."""
        return self.reader.submit(self._locator.pieces(rows_N), len(rows_N) * self.layout.row_bytes)

    def keep(self, rows_N: NDArray[np.int64], data_NB: NDArray[np.uint8]) -> None:
        """Take rows that were read into the cache."""
        with self._lock:
            self._cache.keep(rows_N, data_NB)

    def stats(self) -> StoreStats:
        """Counters since the store was opened."""
        read = self.reader.stats()
        with self._lock:
            return StoreStats(
                gathers=self._gathers,
                rows=self._rows,
                cached=self._cached,
                reads=read["reads"],
                read_bytes=read["bytes"],
            )

    def close(self) -> None:
        """End the reader and close the files; what is on its way fails."""
        self._closed = True
        self._release()


def _release(reader: Reader, files: TableFiles, pid: int) -> None:
    """For a store that is closed or forgotten; a child's copy of it has no threads to end."""
    if os.getpid() == pid:
        reader.close()
        files.close()


class DiskTicket:
    """Rows that were asked for: those in `held_N` came from the cache, `job` reads the others."""

    def __init__(
        self,
        store: DiskRows,
        job: ReadJob | None,
        *,
        touches: int,
        rows_N: NDArray[np.int64],
        back_M: NDArray[np.int64],
        held_N: NDArray[np.bool_],
        found: NDArray[np.uint8],
    ) -> None:
        self._store, self._job, self._touches = store, job, touches
        self._pid = os.getpid()
        self._rows_N, self._back_M = rows_N, back_M
        self._held_N, self._found = held_N, found
        self._given_up = False

    def wait(self) -> StoredRows:
        """The rows; once. Raises ReadFailed when they cannot be read, or after `cancel`."""
        if self._given_up:
            raise ReadFailed(GIVEN_UP)
        if os.getpid() != self._pid:
            raise ReadFailed(
                "The read of n-gram rows was begun before this process was forked; start it again."
            )
        job, layout = self._job, self._store.layout
        data_NB = self._found
        if job is not None:
            job = self._finished(job)
            data_NB = job.data().reshape(-1, layout.row_bytes)
            missing_N = ~self._held_N
            self._store.keep(self._rows_N[missing_N], data_NB)
            if len(self._found):
                whole = np.empty((len(self._rows_N), layout.row_bytes), dtype=np.uint8)
                whole[missing_N] = data_NB
                whole[self._held_N] = self._found
                data_NB = whole
        self._given_up, self._job = True, None  # spent
        return StoredRows(
            rows_N=self._rows_N, data_NB=torch.from_numpy(data_NB), back_M=self._back_M
        )

    def cancel(self) -> None:
        """Give the claim up; a `wait` under way in another thread fails."""
        self._given_up = True
        job, self._job = self._job, None
        if job is not None and os.getpid() == self._pid:
            job.cancel()

    def _finished(self, job: ReadJob) -> ReadJob:
        """The job that read the rows while nobody touched their files."""
        for _ in range(MOST_READS):
            self._finish(job)
            touches = self._store.files.verify()
            if touches == self._touches:
                return job
            self._touches = touches
            job = self._job = self._store.read(self._rows_N[~self._held_N])
            if self._given_up:  # by another thread, which may not have seen the new job
                job.cancel()
        raise ReadFailed(
            f"{self._store.files.paths[0]} or a file beside it is touched again and again while"
            " n-gram rows are read; leave the model's files alone and send the request again."
        )

    def _finish(self, job: ReadJob) -> None:
        files = self._store.files
        left, since_s = job.left, time.monotonic()
        while not job.wait(_GLANCE_S):
            if job.left != left:
                left, since_s = job.left, time.monotonic()
            elif time.monotonic() - since_s > self._store.stall_s:
                job.cancel()
                raise ReadFailed(
                    f"The n-gram table's disk has not answered for {self._store.stall_s:g} seconds:"
                    f" {files.paths[0]}. Check the disk and send the request again."
                )
        if job.state == "failed":
            raise files.error(job.failure)
        if job.state == "cancelled":
            raise ReadFailed(GIVEN_UP)
