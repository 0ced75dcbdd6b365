"""`Outbox`: the way of a request's events from the step thread to whoever reads them.

The step thread never waits for a reader. What a reader leaves unread is bounded: successive
Progress events are merged into the newest, and when more than `max_unread` events lie in the box,
they are dropped and the request ends with OutputBackpressure. A reader that goes away (iterator
closed, stream object collected) cancels its request.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

from civetta.engine.protocol import Finished, Progress
from civetta.errors import OutputBackpressure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from civetta.engine.protocol import Event
    from civetta.errors import CivettaError


class Outbox:
    """Events of one request, in order; written by the step thread, read by one reader."""

    def __init__(self, *, max_unread: int) -> None:
        self._max_unread = max_unread
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._error: CivettaError | None = None
        self._closed = False
        self._wake: Callable[[], None] | None = None

    def put(self, event: Event) -> None:
        """Add an event. Finished closes the box.

        Raises OutputBackpressure when too much lies unread; the box is then empty and broken.
        """
        with self._changed:
            assert not self._closed, "nothing follows the end of a reply"
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

    def wait(self) -> None:
        """Block until there is something to take."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events) or self._error is not None)

    def on_change(self, wake: Callable[[], None] | None) -> None:
        """Call `wake` (from the step thread) whenever something was added."""
        with self._changed:
            self._wake = wake

    def _notify(self) -> None:
        self._changed.notify_all()
        if self._wake is not None:
            self._wake()


class OutboxStream:
    """A `GenerationStream` over one outbox; can be read once."""

    def __init__(self, outbox: Outbox, cancel: Callable[[], None]) -> None:
        self._outbox = outbox
        self._cancel = cancel
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
                event = self._outbox.take()
                if event is None:
                    self._outbox.wait()
                    continue
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self._cancel()

    async def _awaiting(self) -> AsyncIterator[Event]:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self._outbox.on_change(_Waker(loop, changed, self._cancel))
        try:
            while True:
                changed.clear()
                event = self._outbox.take()
                if event is None:
                    await changed.wait()
                    continue
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self._outbox.on_change(None)
            self._cancel()


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
