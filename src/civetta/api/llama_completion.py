"""POST /completion: llama.cpp's own endpoint, for clients that speak nothing else.

A stream is plain events without a closing marker; the last one has `stop: true` and everything
that a buffered reply has.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from civetta.api.accounting import LiveTimings, server_timing, timings_payload
from civetta.api.delivery import Delivery, OpenAIFraming, broken_off
from civetta.api.fields import (
    SamplingFields,
    budget_of,
    logprobs_in_range,
    neutral,
    refuse,
)
from civetta.api.ignored import ignored_header
from civetta.api.llama_bias import llama_bias
from civetta.api.logprobs import llama_entry
from civetta.api.plain_request import constraint_for, plain_request
from civetta.api.prompt_ids import mixed_prompt_ids
from civetta.api.service import check_model, engine_of, model_id
from civetta.api.wire import event, read_request
from civetta.chat.answer_format import AnswerFormat
from civetta.engine.protocol import Event, Finished, GenerateRequest, Progress, TokenEvent
from civetta.types import FinishReason

if TYPE_CHECKING:
    from starlette.requests import Request

    from civetta.api.logprobs import TokenBytes
    from civetta.options import Settings
    from civetta.types import TokenLogprob


class LlamaFields(SamplingFields, kw_only=True):
    """The body of a request, in llama.cpp's names."""

    prompt: str | list[Any]
    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    n_probs: int | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    # Nothing is shifted out of the context and no reply is tied to a slot: any value is right.
    n_keep: int | None = None
    id_slot: int | None = None
    # llama.cpp's, taken at the values that switch them off.
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    typical_p: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_multiplier: float | None = None
    xtc_probability: float | None = None
    n_indent: int | None = None
    t_max_predict_ms: int | None = None
    post_sampling_probs: bool | None = None
    lora: list[Any] | None = None
    logit_bias: list[Any] | dict[str, Any] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse what is not supported; raises RequestInvalid naming the field."""
        for name, allowed in NEUTRAL.items():
            neutral(name, getattr(self, name), allowed, "it is not supported")
        if self.grammar and self.json_schema is not None:
            refuse("grammar", "json_schema says already what the answer is; send one of them")

    @property
    def answer_format(self) -> AnswerFormat | None:
        """What the text is bound to, from its first token on."""
        if self.grammar:
            return AnswerFormat(kind="gbnf", text=self.grammar, param="grammar")
        if self.json_schema is None:
            return None
        return AnswerFormat(kind="json_schema", schema=self.json_schema, param="json_schema")


NEUTRAL: dict[str, object] = {
    "dynatemp_range": 0,
    "typical_p": 1,
    "mirostat": 0,
    "dry_multiplier": 0,
    "xtc_probability": 0,
    "n_indent": 0,
    "t_max_predict_ms": 0,
    "post_sampling_probs": False,
    "lora": [],
}
"""Fields that are known, not acted on, and taken at these values only."""


async def llama_completion(request: Request) -> Delivery[Event]:
    """POST /completion: go on from a prompt, in llama.cpp's shapes; whole or as events."""
    engine = engine_of(request)
    fields, dropped = await read_request(request, LlamaFields)
    fields.check()
    check_model(request, fields.model)
    prompt_ids = await mixed_prompt_ids(engine, fields.prompt)
    asked = _generate_request(request, fields, prompt_ids)
    constraint = await constraint_for(fields.answer_format)
    bias = await asyncio.to_thread(llama_bias, fields.logit_bias, engine.tokenizer)
    sampling = replace(asked.sampling, logit_bias=bias)
    generate = replace(asked, constraint=constraint, sampling=sampling)
    encoder = LlamaEncoder(
        model=model_id(request),
        fields=fields,
        asked=generate,
        tokens=engine.tokenizer if generate.sampling.logprobs is not None else None,
        n_ctx=engine.info.context_tokens,
    )
    return Delivery(
        await asyncio.to_thread(engine.submit, generate),
        encoder,
        stream=bool(fields.stream),
        pace=request.app.state.pace,
        headers=ignored_header(request, dropped, constraint),
        framing=LlamaFraming(),
    )


class LlamaFraming(OpenAIFraming):
    """OpenAI's, without the closing marker."""

    def closing(self) -> bytes:
        """Nothing: the last event says `stop: true`."""
        return b""


