"""POST /v1/completions: a prompt of text or token ids, continued without any chat template."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from civetta.api.accounting import server_timing, timings_payload, usage_payload
from civetta.api.delivery import Delivery, broken_off
from civetta.api.fields import (
    SharedFields,
    bias_of,
    budget_of,
    logprobs_in_range,
    neutral,
    sampling_of,
    stops_of,
)
from civetta.api.logprobs import LegacyLogprobs
from civetta.api.prompt_ids import prompt_ids
from civetta.api.service import check_model, client_of, engine_of, model_id, timeout_of
from civetta.api.wire import event, ignored_header, read_request
from civetta.decode.presets import resolve, server_overrides
from civetta.engine.protocol import Event, Finished, GenerateRequest, TokenEvent
from civetta.types import FinishReason

if TYPE_CHECKING:
    from starlette.requests import Request

    from civetta.api.logprobs import TokenBytes
    from civetta.engine.protocol import EngineClient
    from civetta.options import Settings
    from civetta.types import Usage


class CompletionFields(SharedFields, kw_only=True):
    """The body of a request."""

    prompt: str | list[Any]
    logprobs: int | None = None
    ignore_eos: bool | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Refuse what is not supported; raises RequestInvalid naming the field."""
        self.check_neutral()
        neutral("echo", self.echo, False, "the prompt is not repeated")
        neutral("best_of", self.best_of, 1, "one choice a request is made")
        neutral("suffix", self.suffix, "", "the model does not fill in the middle")


async def completions(request: Request) -> Delivery[Event]:
    """POST /v1/completions: go on from a prompt; whole or as server-sent events."""
    engine = engine_of(request)
    fields, dropped = await read_request(request, CompletionFields)
    fields.check()
    if fields.model is not None:
        check_model(request, fields.model)
    generate = await _generate_request(request, engine, fields)
    encoder = CompletionEncoder(
        model=model_id(request),
        tokens=None if generate.sampling.logprobs is None else engine.tokenizer,
        include_usage=fields.wants_usage,
        timeout_s=generate.timeout_s,
    )
    return Delivery(
        engine.submit(generate),
        encoder,
        stream=bool(fields.stream),
        pace=request.app.state.pace,
        headers=ignored_header(dropped),
    )


class CompletionEncoder:
    """Turns engine events into `text_completion` objects."""

    def __init__(
        self,
        *,
        model: str,
        tokens: TokenBytes | None,
        include_usage: bool,
        timeout_s: float | None,
    ) -> None:
        self._base = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs = None if tokens is None else LegacyLogprobs(tokens)
        self._include_usage = include_usage
        self._timeout_s = timeout_s
        self._offset = 0
        self._texts: list[str] = []
        self._end: Finished | None = None

    def frames(self, item: Event) -> bytes:
        """A chunk for each token that has something to say, the last with reason and timings."""
        if isinstance(item, TokenEvent):
            text = self._take(item)
            logprobs = self._logprobs and self._logprobs.take()
            if not text and logprobs is None:
                return b""
            return event({**self._base, "choices": [_choice(text, logprobs, None)]})
        if not isinstance(item, Finished):
            return b""
        usage = self._finish(item)
        last = {
            **self._base,
            "choices": [_choice(item.text, None, item.reason.value)],
            "timings": timings_payload(usage),
        }
        frames = event(last)
        if self._include_usage:
            frames += event({**self._base, "choices": [], "usage": usage_payload(usage)})
        return frames

    def gather(self, item: Event) -> None:
        """Collect the text; raises the error of a generation that was broken off."""
        if isinstance(item, TokenEvent):
            self._texts.append(self._take(item))
        elif isinstance(item, Finished):
            self._finish(item)
            self._texts.append(item.text)

    def body(self) -> object:
        """The whole `text_completion` object."""
        assert self._end is not None, "a generation ends with Finished"
        logprobs = self._logprobs and self._logprobs.take()
        choice = _choice("".join(self._texts), logprobs, self._end.reason.value)
        return {
            **self._base,
            "choices": [choice],
            "usage": usage_payload(self._end.usage),
            "timings": timings_payload(self._end.usage),
        }

    def headers(self) -> dict[str, str]:
        """The durations."""
        assert self._end is not None, "a generation ends with Finished"
        return {"Server-Timing": server_timing(self._end.usage)}

    def _take(self, token: TokenEvent) -> str:
        if self._logprobs is not None and token.logprob is not None:
            self._logprobs.add(token.logprob, self._offset)
        self._offset += len(token.text)
        return token.text

    def _finish(self, item: Finished) -> Usage:
        if item.reason is FinishReason.CANCELLED:
            raise broken_off(item.cause, self._timeout_s)
        self._end = item
        return item.usage


def _choice(text: str, logprobs: object, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}


async def _generate_request(
    request: Request, engine: EngineClient, fields: CompletionFields
) -> GenerateRequest:
    settings: Settings = request.app.state.settings
    logprobs = fields.logprobs
    sampling = resolve(
        sampling_of(fields),
        server_overrides(settings.sampling),
        thinking=settings.reasoning.think != "off",
        logprobs=None if logprobs is None else logprobs_in_range("logprobs", logprobs),
        logit_bias=bias_of(fields.logit_bias),
    )
    return GenerateRequest(
        request_id=request.state.request_id,
        prompt_ids=await prompt_ids(engine, fields.prompt),
        sampling=sampling,
        max_tokens=budget_of(settings.sampling.max_tokens, max_tokens=fields.max_tokens),
        stop=stops_of(fields.stop),
        ignore_eos=bool(fields.ignore_eos),
        timeout_s=timeout_of(settings),
        use_cache=fields.cache_prompt is not False,
        client_id=client_of(request),
    )
