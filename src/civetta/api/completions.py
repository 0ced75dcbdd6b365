"""POST /v1/completions: prompts of text or token ids, continued without any chat template."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from civetta.api.accounting import LiveTimings, accounts, server_timing, timings_payload
from civetta.api.choices import Choices, ChoicesEncoder, check_choices
from civetta.api.delivery import Delivery, broken_off
from civetta.api.fields import (
    SharedFields,
    bias_of,
    budget_of,
    logprobs_in_range,
    neutral,
)
from civetta.api.format_fields import FormatFields, format_of
from civetta.api.ignored import ignored_header
from civetta.api.logprobs import LegacyLogprobs
from civetta.api.plain_request import constraint_for, plain_request
from civetta.api.prompt_ids import several_prompt_ids
from civetta.api.service import check_model, engine_of, model_id
from civetta.api.wire import event, read_request
from civetta.chat.tokenizer import IncrementalDecoder
from civetta.engine.client import choices_of, submit_all
from civetta.engine.protocol import (
    Event,
    Finished,
    GenerateRequest,
    Progress,
    PromptLogprobs,
    Started,
    TokenEvent,
)
from civetta.types import FinishReason

if TYPE_CHECKING:
    from starlette.requests import Request

    from civetta.api.choices import Numbered
    from civetta.chat.tokenizer import Tokenizer
    from civetta.options import Settings
    from civetta.types import TokenLogprob, Usage


class CompletionFields(SharedFields, kw_only=True):
    """The body of a request."""

    prompt: str | list[Any]
    logprobs: int | None = None
    ignore_eos: bool | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    return_progress: bool | None = None
    response_format: FormatFields | None = None

    def check(self) -> None:
        """Refuse what is not supported; raises RequestInvalid naming the field."""
        self.check_neutral()
        neutral("suffix", self.suffix, "", "the model does not fill in the middle")

    @property
    def logprob_count(self) -> int | None:
        """How many rivals to report with each token; None when logprobs are off."""
        return None if self.logprobs is None else logprobs_in_range("logprobs", self.logprobs)


async def completions(request: Request) -> Delivery[Event] | Delivery[Numbered[Event]]:
    """POST /v1/completions: go on from a prompt; whole or as server-sent events."""
    engine = engine_of(request)
    fields, dropped = await read_request(request, CompletionFields)
    fields.check()
    check_model(request, fields.model)
    prompts = await several_prompt_ids(engine, fields.prompt)
    n = check_choices(fields.n, prompts=len(prompts), best_of=fields.best_of)
    form = None if fields.response_format is None else format_of(fields.response_format)
    first = replace(_generate_request(request, fields), constraint=await constraint_for(form))
    asked = [choice for ids in prompts for choice in choices_of(replace(first, prompt_ids=ids), n)]
    one = len(asked) == 1
    base = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model_id(request),
    }
    encoders = [
        CompletionEncoder(
            base,
            spec,
            index=index,
            tokenizer=engine.tokenizer if fields.echo or fields.logprobs is not None else None,
            echo=bool(fields.echo),
            include_usage=one and fields.wants_usage,
            include_progress=bool(fields.return_progress),
        )
        for index, spec in enumerate(asked)
    ]
    streams = await asyncio.to_thread(submit_all, engine, asked)
    delivery: dict[str, Any] = {
        "stream": bool(fields.stream),
        "pace": request.app.state.pace,
        "headers": ignored_header(request, dropped, first.constraint),
    }
    if one:
        return Delivery(streams[0], encoders[0], **delivery)
    encoder = ChoicesEncoder(encoders, per_prompt=n, include_usage=fields.wants_usage)
    return Delivery(Choices(streams), encoder, **delivery)


class CompletionEncoder:
    """Turns engine events of one choice into `text_completion` objects.

    With `echo` the prompt is part of the text. `tokenizer` is needed for that and for logprobs.
    """

    def __init__(
        self,
        base: dict[str, Any],
        asked: GenerateRequest,
        *,
        index: int,
        tokenizer: Tokenizer | None,
        echo: bool,
        include_usage: bool,
        include_progress: bool = False,
    ) -> None:
        self._timings = LiveTimings() if include_progress else None
        self._base, self._asked, self._index = base, asked, index
        self._tokenizer, self._include_usage = tokenizer, include_usage
        counts = asked.sampling.logprobs is not None and tokenizer is not None
        self._logprobs = LegacyLogprobs(tokenizer) if counts and tokenizer else None
        self._echo = echo
        self._prompt = IncrementalDecoder(tokenizer, skip_special=False) if tokenizer else None
        self._offset = self._prompt_offset = 0
        self._texts: list[str] = []
        self._end: Finished | None = None

    @property
    def usage(self) -> Usage | None:
        """What the choice took; None before its end."""
        return None if self._end is None else self._end.usage

    def frames(self, item: Event) -> bytes:
        """A chunk for each token that has something to say, the last with reason and timings."""
        if self._timings is not None and isinstance(item, (Started, Progress)):
            self._timings.see(item)
            if isinstance(item, Progress):
                progress = self._timings.progress(item)
                chunk = {"choices": [self._choice("", None, None)], "prompt_progress": progress}
                return event({**self._base, **chunk})
        if not isinstance(item, Finished):
            text = self._take(item)
            logprobs = self._logprobs and self._logprobs.take()
            if not text and logprobs is None:
                return b""
            return event({**self._base, "choices": [self._choice(text, logprobs, None)]})
        usage = self._finish(item)
        last = {
            **self._base,
            "choices": [self._choice(item.text, None, item.reason.value)],
            "timings": timings_payload(usage),
        }
        frames = event(last)
        return frames + event(self.usage_chunk(usage)) if self._include_usage else frames

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The chunk that ends a stream with its usage."""
        return {**self._base, "choices": [], **accounts(usage)}

    def gather(self, item: Event) -> None:
        """Collect the text; raises the error of a generation that was broken off."""
        if isinstance(item, Finished):
            self._finish(item)
            self._texts.append(item.text)
        else:
            self._texts.append(self._take(item))

    def body(self) -> dict[str, Any]:
        """The whole `text_completion` object."""
        assert self._end is not None, "a generation ends with Finished"
        logprobs = self._logprobs and self._logprobs.take()
        choice = self._choice("".join(self._texts), logprobs, self._end.reason.value)
        return {
            **self._base,
            "choices": [choice],
            **accounts(self._end.usage),
        }

    def headers(self) -> dict[str, str]:
        """The durations."""
        assert self._end is not None, "a generation ends with Finished"
        return {"Server-Timing": server_timing(self._end.usage)}

    def _take(self, item: Event) -> str:
        """The text that an event adds; its log-probabilities are collected."""
        match item:
            case Started() if self._echo:
                return self._prompt_text()
            case PromptLogprobs():
                for logprob in item.logprobs:
                    self._add_prompt_token(logprob.token_id, logprob)
            case TokenEvent():
                if self._logprobs is not None and item.logprob is not None:
                    self._logprobs.add(item.logprob, self._offset)
                self._offset += len(item.text)
                return item.text
        return ""

    def _prompt_text(self) -> str:
        assert self._tokenizer is not None, "an echo needs a tokenizer"
        ids = self._asked.prompt_ids
        self._add_prompt_token(ids[0], None)
        text = self._tokenizer.decode(ids)
        self._offset = len(text)
        return text

    def _add_prompt_token(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Told in order; the first one follows nothing and has no probability."""
        if self._logprobs is None or self._prompt is None:
            return
        self._logprobs.add_token(token_id, logprob, self._prompt_offset)
        self._prompt_offset += len(self._prompt.push(token_id))

    def _finish(self, item: Finished) -> Usage:
        if item.reason is FinishReason.CANCELLED:
            raise broken_off(item.cause, self._asked.timeout_s)
        self._end = item
        return item.usage

    def _choice(self, text: str, logprobs: object, reason: str | None) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _generate_request(request: Request, fields: CompletionFields) -> GenerateRequest:
    """The request without its prompt."""
    settings: Settings = request.app.state.settings
    budget: int | None = 0  # an echo alone
    if not fields.echo or fields.max_tokens != 0:
        budget = budget_of(settings.sampling.max_tokens, max_tokens=fields.max_tokens)
    return plain_request(
        request,
        fields,
        max_tokens=budget,
        logprobs=fields.logprob_count,
        logit_bias=bias_of(fields.logit_bias),
        prompt_logprobs=fields.logprob_count if fields.echo else None,
    )
