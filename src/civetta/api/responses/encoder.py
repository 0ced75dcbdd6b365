"""Reply events to the typed events of the Responses API, or to one response object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from civetta.api.accounting import server_timing
from civetta.api.delivery import broken_off
from civetta.api.responses import body
from civetta.api.wire import PING, typed_event
from civetta.engine.client import ReplyDelta, ReplyEnd
from civetta.engine.protocol import Started
from civetta.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from civetta.api.responses.output import Event, OutputItems
    from civetta.engine.client import ReplyEvent
    from civetta.errors import CivettaError


class ResponsesEncoder:
    """One request's encoder and the framing of its stream.

    `response` is the object before anything came; `keep`, if any, is called with the one that
    ended.
    """

    def __init__(
        self,
        response: dict[str, Any],
        output: OutputItems,
        *,
        timeout_s: float | None,
        keep: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._response = response
        self._output = output
        self._timeout_s = timeout_s
        self._keep = keep
        self._sequence = 0
        self._end: ReplyEnd | None = None

    def frames(self, item: ReplyEvent) -> bytes:
        """The events of one step, numbered from 0 without a gap."""
        match item:
            case Started():
                return self._numbered(self._opening())
            case ReplyDelta():
                return self._numbered(self._output.add(item))
            case ReplyEnd():
                events = list(self._finish(item))
                kind = f"response.{self._response['status']}"
                last = {"response": self._response, "timings": self._response["timings"]}
                return self._numbered([*events, {"type": kind, **last}])
            case _:
                return b""

    def gather(self, item: ReplyEvent) -> None:
        """Build the output; raises the error of a generation that was broken off."""
        if isinstance(item, ReplyDelta):
            list(self._output.add(item))
        elif isinstance(item, ReplyEnd):
            list(self._finish(item))

    def body(self) -> object:
        """The whole response object."""
        return self._response

    def headers(self) -> dict[str, str]:
        """The durations."""
        assert self._end is not None, "a reply ends with ReplyEnd"
        return {"Server-Timing": server_timing(self._end.usage)}

    def ping(self) -> bytes:
        """A comment."""
        return PING

    def closing(self) -> bytes:
        """Nothing: the last event says that it is the last."""
        return b""

    def failure(self, error: CivettaError) -> bytes:
        """`response.failed`, after the opening events if there were none yet."""
        opening = [] if self._sequence else self._opening()
        list(self._output.close("incomplete"))  # not told of: the response has it all
        failed = body.failed(self._response, self._output.items, error)
        return self._numbered([*opening, {"type": "response.failed", "response": failed}])

    def _opening(self) -> list[Event]:
        kinds = ("response.created", "response.in_progress")
        return [{"type": kind, "response": self._response} for kind in kinds]

    def _finish(self, end: ReplyEnd) -> Iterable[Event]:
        if end.finish_reason is FinishReason.CANCELLED:
            raise broken_off(end.cause, self._timeout_s)
        cut = end.finish_reason is FinishReason.LENGTH
        yield from self._output.close("incomplete" if cut else "completed")
        self._end = end
        self._response = body.ended(self._response, self._output.items, end)
        if self._keep is not None:
            self._keep(self._response)

    def _numbered(self, events: Iterable[Event]) -> bytes:
        frames = []
        for item in events:  # encoded at once: items grow with the next event
            frames.append(typed_event({**item, "sequence_number": self._sequence}))
            self._sequence += 1
        return b"".join(frames)
