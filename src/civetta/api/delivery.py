"""Bringing a generation to its client, whole or as server-sent events, and noticing when it left.

One task waits on `receive()` for the disconnect; the moment it comes the generation is cancelled,
during queueing, prefill and decode alike. Headers of a stream are held back until its first event
(the request has left the queue) or `headers_after_s`, so that early failures get a proper status.
A third task sends signs of life, whatever the generation does: no task is made for a token.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from civetta.api.account import account_of
from civetta.api.wire import DONE, PING, error_payload, event
from civetta.errors import CivettaError, EngineClosed, RequestAborted, RequestTimeout
from civetta.types import CancelCause

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from starlette.types import Receive, Scope, Send

    from civetta.api.account import Account

TURN_FRAMES = 16
"""After so many, other tasks get their turn, even if the engine is faster than the client reads."""

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
        account = account_of(scope)
        deliver = self._deliver_stream if self._stream else self._deliver_whole
        work = asyncio.create_task(deliver(account, send))
        gone = asyncio.create_task(_until_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                account.reason = "client_gone"
        finally:
            if not work.done() or work.exception() is not None:
                self._generation.cancel()
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _deliver_whole(self, account: Account, send: Send) -> None:
        turn = 0
        async for item in self._generation:
            account.see(item)
            self._encoder.gather(item)
            turn = (turn + 1) % TURN_FRAMES
            if not turn:
                await asyncio.sleep(0)
        headers = {**self._headers, **self._encoder.headers()}
        await _send_whole(send, self._encoder.body(), headers)

    async def _deliver_stream(self, account: Account, send: Send) -> None:
        line = EventLine(send, self._framing, self._pace, self._headers, account)
        keeper = asyncio.create_task(line.keep_alive())
        try:
            async for item in self._generation:
                account.see(item)
                await line.write(self._encoder.frames(item))
                if line.frames % TURN_FRAMES == 0:
                    await asyncio.sleep(0)
            await line.end(self._framing.closing())
        except CivettaError as error:
            if not line.begun:
                raise
            account.failed(error)
            await line.end(self._framing.failure(error))
        finally:
            keeper.cancel()


class EventLine:
    """The body of a stream: headers before the first frame, signs of life in its silences."""

    def __init__(
        self,
        send: Send,
        framing: Framing,
        pace: Pace,
        headers: Mapping[str, str],
        account: Account,
    ) -> None:
        self._send, self._framing, self._pace = send, framing, pace
        self._headers, self._account = headers, account
        self._clock = asyncio.get_running_loop().time
        self._wrote_s = 0.0
        self._over = False
        self.begun = False
        self.frames = 0

    async def write(self, frames: bytes) -> None:
        """Send frames, possibly none; the first call sends the headers."""
        if not self.begun:
            await self._begin()
        if frames:
            self.frames += 1
            self._wrote_s = self._clock()
            await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def end(self, frames: bytes) -> None:
        """Send the last frames."""
        if not self.begun:
            await self._begin()
        self._over = True
        await self._send({"type": "http.response.body", "body": frames, "more_body": False})

    async def keep_alive(self) -> None:
        """Begin after `headers_after_s` at the latest, then fill every `ping_s` of silence."""
        await asyncio.sleep(self._pace.headers_after_s)
        while not self._over:
            quiet_s = self._clock() - self._wrote_s
            if not self.begun or quiet_s >= self._pace.ping_s:
                await self.write(self._framing.ping() if self.begun else b"")
                quiet_s = 0.0
            await asyncio.sleep(self._pace.ping_s - quiet_s)

    async def _begin(self) -> None:
        self.begun = True
        self._wrote_s = self._clock()
        fields = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would hold events back otherwise
            "server-timing": f"queue;dur={self._account.age_s() * 1000:.3f}",
            **self._headers,
        }
        await self._send({"type": "http.response.start", "status": 200, "headers": _raw(fields)})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_whole(send: Send, payload: object, headers: Mapping[str, str]) -> None:
    body = msgspec.json.encode(payload)
    fields = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    await send({"type": "http.response.start", "status": 200, "headers": _raw(fields)})
    await send({"type": "http.response.body", "body": body})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
    ]
