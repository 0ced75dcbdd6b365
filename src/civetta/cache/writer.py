"""`DiskWriter`: the thread that writes states behind the step loop's back.

The queue is bounded; what does not fit is offered again later. A state that is being written holds
its own shares of its pages, which nobody changes; the step thread gives them back when it collects
what was finished.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from civetta.cache.disk import NoRoom, RunSource
from civetta.cache.disk_format import RUN_PAGES
from civetta.kernels.ops import PAGE_TOKENS
from civetta.log import log_event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.cache.disk import DiskTier
    from civetta.cache.protocol import ImageMark
    from civetta.state.snapshot import Snapshot

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
    """A state to write. `known` names each run's contents, or is None; see `RunSource`."""

    entry: int
    key: str
    snapshot: Snapshot
    images: tuple[ImageMark, ...]
    known: tuple[bytes | None, ...]
    victims: tuple[str, ...]


class DiskWriter:
    """Owns the thread and its queue of at most `limit` states."""

    def __init__(self, disk: DiskTier, *, limit: int = 4) -> None:
        self._disk, self._limit = disk, limit
        self._changed = threading.Condition()
        self._jobs: deque[WriteJob] = deque()
        self._done: list[tuple[WriteJob, bool]] = []
        self._busy = self._closing = False
        self._thread = threading.Thread(target=self._run, name="civetta-cache-write", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """States that are queued or being written."""
        with self._changed:
            return len(self._jobs) + self._busy

    def submit(self, job: WriteJob) -> bool:
        """Queue a state; False when the queue is full, and the job stays the caller's."""
        with self._changed:
            if self._closing or len(self._jobs) >= self._limit:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def finished(self) -> list[tuple[WriteJob, bool]]:
        """Jobs that ended since the last call, each with whether it is on disk."""
        with self._changed:
            done, self._done = self._done, []
            return done

    def give_up(self) -> None:
        """Take what has not begun from the queue; it counts as finished without success."""
        with self._changed:
            self._done += [(job, False) for job in self._jobs]
            self._jobs.clear()
            self._changed.notify_all()

    def wait(self, until_s: float) -> bool:
        """Block until everything queued is written, at most until that monotonic time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._jobs and not self._busy, max(until_s - time.monotonic(), 0)
            )

    def close(self) -> None:
        """End the thread after the job that it is at; the rest counts as not written."""
        with self._changed:
            self._closing = True
        self.give_up()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._jobs)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._busy = True
            written = self._write(job)
            with self._changed:
                self._busy = False
                self._done.append((job, written))
                self._changed.notify_all()

    def _write(self, job: WriteJob) -> bool:
        began_s = time.monotonic()
        pool = job.snapshot.pool
        try:
            self._disk.publish(
                job.key,
                job.snapshot.small,
                run_sources(job.snapshot, job.known),
                job.images,
                page_tokens=PAGE_TOKENS,
                page_bytes=pool.page_bytes,
                victims=job.victims,
            )
        except NoRoom:
            _tell("cache_write_skipped", job, "--cache-disk-bytes leaves no room for it")
        except OSError as error:
            _tell("cache_write_failed", job, error.strerror or str(error))
        except Exception:  # noqa: BLE001 - a thread's root: the state is lost, serving goes on
            _log.exception("cache_write_failed")
        else:
            log_event(
                _log, logging.DEBUG, "cache_written",
                entry=job.key[:16], tokens=job.snapshot.position, s=time.monotonic() - began_s,
            )  # fmt: skip
            return True
        return False


def run_sources(snapshot: Snapshot, known: Sequence[bytes | None]) -> list[RunSource]:
    """The pages of a snapshot in runs; rows behind its end are zeros."""
    pages, pool = snapshot.pages, snapshot.pool
    starts = range(0, len(pages), RUN_PAGES)

    def read(start: int) -> bytes:
        numbered = list(enumerate(pages))[start : start + RUN_PAGES]
        return b"".join(
            pool.read(page, min(snapshot.position - i * PAGE_TOKENS, PAGE_TOKENS)).numpy().tobytes()
            for i, page in numbered
        )

    return [
        RunSource(known=name, pages=min(RUN_PAGES, len(pages) - start), read=partial(read, start))
        for start, name in zip(starts, known, strict=True)
    ]


def _tell(event: str, job: WriteJob, reason: str) -> None:
    log_event(
        _log, logging.WARNING, event,
        entry=job.key[:16], tokens=job.snapshot.position, reason=reason,
    )  # fmt: skip
