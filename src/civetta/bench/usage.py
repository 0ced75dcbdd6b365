"""Peak memory and threads of a stretch of work, read from the system while it runs."""

from __future__ import annotations

import resource
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from civetta.bench import gpu

if TYPE_CHECKING:
    from types import TracebackType

SAMPLE_S = 0.01
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Peaks: resident bytes of the process, bytes that torch took on the GPU (0 without one), and
    threads of the process, those that compute and those that wait."""

    rss_peak_bytes: int
    device_peak_bytes: int
    threads_peak: int


class UsageWatch:
    """Samples every 10 ms from `with` to its end, on a thread of its own, which it does not count.

    A peak shorter than that can be missed on the host; the GPU's is exact. Where the system has no
    /proc, resident bytes are the process's peak so far and threads are Python's own.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self._rss_bytes = self._threads = 0
        self._thread = threading.Thread(target=self._watch, name="civetta-usage", daemon=True)

    def __enter__(self) -> Self:
        gpu.forget_peak()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def usage(self) -> Usage:
        """The peaks, once it has ended."""
        return Usage(
            rss_peak_bytes=self._rss_bytes,
            device_peak_bytes=gpu.peak_bytes(),
            threads_peak=self._threads - 1,
        )

    def _watch(self) -> None:
        ended = False
        while True:
            rss_bytes, threads = read_usage()
            self._rss_bytes = max(self._rss_bytes, rss_bytes)
            self._threads = max(self._threads, threads)
            if ended:
                return
            ended = self._done.wait(SAMPLE_S)  # and one more look, so that there are two at least


def read_usage() -> tuple[int, int]:
    """Resident bytes and threads of this process now."""
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, threading.active_count()
    found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(found["VmRSS"].split()[0]) * 1024, int(found["Threads"])
