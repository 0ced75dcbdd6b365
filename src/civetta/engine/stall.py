"""`StallWatch`: notices a step that does not come back, and says which requests are in it.

A stuck device, disk or driver cannot be interrupted from here; it can be told, so that health
checks fail and whoever runs the server restarts it instead of waiting for a silent process.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from civetta.log import log_event

if TYPE_CHECKING:
    from collections.abc import Callable

LOOKS = 4
"""Looks within one timeout: a stall is told at most a quarter of the timeout late."""

_log = logging.getLogger(__name__)


class StallWatch:
    """A thread that looks at `step_s()`, the age in seconds of the step under way (0: none).

    A step older than `timeout_s` is one stall, however long it lasts. `whose()` names requests.
    """

    def __init__(
        self,
        step_s: Callable[[], float],
        *,
        timeout_s: float,
        whose: Callable[[], list[str]] = list,
    ) -> None:
        self._step_s, self._timeout_s, self._whose = step_s, timeout_s, whose
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="civetta-stall", daemon=True)
        self._in_stall = False
        self.stalls = 0

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; idempotent."""
        self._stop.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def stalled_s(self) -> float:
        """The age of a step that is called stalled; 0 when there is none."""
        age_s = self._step_s()
        return age_s if age_s > self._timeout_s else 0.0

    def look(self) -> None:
        """Tell of a stall that began, and of its end."""
        age_s = self._step_s()
        if age_s > self._timeout_s and not self._in_stall:
            self._in_stall = True
            self.stalls += 1
            log_event(
                _log,
                logging.ERROR,
                "step_stalled",
                seconds=round(age_s, 1),
                running=",".join(self._whose()),
                cure="if this line is not followed by step_resumed, restart the server",
            )
        elif age_s <= self._timeout_s and self._in_stall:
            self._in_stall = False
            log_event(_log, logging.WARNING, "step_resumed")

    def _run(self) -> None:
        while not self._stop.wait(self._timeout_s / LOOKS):
            self.look()
