"""POST /v1/chat/completions: a conversation answered, buffered or as server-sent events."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from civetta.api.accounting import LiveTimings, accounts, server_timing, timings_payload
from civetta.api.asking import client_for, options_for
from civetta.api.chat_fields import ChatFields, conversation_of, template_options
from civetta.api.choices import Choices, ChoicesEncoder, check_choices
from civetta.api.delivery import Delivery, broken_off
from civetta.api.fields import bias_of, budget_of, sampling_of, stops_of
from civetta.api.ignored import ignored_header
from civetta.api.logprobs import chat_entry
from civetta.api.service import check_model, engine_of, model_id
from civetta.api.wire import event, read_request
from civetta.chat.json_text import json_text
from civetta.chat.reply import ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from civetta.engine.client import ReplyDelta, ReplyEnd, ReplyEvent
from civetta.engine.protocol import Progress, Started
from civetta.types import FinishReason

if TYPE_CHECKING:
    from starlette.requests import Request

    from civetta.api.logprobs import TokenBytes
    from civetta.chat.message import ToolCall
    from civetta.chat.reply import Delta
    from civetta.engine.client import ReplyOptions
    from civetta.options import Settings
    from civetta.types import Usage


async def chat_completions(request: Request) -> Delivery[Any]:
    """POST /v1/chat/completions: answer a conversation; whole or as server-sent events."""
    engine = engine_of(request)
    settings: Settings = request.app.state.settings
    fields, dropped = await read_request(request, ChatFields)
    fields.check()
    check_model(request, fields.model)
    conversation, unused = conversation_of(
        fields, allow_image_urls=settings.server.allow_image_urls
    )
    options = reply_options(fields, settings, request)
    client, n = client_for(request), check_choices(fields.n)
    ids = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": model_id(request),
    }
    encoders = [
        ChatEncoder(
            ids,
            index=index,
            tokens=None if options.logprobs is None else engine.tokenizer,
            include_usage=n == 1 and fields.wants_usage,
            include_progress=bool(fields.return_progress),
            timeout_s=options.timeout_s,
        )
        for index in range(n)
    ]
    if n == 1:
        streams = [await client.generate(conversation, options)]
    else:
        streams = await client.generate_choices(conversation, options, n)
    constraint = streams[0].request.constraint
    delivery: dict[str, Any] = {
        "stream": bool(fields.stream),
        "pace": request.app.state.pace,
        "headers": ignored_header(request, dropped + unused, constraint),
    }
    if n == 1:
        return Delivery(streams[0], encoders[0], **delivery)
    encoder = ChoicesEncoder(encoders, per_prompt=n, include_usage=fields.wants_usage)
    return Delivery(Choices(streams), encoder, **delivery)


def reply_options(fields: ChatFields, settings: Settings, request: Request) -> ReplyOptions:
    """What the fields ask for, over the server's defaults. Raises RequestInvalid."""
    return options_for(
        request,
        template=template_options(fields, settings.reasoning),
        sampling=sampling_of(fields),
        logprobs=fields.logprob_count,
        logit_bias=bias_of(fields.logit_bias),
        max_tokens=budget_of(
            settings.sampling.max_tokens,
            max_completion_tokens=fields.max_completion_tokens,
            max_tokens=fields.max_tokens,
        ),
        stop=stops_of(fields.stop),
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        tool_choice=fields.choice,
        answer_format=fields.answer_format,
        thinking_budget=fields.budget,
        use_cache=fields.cache_prompt is not False,
    )


