"""`WayOut`: what signals to stop set off, and the end of the process when the engine does not end.

A step that hangs in a device, a disk or a driver cannot be interrupted from Python, and whoever
waits for it waits for ever. So the wait is bounded: after that the process goes without it, says so
in one line, and exits with a status that tells a supervisor. A thread of its own does all this: a
signal's handler runs in the midst of anything, of itself too, so it takes no lock and starts nothing.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING

from civetta.log import log_event

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.engine.protocol import EngineClient

EXIT_STUCK = 1
_log = logging.getLogger("civetta.serve")


class WayOut:
    """Tells what first asked to stop, calls `begin()`; leaves `longest_s` later, `short_s` after a
    second time.

    `engine()`: the engine that is waited for, None while there is none.
    """

    def __init__(
        self,
        engine: Callable[[], EngineClient | None],
        *,
        begin: Callable[[], None],
        longest_s: float,
        short_s: float,
    ) -> None:
        self._engine, self._begin = engine, begin
        self._longest_s, self._short_s = longest_s, short_s
        # What asks to stop, or None at the end; its `put` may interrupt itself.
        self._told: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="civetta-way-out", daemon=True).start()

    def asked(self, cause: str) -> None:
        """Something asks to stop, such as a signal; for its handler, too."""
        self._told.put(cause)

    def close(self) -> None:
        """The engine ended."""
        self._told.put(None)

    def _run(self) -> None:
        cause = self._told.get()
        if cause is None:
            return
        log_event(_log, logging.INFO, "stopping", cause=cause)
        began_s = time.monotonic()
        end_s = began_s + self._longest_s
        self._begin()
        while True:
            try:
                if self._told.get(timeout=max(0.0, end_s - time.monotonic())) is None:
                    return
            except queue.Empty:
                self._leave(time.monotonic() - began_s)
            end_s = min(end_s, time.monotonic() + self._short_s)

    def _leave(self, waited_s: float) -> None:
        engine = self._engine()
        log_event(
            _log,
            logging.ERROR,
            "left_stuck",
            waited_s=round(waited_s, 1),
            running=None if engine is None else ",".join(v.request_id for v in engine.views()),
            status=EXIT_STUCK,
            cause="the engine did not end after the signal: a step or a write hangs",
        )
        sys.stderr.flush()
        os._exit(EXIT_STUCK)  # an ordinary exit would wait for the step's thread
