"""Bringing a generation to its client, whole or as server-sent events, and noticing when it left.

One task waits on `receive()` for the disconnect; the moment it comes the generation is cancelled,
during queueing, prefill and decode alike. Headers of a stream are held back until its first event
(the request has left the queue) or `headers_after_s`, so that early failures get a proper status.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from civetta.api.wire import DONE, PING, error_payload, event, json_response
from civetta.errors import CivettaError, EngineClosed, RequestAborted, RequestTimeout
from civetta.types import CancelCause

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from starlette.types import Receive, Scope, Send

E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)
E_contra = TypeVar("E_contra", contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of silence before a keep-alive, and seconds that a stream's headers wait at most."""

    ping_s: float = 10.0
    headers_after_s: float = 5.0


class Generation(Protocol[E_co]):
    """Events that arrive over time and can be called off."""

    def __aiter__(self) -> AsyncIterator[E_co]:
        """The events; raises CivettaError when the generation fails."""
        ...

    def cancel(self) -> None:
        """Stop soon; the iterator then ends. Safe at any time, any number of times."""
        ...


class Encoder(Protocol[E_contra]):
    """One request in one dialect: turns events into frames, or gathers them into a body."""

    def frames(self, item: E_contra) -> bytes:
        """Server-sent events for one event, possibly none."""
        ...

    def gather(self, item: E_contra) -> None:
        """Take one event into the whole reply."""
        ...

    def body(self) -> object:
        """The gathered reply, ready for JSON."""
        ...

    def headers(self) -> dict[str, str]:
        """Headers of the gathered reply."""
        ...


class Framing(Protocol):
    """What a stream of one dialect has besides the frames of its events."""

    def ping(self) -> bytes:
        """A sign of life while there is nothing to say."""
        ...

    def closing(self) -> bytes:
        """What follows the last event of a reply that ended well."""
        ...

    def failure(self, error: CivettaError) -> bytes:
        """What ends the stream of a reply that failed."""
        ...


class OpenAIFraming:
    """Comments, `[DONE]`, and the error object as the last event."""

    def ping(self) -> bytes:
        """A comment."""
        return PING

    def closing(self) -> bytes:
        """The marker that clients wait for."""
        return DONE

    def failure(self, error: CivettaError) -> bytes:
        """The `{"error": ...}` body as an event."""
        return event(error_payload(error))


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


def broken_off(cause: CancelCause | None, timeout_s: float | None) -> CivettaError:
    """The error of a generation that somebody other than its client ended."""
    if cause is CancelCause.TIMEOUT and timeout_s is not None:
        return RequestTimeout(
            f"The request took longer than {timeout_s:g} s, the server's --request-timeout-ms: ask"
            " for fewer tokens, or raise the limit."
        )
    if cause is CancelCause.ABORTED:
        return RequestAborted("The request was ended by its id: send it again if it is needed.")
    return EngineClosed("The server is shutting down: send the request again later.")


class Pause(Enum):
    """What `Events.next` gives when there is no event."""

    QUIET = "nothing came in time"
    END = "there will be no more"


class Events(Generic[E]):
    """A generation's events with a timeout, bound to its client's connection.

    Use as `async with`: leaving the block cancels a generation that has not ended.
    """

    def __init__(self, generation: Generation[E], receive: Receive) -> None:
        self._generation = generation
        self._iterator = aiter(generation)
        self._receive = receive
        self._gone: asyncio.Task[None] | None = None
        self._step: asyncio.Task[E | Pause] | None = None
        self._ended = False

    async def __aenter__(self) -> Events[E]:
        self._gone = asyncio.create_task(_until_disconnect(self._receive))
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._ended:
            self._generation.cancel()
        for task in (self._gone, self._step):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, CivettaError):
                    await task

    async def next(self, timeout_s: float | None = None) -> E | Pause:
        """The next event, QUIET after `timeout_s` without one, or END.

        Raises ClientGone on a disconnect, and the CivettaError that ended the generation.
        """
        assert self._gone is not None, "enter the block first"
        if self._step is None:
            self._step = asyncio.create_task(_advance(self._iterator))
        await asyncio.wait(
            {self._step, self._gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if self._gone.done():
            raise ClientGone
        if not self._step.done():
            return Pause.QUIET
        step, self._step = self._step, None
        self._ended = step.exception() is not None or step.result() is Pause.END
        return step.result()


class Delivery(Generic[E]):
    """An ASGI response that runs one generation for one client."""

    def __init__(
        self,
        generation: Generation[E],
        encoder: Encoder[E],
        *,
        stream: bool,
        pace: Pace,
        headers: Mapping[str, str],
        framing: Framing | None = None,
    ) -> None:
        self._generation = generation
        self._encoder = encoder
        self._framing = framing or OpenAIFraming()
        self._stream = stream
        self._pace = pace
        self._headers = dict(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Deliver; errors before the headers are raised, a client that left ends it quietly."""
        with contextlib.suppress(ClientGone):
            async with Events(self._generation, receive) as events:
                if self._stream:
                    await self._deliver_stream(events, send)
                else:
                    await self._deliver_whole(events, scope, receive, send)

    async def _deliver_whole(
        self, events: Events[E], scope: Scope, receive: Receive, send: Send
    ) -> None:
        while not isinstance(item := await events.next(), Pause):
            self._encoder.gather(item)
        headers = {**self._headers, **self._encoder.headers()}
        await json_response(self._encoder.body(), headers=headers)(scope, receive, send)

    async def _deliver_stream(self, events: Events[E], send: Send) -> None:
        item = await events.next(self._pace.headers_after_s)
        await _start_stream(send, self._headers)
        try:
            while item is not Pause.END:
                frames = self._frames(item)
                if frames:
                    await _send_body(send, frames, more=True)
                item = await events.next(self._pace.ping_s)
            await _send_body(send, self._framing.closing(), more=False)
        except CivettaError as error:
            await _send_body(send, self._framing.failure(error), more=False)

    def _frames(self, item: E | Pause) -> bytes:
        return self._framing.ping() if isinstance(item, Pause) else self._encoder.frames(item)


async def _advance(iterator: AsyncIterator[E]) -> E | Pause:
    return await anext(iterator, Pause.END)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start_stream(send: Send, headers: Mapping[str, str]) -> None:
    fields = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",  # nginx would hold events back otherwise
        **headers,
    }
    raw = [
        (name.lower().encode("latin-1"), text.encode("latin-1")) for name, text in fields.items()
    ]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
