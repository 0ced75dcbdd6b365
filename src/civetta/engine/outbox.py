"""`Outbox`: the way of a request's events from the step thread to whoever reads them.

The step thread never waits for a reader. What a reader leaves unread is bounded: successive
Progress events are merged into the newest, and when more than `max_unread` events lie in the box,
they are dropped and the request ends with OutputBackpressure. A reader that goes away (iterator
closed, stream object collected) cancels its request. A reader whose time is over does not wait for
a step that does not come back: it gives itself the end, and the request is given up behind it.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from civetta.engine.protocol import Finished, Progress
from civetta.errors import OutputBackpressure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from civetta.engine.protocol import Event
    from civetta.errors import CivettaError


ALARM_S = 0.01
"""A timer of the event loop may ring this much before the clock that the reader looks at."""


class Outbox:
    """Events of one request, in order; written by the step thread, read by one reader."""

    def __init__(self, *, max_unread: int) -> None:
        self._max_unread = max_unread
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._error: CivettaError | None = None
        self._closed = self._abandoned = False
        self._wake: Callable[[], None] | None = None

    def put(self, event: Event) -> None:
        """Add an event. Finished closes the box. An abandoned one takes nothing in.

        Raises OutputBackpressure when too much lies unread; the box is then empty and broken.
        """
        with self._changed:
            assert not self._closed, "nothing follows the end of a reply"
            if self._abandoned:
                self._closed = isinstance(event, Finished)
                return
            last = self._events[-1] if self._events else None
            if isinstance(event, Progress) and isinstance(last, Progress):
                self._events.pop()
            if len(self._events) >= self._max_unread and not isinstance(event, Finished):
                self._events.clear()
                raise OutputBackpressure(
                    f"The client left {self._max_unread} events of its reply unread; read the"
                    " stream faster, or ask without streaming."
                )
            self._events.append(event)
            self._closed = isinstance(event, Finished)
            self._notify()

    def fail(self, error: CivettaError) -> None:
        """End the reply with an error, raised to the reader after the events before it."""
        with self._changed:
            if not self._closed:
                self._error, self._closed = error, True
                self._notify()

    @property
    def closed(self) -> bool:
        """Whether the last event, or the error, is in."""
        return self._closed

    def take(self) -> Event | None:
        """Remove and return the oldest event; None when the reader has to wait.

        Raises the request's error once the events before it are taken.
        """
        with self._changed:
            if self._events:
                return self._events.popleft()
            if self._error is not None:
                raise self._error
            return None

    def abandon(self) -> bool:
        """The reader waits no longer; False when there is something to take all the same."""
        with self._changed:
            self._abandoned = not self._events and self._error is None
            return self._abandoned

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until there is something to take, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events) or self._error is not None, timeout_s)

    def on_change(self, wake: Callable[[], None] | None) -> None:
        """Call `wake` (from the step thread) whenever something was added."""
        with self._changed:
            self._wake = wake

    def _notify(self) -> None:
        self._changed.notify_all()
        if self._wake is not None:
            self._wake()


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a reader waits in all, counted from the making of its stream, and the end it then has.

    `give_up` calls the request off; it is called from the reader's thread, once.
    """

    seconds: float
    give_up: Callable[[], Finished]


class OutboxStream:
    """A `GenerationStream` over one outbox; can be read once. `patience` None: waits for ever."""

    def __init__(
        self, outbox: Outbox, cancel: Callable[[], None], patience: Patience | None = None
    ) -> None:
        self._outbox = outbox
        self._cancel = cancel
        self._patience = patience
        self._late_s = None if patience is None else time.monotonic() + patience.seconds
        self._read = False
        # A stream that nobody holds any more has no reader: its request is pointless.
        self._finalizer = weakref.finalize(self, cancel)
        self._finalizer.atexit = False

    def cancel(self) -> None:
        """Ask for the end; events go on until Finished with reason CANCELLED."""
        self._cancel()

    def __iter__(self) -> Iterator[Event]:
        """Events, blocking; leaving the loop early cancels the request."""
        self._claim()
        return self._blocking()

    def __aiter__(self) -> AsyncIterator[Event]:
        """Events for a coroutine; leaving it early, or its task's end, cancels the request."""
        self._claim()
        return self._awaiting()

    def _claim(self) -> None:
        assert not self._read, "a stream of events can be read once"
        self._read = True

    def _blocking(self) -> Iterator[Event]:
        try:
            while True:
                event = self._outbox.take() or self._own_end()
                if event is None:
                    self._outbox.wait(self._left_s())
                    continue
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self._cancel()

    async def _awaiting(self) -> AsyncIterator[Event]:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self._outbox.on_change(_Waker(loop, changed, self._cancel))
        left_s = self._left_s()
        # One timer a reply, none a token; it rings a moment late, so that the time is over then.
        alarm = None if left_s is None else loop.call_later(left_s + ALARM_S, changed.set)
        try:
            while True:
                changed.clear()
                event = self._outbox.take() or self._own_end()
                if event is None:
                    await changed.wait()
                    continue
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            if alarm is not None:
                alarm.cancel()
            self._outbox.on_change(None)
            self._cancel()

    def _left_s(self) -> float | None:
        return None if self._late_s is None else max(0.0, self._late_s - time.monotonic())

    def _own_end(self) -> Finished | None:
        """The end that a reader gives itself once its time is over and there is nothing to read."""
        patience = self._patience
        if patience is None or self._left_s() or not self._outbox.abandon():
            return None
        return patience.give_up()


class _Waker:
    """Sets an asyncio event from the step thread; a loop that is gone cancels the request."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, event: asyncio.Event, cancel: Callable[[], None]
    ) -> None:
        self._loop, self._event, self._cancel = loop, event, cancel

    def __call__(self) -> None:
        # A set event means that the reader has not looked since: it will, after clearing it.
        if self._event.is_set():
            return
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:  # what asyncio raises when the loop is closed
            self._cancel()