class ChatEncoder:
    """Turns reply events of one choice into `chat.completion.chunk` objects or a `chat.completion`.

    `ids`: id, created and model, which all choices of a request share.
    """

    def __init__(
        self,
        ids: dict[str, Any],
        *,
        index: int,
        tokens: TokenBytes | None,
        include_usage: bool,
        include_progress: bool,
        timeout_s: float | None,
    ) -> None:
        self._ids, self._index = ids, index
        self._tokens = tokens
        self._include_usage = include_usage
        self._timeout_s = timeout_s
        self._timings = LiveTimings() if include_progress else None
        self._logprobs: list[dict[str, Any]] = []
        self._end: ReplyEnd | None = None

    def frames(self, item: ReplyEvent) -> bytes:
        """The role, then a chunk for each delta, then reason and timings, then usage if asked."""
        match item:
            case Started():
                if self._timings is not None:
                    self._timings.see(item)
                return self._chunk({"role": "assistant", "content": ""})
            case Progress():
                if self._timings is None:
                    return b""
                return self._chunk({}, prompt_progress=self._timings.progress(item))
            case ReplyDelta():
                return self._deltas(item)
            case ReplyEnd():
                return self._last(self._finish(item))

    def gather(self, item: ReplyEvent) -> None:
        """Collect log-probabilities; raises the error of a generation that was broken off."""
        if isinstance(item, ReplyDelta):
            self._logprobs += self._entries(item)
        elif isinstance(item, ReplyEnd):
            self._finish(item)

    @property
    def usage(self) -> Usage | None:
        """What the choice took; None before its end."""
        return None if self._end is None else self._end.usage

    def body(self) -> dict[str, Any]:
        """The whole `chat.completion` object."""
        end = self._end
        assert end is not None, "a reply ends with ReplyEnd"
        message: dict[str, Any] = {"role": "assistant", "content": end.content}
        if end.reasoning:
            message["reasoning_content"] = end.reasoning
        if end.tool_calls:
            message["content"] = end.content or None
            message["tool_calls"] = [_tool_call(call) for call in end.tool_calls]
        choice = {
            "index": self._index,
            "message": message,
            "logprobs": None if self._tokens is None else {"content": self._logprobs},
            "finish_reason": end.finish_reason.value,
        }
        return {
            **self._ids,
            "object": "chat.completion",
            "choices": [choice],
            **accounts(end.usage),
        }

    def headers(self) -> dict[str, str]:
        """The durations."""
        assert self._end is not None, "a reply ends with ReplyEnd"
        return {"Server-Timing": server_timing(self._end.usage)}

    def _deltas(self, item: ReplyDelta) -> bytes:
        payloads = [payload for delta in item.deltas if (payload := _delta(delta)) is not None]
        entries = self._entries(item)
        if entries and not payloads:
            payloads = [{}]
        frames = b""
        for payload in payloads:
            frames += self._chunk(payload, logprobs={"content": entries} if entries else None)
            entries = []
        return frames

    def _last(self, end: ReplyEnd) -> bytes:
        timings = timings_payload(end.usage)
        frames = self._chunk({}, reason=end.finish_reason.value, timings=timings)
        return frames + event(self.usage_chunk(end.usage)) if self._include_usage else frames

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The chunk that ends a stream with its usage."""
        return {
            **self._ids,
            "object": "chat.completion.chunk",
            "choices": [],
            **accounts(usage),
        }

    def _chunk(
        self, delta: dict[str, Any], *, reason: str | None = None, logprobs: Any = None, **more: Any
    ) -> bytes:
        choice = {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        return event({**self._ids, "object": "chat.completion.chunk", "choices": [choice], **more})

    def _entries(self, item: ReplyDelta) -> list[dict[str, Any]]:
        """Log-probabilities belong to the answer; tokens of the thought have none."""
        if self._tokens is None or item.logprob is None or item.in_reasoning:
            return []
        return [chat_entry(self._tokens, item.logprob)]

    def _finish(self, end: ReplyEnd) -> ReplyEnd:
        if end.finish_reason is FinishReason.CANCELLED:
            raise broken_off(end.cause, self._timeout_s)
        self._end = end
        return end


def _delta(delta: Delta) -> dict[str, Any] | None:
    match delta:
        case ReasoningDelta():
            return {"reasoning_content": delta.text}
        case ContentDelta():
            return {"content": delta.text}
        case ToolCallStart():
            function = {"name": delta.name, "arguments": ""}
            call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case ToolArgumentsDelta():
            part = {"index": delta.index, "function": {"arguments": delta.json_fragment}}
            return {"tool_calls": [part]}
        case _:
            return None


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json_text(call.mapping)}
    return {"id": call.id, "type": "function", "function": function}
