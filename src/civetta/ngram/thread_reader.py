"""`ThreadReader`: the pool of blocking readers in Python, for machines without the compiled module.

The rules are those of `native/`: pages merged, short answers read on, the same one twice is the
end of the file, a gather wakes no more threads than it has reads.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from civetta.ngram.reader import END_OF_FILE, PAGE_BYTES, READER_ENDED, Failure, Fault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from civetta.ngram.layout import Pieces

MERGE_BYTES = 4 * PAGE_BYTES
MOST_TRIES = 64


@dataclass(slots=True)
class _Extent:
    """Whole pages of a file: `size` bytes from `start`, of which pieces cover the first `needed`."""

    file: int
    start: int
    size: int
    needed: int
    first: int
    last: int


class _Died(Exception):
    """A test asked this thread to end."""


class ThreadJob:
    """A gather on its way."""

    def __init__(self, pieces: Pieces, out_bytes: int) -> None:
        self._offsets, self._sizes, self._outs = (
            x.tolist() for x in (pieces.offset_P, pieces.bytes_P, pieces.out_P)
        )
        self.extents = _plan(pieces.file_P.tolist(), self._offsets, self._sizes)
        self.next = 0  # first extent that no thread has taken; guarded by the reader's lock
        self._out = np.empty(out_bytes, dtype=np.uint8)
        self._view = self._out.data
        self._left = len(self.extents)
        self._state = "running" if self.extents else "done"
        self._failure = Failure(code=0, file=0, offset=0)
        self._changed = threading.Condition()

    @property
    def state(self) -> str:
        """One of running, done, failed, cancelled."""
        return self._state

    @property
    def left(self) -> int:
        """Reads that are not done."""
        return self._left

    @property
    def failure(self) -> Failure:
        """Why it failed."""
        return self._failure

    @property
    def over(self) -> bool:
        """Whether nothing more is to be read."""
        return self._state != "running"

    def wait(self, timeout_s: float) -> bool:
        """Whether it was over in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.over, timeout_s)

    def cancel(self) -> None:
        """Give it up; any thread may."""
        self._end("cancelled")

    def fail(self, code: int, file: int = 0, offset: int = 0) -> None:
        """End with an error."""
        self._end("failed", Failure(code=code, file=file, offset=offset))

    def data(self) -> NDArray[np.uint8]:
        """The bytes."""
        assert self._state == "done", "the bytes of a job that is done"
        return self._out

    def deliver(self, extent: _Extent, pages: memoryview) -> None:
        """Copy an extent's pieces out of the pages that were read."""
        for i in range(extent.first, extent.last):
            at, out, size = self._offsets[i] - extent.start, self._outs[i], self._sizes[i]
            self._view[out : out + size] = pages[at : at + size]
        with self._changed:
            self._left -= 1
            done = self._left == 0
        if done:
            self._end("done")

    def _end(self, state: str, failure: Failure | None = None) -> None:
        with self._changed:
            if self._state != "running":
                return
            self._state, self._failure = state, failure or self._failure
            self._changed.notify_all()


