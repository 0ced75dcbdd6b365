"""`NativeReader`: the compiled readers behind the `Reader` protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from civetta.ngram import _reader
from civetta.ngram.reader import Failure, Fault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from civetta.ngram.layout import Pieces


class NativeReader:
    """A ring ("uring") or a pool of threads ("pool")."""

    def __init__(self, kind: str, fds: Sequence[int], *, depth: int, largest_bytes: int) -> None:
        self.kind = kind
        self._reader = _reader.open_reader(kind, list(fds), depth, largest_bytes)

    def submit(self, pieces: Pieces, out_bytes: int) -> NativeJob:
        """Start to read; never waits for the disk."""
        arrays = (
            np.ascontiguousarray(pieces.file_P, np.int32),
            np.ascontiguousarray(pieces.offset_P, np.int64),
            np.ascontiguousarray(pieces.bytes_P, np.int32),
            np.ascontiguousarray(pieces.out_P, np.int64),
        )
        files, offsets, sizes, outs = (array.ctypes.data for array in arrays)
        return NativeJob(self._reader.submit(files, offsets, sizes, outs, len(pieces), out_bytes))

    def inject(self, fault: Fault) -> None:
        """Make coming reads fail."""
        self._reader.inject(
            fault.error, fault.short_bytes, fault.delay_us, fault.die, fault.after, fault.count
        )

    def stats(self) -> Mapping[str, int]:
        """Counters: threads, wakes, reads, bytes, retries, died."""
        return self._reader.stats()

    def close(self) -> None:
        """End its threads; what is on its way fails."""
        self._reader.close()


class NativeJob:
    """A gather on its way."""

    def __init__(self, job: _reader.Job) -> None:
        self._job = job

    @property
    def state(self) -> str:
        """One of running, done, failed, cancelled."""
        return self._job.state

    @property
    def left(self) -> int:
        """Reads that are not done."""
        return self._job.left

    @property
    def failure(self) -> Failure:
        """Why it failed."""
        code, file, offset = self._job.failure
        return Failure(code=code, file=file, offset=offset)

    def wait(self, timeout_s: float) -> bool:
        """Whether it was over in time."""
        return self._job.wait(int(timeout_s * 1000))

    def cancel(self) -> None:
        """Give it up; any thread may."""
        self._job.cancel()

    def data(self) -> NDArray[np.uint8]:
        """The bytes, over the job's own memory."""
        assert self.state == "done", "the bytes of a job that is done"
        return np.asarray(_Memory(self._job))


class _Memory:
    """A job's memory for numpy, which keeps the job alive through it."""

    def __init__(self, job: _reader.Job) -> None:
        self.job = job
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (job.nbytes,),
            "typestr": "|u1",
            "data": (job.address, False),
        }
