"""Reply events to the events of the Messages API, or to one message object."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any

from civetta.api.accounting import server_timing, timings_payload
from civetta.api.delivery import broken_off
from civetta.api.messages.errors import error_payload
from civetta.api.messages.signature import sign
from civetta.api.wire import typed_event
from civetta.chat.reply import ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from civetta.engine.client import ReplyDelta, ReplyEnd
from civetta.engine.protocol import Started
from civetta.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from civetta.engine.client import ReplyEvent
    from civetta.errors import CivettaError
    from civetta.types import Usage

_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}
_PING = typed_event({"type": "ping"})


class MessageEncoder:
    """One request's encoder and the framing of its stream.

    A thought, every stretch of text, and every call is a block. Blocks of the buffered message are
    those that the events of the stream build up. `shown`: thoughts are sent, not only signatures.
    """

    def __init__(
        self, *, model: str, request_id: str, shown: bool, timeout_s: float | None
    ) -> None:
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_payload(0, 0, 0),
        }
        self._request_id = request_id
        self._shown = shown
        self._timeout_s = timeout_s
        self._open = ""  # the type of the last block, while it grows
        self._text: list[str] = []  # what it has
        self._end: ReplyEnd | None = None

    def frames(self, item: ReplyEvent) -> bytes:
        """message_start, then blocks as they come, then message_delta and message_stop."""
        match item:
            case Started():
                usage = usage_payload(item.prompt_tokens, item.cached_tokens, 0)
                message = {**self._message, "usage": usage}
                return typed_event({"type": "message_start", "message": message})
            case ReplyDelta():
                return _framed(self._add(item))
            case ReplyEnd():
                return _framed([*self._finish(item), *self._closing_events()])
            case _:
                return b""

    def gather(self, item: ReplyEvent) -> None:
        """Build the blocks; raises the error of a generation that was broken off."""
        if isinstance(item, ReplyDelta):
            list(self._add(item))
        elif isinstance(item, ReplyEnd):
            list(self._finish(item))

    def body(self) -> object:
        """The whole message object."""
        return self._message

    def headers(self) -> dict[str, str]:
        """The durations, and the request's id as Anthropic's clients look for it."""
        assert self._end is not None, "a reply ends with ReplyEnd"
        return {"Server-Timing": server_timing(self._end.usage), "request-id": self._request_id}

    def ping(self) -> bytes:
        """A `ping` event."""
        return _PING

    def closing(self) -> bytes:
        """Nothing: message_stop has come."""
        return b""

    def failure(self, error: CivettaError) -> bytes:
        """An `error` event."""
        return typed_event(error_payload(error, self._request_id))

    def _add(self, reply: ReplyDelta) -> Iterator[dict[str, Any]]:
        for delta in reply.deltas:
            match delta:
                case ReasoningDelta():
                    yield from self._thought(delta.text)
                case ContentDelta():
                    yield from self._start("text", {"type": "text", "text": ""}, reopen=False)
                    yield self._grow({"type": "text_delta", "text": delta.text}, delta.text)
                case ToolCallStart():
                    call_id = f"toolu_{delta.id.removeprefix('call_')}"
                    block = {"type": "tool_use", "id": call_id, "name": delta.name, "input": {}}
                    yield from self._start("tool_use", block, reopen=True)
                case ToolArgumentsDelta():
                    part = delta.json_fragment
                    yield self._grow({"type": "input_json_delta", "partial_json": part}, part)

    def _thought(self, text: str) -> Iterator[dict[str, Any]]:
        block = {"type": "thinking", "thinking": "", "signature": ""}
        yield from self._start("thinking", block, reopen=False)
        if self._shown:
            yield self._grow({"type": "thinking_delta", "thinking": text}, text)
        else:
            self._text.append(text)

    def _start(self, kind: str, block: dict[str, Any], *, reopen: bool) -> Iterator[dict[str, Any]]:
        if self._open == kind and not reopen:
            return
        yield from self._stop()
        self._open = kind
        self._message["content"].append(block)
        yield self._at("content_block_start", content_block=dict(block))

    def _grow(self, delta: dict[str, Any], text: str) -> dict[str, Any]:
        self._text.append(text)
        return self._at("content_block_delta", delta=delta)

    def _stop(self) -> Iterator[dict[str, Any]]:
        kind, self._open = self._open, ""
        text, self._text = "".join(self._text), []
        if not kind:
            return
        block = self._message["content"][-1]
        if kind == "thinking":
            block["thinking"] = text if self._shown else ""
            block["signature"] = sign(text, shown=self._shown)
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield self._at("content_block_delta", delta=delta)
        elif kind == "tool_use":
            block["input"] = json.loads(text)
        else:
            block["text"] = text
        yield self._at("content_block_stop")

    def _at(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self._message["content"]) - 1, **more}

    def _finish(self, end: ReplyEnd) -> Iterator[dict[str, Any]]:
        if end.finish_reason is FinishReason.CANCELLED:
            raise broken_off(end.cause, self._timeout_s)
        yield from self._stop()
        self._end = end
        reason = _REASONS[end.finish_reason]
        if end.stop is not None and reason == "end_turn":
            reason = "stop_sequence"
            self._message["stop_sequence"] = end.stop
        self._message["stop_reason"] = reason
        self._message["usage"] = usage_of(end.usage)
        self._message["timings"] = timings_payload(end.usage)

    def _closing_events(self) -> list[dict[str, Any]]:
        message = self._message
        delta = {key: message[key] for key in ("stop_reason", "stop_sequence")}
        took = {key: message[key] for key in ("usage", "timings")}
        return [{"type": "message_delta", "delta": delta, **took}, {"type": "message_stop"}]


def usage_of(usage: Usage) -> dict[str, Any]:
    """The `usage` object of a message that ended."""
    payload = usage_payload(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    return {**payload, "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}}


def usage_payload(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Tokens as Anthropic counts them: `input_tokens` are those that were not read from a cache."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
        "service_tier": "standard",
    }


def _framed(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(typed_event(item) for item in events)