class ThreadReader:
    """Up to `threads` blocking readers, started when a gather first needs them."""

    kind = "python"

    def __init__(self, fds: Sequence[int], *, threads: int, largest_bytes: int) -> None:
        self._fds, self._most = list(fds), threads
        pages = -(-(largest_bytes + PAGE_BYTES) // PAGE_BYTES)
        self._buffer_bytes = max(MERGE_BYTES, pages * PAGE_BYTES)
        self._changed = threading.Condition()
        self._queue: deque[ThreadJob] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = self._called = 0
        self._stop = False
        self._fault = Fault(count=0)
        self._counts = dict.fromkeys(("wakes", "reads", "bytes", "retries", "died"), 0)

    def submit(self, pieces: Pieces, out_bytes: int) -> ThreadJob:
        """Start to read; never waits for the disk."""
        job = ThreadJob(pieces, out_bytes)
        if job.over:
            return job
        with self._changed:
            if self._stop:
                job.fail(READER_ENDED)
                return job
            self._queue.append(job)
            wanted = min(len(job.extents), self._most)
            woken = min(wanted, self._idle)
            self._idle -= woken
            self._called += woken
            self._changed.notify(woken)
            started = 0
            while woken + started < wanted and len(self._threads) < self._most and self._start():
                started += 1
            self._counts["wakes"] += woken + started
            if not self._threads:
                self._fail_queued(errno.EAGAIN)
        return job

    def inject(self, fault: Fault) -> None:
        """Make coming reads fail."""
        with self._changed:
            self._fault = fault

    def stats(self) -> Mapping[str, int]:
        """Counters: threads, wakes, reads, bytes, retries, died."""
        with self._changed:
            return {**self._counts, "threads": len(self._threads)}

    def close(self) -> None:
        """End its threads; what is on its way fails."""
        with self._changed:
            self._stop = True
            self._fail_queued(READER_ENDED)
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="civetta-ngram", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # no more threads to be had
            self._threads.discard(thread)
            return False
        return True

    def _run(self) -> None:
        taken: tuple[ThreadJob, _Extent] | None = None
        try:
            with mmap.mmap(-1, self._buffer_bytes) as pages, memoryview(pages) as buffer:
                while (taken := self._next()) is not None:
                    self._read(*taken, buffer)
        except Exception:  # noqa: BLE001 - a thread's root: its work fails, the process lives
            if taken is not None:
                taken[0].fail(READER_ENDED, taken[1].file, taken[1].start)
            with self._changed:
                self._counts["died"] += 1
        with self._changed:
            self._threads.discard(threading.current_thread())
            if not self._threads:
                self._fail_queued(READER_ENDED)

    def _next(self) -> tuple[ThreadJob, _Extent] | None:
        with self._changed:
            while not self._stop:
                while self._queue:
                    job = self._queue[0]
                    if not job.over and job.next < len(job.extents):
                        job.next += 1
                        return job, job.extents[job.next - 1]
                    self._queue.popleft()
                self._idle += 1
                self._changed.wait_for(lambda: self._stop or self._called > 0)
                if not self._stop:
                    self._called -= 1
        return None

    def _read(self, job: ThreadJob, extent: _Extent, buffer: memoryview) -> None:
        got, code = 0, 0
        for tries in range(MOST_TRIES):
            if job.over:
                return
            base = got // PAGE_BYTES * PAGE_BYTES
            size, code = self._answer(extent, base, buffer)
            self._count(size, retry=tries > 0)
            if code in (errno.EINTR, errno.EAGAIN):
                continue
            if code:
                break
            if base + size >= extent.needed:
                job.deliver(extent, buffer)
                return
            if base + size <= got:
                break
            got = base + size
        job.fail(code or END_OF_FILE, extent.file, extent.start + got)

    def _answer(self, extent: _Extent, base: int, buffer: memoryview) -> tuple[int, int]:
        """Bytes read from `base` of the extent on, and an errno."""
        fault = self._draw()
        if fault.die:
            raise _Died
        if fault.delay_us:
            time.sleep(fault.delay_us / 1e6)
        if fault.error:
            return 0, fault.error
        part = buffer[base : extent.size]
        try:
            size = os.preadv(self._fds[extent.file], [part], extent.start + base)
        except OSError as error:
            return 0, error.errno or errno.EIO
        return (min(size, fault.short_bytes) if fault.short_bytes >= 0 else size), 0

    def _draw(self) -> Fault:
        with self._changed:
            fault = self._fault
            if fault.count <= 0:
                return Fault(count=0)
            if fault.after:
                self._fault = replace(fault, after=fault.after - 1)
                return Fault(count=0)
            self._fault = replace(fault, count=fault.count - 1)
            return fault

    def _count(self, size: int, *, retry: bool) -> None:
        with self._changed:
            self._counts["reads"] += 1
            self._counts["bytes"] += size
            self._counts["retries"] += retry

    def _fail_queued(self, code: int) -> None:
        while self._queue:
            self._queue.popleft().fail(code)


def _plan(files: list[int], offsets: list[int], sizes: list[int]) -> list[_Extent]:
    """Pieces sorted by file and offset to reads; those whose pages touch share one."""
    extents: list[_Extent] = []
    for i, (file, offset, size) in enumerate(zip(files, offsets, sizes, strict=True)):
        start = offset // PAGE_BYTES * PAGE_BYTES
        stop = -(-(offset + size) // PAGE_BYTES) * PAGE_BYTES
        e = extents[-1] if extents else None
        if (
            e is not None
            and e.file == file
            and start <= e.start + e.size
            and stop - e.start <= MERGE_BYTES
        ):
            e.size = max(e.size, stop - e.start)
            e.needed = max(e.needed, offset + size - e.start)
            e.last = i + 1
        else:
            extents.append(_Extent(file, start, stop - start, offset + size - start, i, i + 1))
    return extents