class LlamaEncoder:
    """Turns engine events into llama.cpp's objects."""

    def __init__(
        self,
        *,
        model: str,
        fields: LlamaFields,
        asked: GenerateRequest,
        tokens: TokenBytes | None,
        n_ctx: int,
    ) -> None:
        self._model, self._fields, self._asked = model, fields, asked
        self._tokens, self._n_ctx = tokens, n_ctx
        self._timings = LiveTimings()
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._probabilities: list[dict[str, Any]] = []
        self._has_new_line = False
        self._end: Finished | None = None

    def frames(self, item: Event) -> bytes:
        """A partial object for each token, progress if asked for, the whole one at the end."""
        self._timings.see(item)
        if isinstance(item, TokenEvent):
            self._take(item)
            self._ids.append(item.token_id)  # of a token whose text is held back, for later
            probabilities = self._entries(item.logprob)
            if not item.text and not probabilities:
                return b""
            token_ids, self._ids = self._ids, []
            if probabilities:
                return self._partial(item.text, token_ids, completion_probabilities=probabilities)
            return self._partial(item.text, token_ids)
        if isinstance(item, Finished):
            self._finish(item)
            return event({**self._whole(), "content": item.text, "tokens": self._ids})
        if not isinstance(item, Progress) or not self._fields.return_progress:
            return b""
        return self._partial("", [], prompt_progress=self._timings.progress(item))

    def gather(self, item: Event) -> None:
        """Collect; raises the error of a generation that was broken off."""
        if isinstance(item, TokenEvent):
            self._take(item)
            self._texts.append(item.text)
            self._ids.append(item.token_id)
            self._probabilities += self._entries(item.logprob)
        elif isinstance(item, Finished):
            self._finish(item)
            self._texts.append(item.text)

    def body(self) -> object:
        """The whole object."""
        whole = self._whole()
        whole["content"] = "".join(self._texts)
        whole["tokens"] = self._ids if self._fields.return_tokens else []
        if self._tokens is not None:
            whole["completion_probabilities"] = self._probabilities
        return whole

    def headers(self) -> dict[str, str]:
        """The durations."""
        assert self._end is not None, "a generation ends with Finished"
        return {"Server-Timing": server_timing(self._end.usage)}

    def _take(self, token: TokenEvent) -> None:
        self._has_new_line = self._has_new_line or "\n" in token.text

    def _partial(self, content: str, token_ids: list[int], **more: Any) -> bytes:
        partial = {
            "index": 0,
            "content": content,
            "tokens": token_ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._timings.predicted,
            "tokens_evaluated": self._timings.prompt_tokens,
            **more,
        }
        if self._fields.timings_per_token:
            partial["timings"] = self._timings.payload()
        return event(partial)

    def _whole(self) -> dict[str, Any]:
        end = self._end
        assert end is not None, "a generation ends with Finished"
        return {
            "index": 0,
            "content": "",
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": end.usage.completion_tokens,
            "tokens_evaluated": end.usage.prompt_tokens,
            "tokens_cached": end.usage.cached_tokens,
            "generation_settings": self._settings(),
            "prompt": self._fields.prompt if isinstance(self._fields.prompt, str) else "",
            "has_new_line": self._has_new_line,
            "truncated": False,  # a prompt that does not fit is refused
            "stop_type": _stop_type(end),
            "stopping_word": end.stop or "",
            "timings": timings_payload(end.usage),
        }

    def _settings(self) -> dict[str, Any]:
        sampling = asdict(self._asked.sampling)
        n_probs = sampling.pop("logprobs") or 0
        budget = -1 if self._asked.max_tokens is None else self._asked.max_tokens
        return {
            **sampling,
            "n_probs": n_probs,
            "n_predict": budget,
            "max_tokens": budget,
            "n_ctx": self._n_ctx,
            "stop": list(self._asked.stop),
            "ignore_eos": self._asked.ignore_eos,
            "grammar": self._fields.grammar or "",
            "stream": bool(self._fields.stream),
        }

    def _entries(self, logprob: TokenLogprob | None) -> list[dict[str, Any]]:
        if self._tokens is None or logprob is None:
            return []
        return [llama_entry(self._tokens, logprob)]

    def _finish(self, item: Finished) -> None:
        if item.reason is FinishReason.CANCELLED:
            raise broken_off(item.cause, self._asked.timeout_s)
        self._has_new_line = self._has_new_line or "\n" in item.text
        self._end = item


def _stop_type(end: Finished) -> str:
    if end.reason is FinishReason.LENGTH:
        return "limit"
    return "eos" if end.stop is None else "word"


def _generate_request(
    request: Request, fields: LlamaFields, prompt_ids: tuple[int, ...]
) -> GenerateRequest:
    settings: Settings = request.app.state.settings
    n_probs = logprobs_in_range("n_probs", fields.n_probs or 0)
    budget = budget_of(
        settings.sampling.max_tokens, n_predict=fields.n_predict, max_tokens=fields.max_tokens
    )
    asked = plain_request(request, fields, max_tokens=budget, logprobs=n_probs or None)
    return replace(asked, prompt_ids=prompt_ids)
