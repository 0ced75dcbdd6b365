"""Ctrl+C while large modules are imported."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let the body end first, then raise the KeyboardInterrupt that came meanwhile.

    torch and numpy catch what ends their imports, and go on half imported: Ctrl+C would be lost, or
    come out as a fault. Signals reach the main thread alone, so elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
