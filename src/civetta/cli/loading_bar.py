"""How far a model's loading is: a bar on a terminal, else a log line now and then."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Self

from civetta.log import log_event

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rich.progress import Progress, TaskID

LEAST_BYTES = 64 << 20
"""What is read faster than anybody looks is not shown."""

LINE_EVERY_S = 5.0

_log = logging.getLogger(__name__)
_WORDS = {"weights": "Loading weights", "table": "Loading the n-gram table"}


class LoadingBar:
    """Call it with a phase, its bytes that are done and all of them; a context manager."""

    def __init__(
        self, *, terminal: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._clock = clock
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._began_s: dict[str, float] = {}
        self._told_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """So much of a phase is done."""
        if total_bytes < LEAST_BYTES:
            return
        if self._terminal:
            self._draw(phase, done_bytes, total_bytes)
        else:
            self._tell(phase, done_bytes, total_bytes)

    def _draw(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        if self._bar is None:
            self._bar = _new_bar()
            self._bar.start()
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(_WORDS[phase], total=total_bytes)
        self._bar.update(self._tasks[phase], completed=done_bytes)

    def _tell(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        now_s = self._clock()
        began_s = self._began_s.setdefault(phase, now_s)
        last = done_bytes >= total_bytes
        if not last and now_s - self._told_s.setdefault(phase, now_s) < LINE_EVERY_S:
            return
        self._told_s[phase] = now_s
        took_s = now_s - began_s
        left_s = took_s * (total_bytes - done_bytes) / done_bytes
        log_event(
            _log,
            logging.INFO,
            "loading",
            phase=phase,
            done=f"{done_bytes / 1e9:.3g} GB",
            total=f"{total_bytes / 1e9:.3g} GB",
            took_s=round(took_s, 1),
            left_s=None if last else round(left_s),
        )


def _new_bar() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
