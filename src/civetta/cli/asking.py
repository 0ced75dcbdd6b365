"""What `prompt` and `chat` share: options from flags, the token trace, figures, safe printing."""

from __future__ import annotations

import array
import hashlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from civetta.chat.template import TemplateOptions
from civetta.decode.presets import server_overrides
from civetta.engine.client import ReplyOptions, thinking_budget
from civetta.engine.protocol import TokenEvent
from civetta.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from civetta.chat.template import ChatTemplate
    from civetta.chat.tokenizer import Tokenizer
    from civetta.engine.client import ReplyEnd
    from civetta.engine.protocol import (
        EngineClient,
        EngineStats,
        Event,
        GenerateRequest,
        GenerationStream,
        ModelInfo,
        RequestView,
    )
    from civetta.options import ReasoningOptions, Settings

# What a terminal would act on; line ends and tabs may stay.
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")


def asking_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `add_vision_id`, `on_cpu` and `prompt_lookup`, see `with_short_forms`."""
    for flag, name, text in (
        (
            "--prompt-lookup",
            "prompt_lookup",
            "The same as --speculative lookup, which mtp includes.",
        ),
        ("--cpu", "on_cpu", "The same as --device cpu."),
        ("--add-vision-id", "add_vision_id", 'Number pictures in the prompt: "Picture 1: ".'),
    ):
        function = click.option(flag, name, is_flag=True, help=text)(function)
    return function


def with_short_forms(settings: Settings, *, on_cpu: bool, prompt_lookup: bool) -> Settings:
    """The settings that --cpu and --prompt-lookup stand for.

    Raises UsageError for --cpu with another --device.
    """
    model, drafting = settings.model, settings.drafting
    if on_cpu and model.device not in ("auto", "cpu"):
        raise UsageError(f"--cpu and --device {model.device} exclude each other: drop one.")
    if on_cpu:
        model = replace(model, device="cpu")
    if prompt_lookup and drafting.speculative == "off":
        drafting = replace(drafting, speculative="lookup")
    return replace(settings, model=model, drafting=drafting)


def reply_options(settings: Settings, *, add_vision_id: bool = False) -> ReplyOptions:
    """What the flags ask of a reply."""
    budget = settings.sampling.max_tokens
    return ReplyOptions(
        template=replace(template_of(settings.reasoning), add_vision_id=add_vision_id),
        sampling=server_overrides(settings.sampling),
        max_tokens=None if budget == -1 else budget,
        thinking_budget=thinking_budget(settings.reasoning),
    )


def template_of(reasoning: ReasoningOptions) -> TemplateOptions:
    """The template options that the reasoning flags stand for."""
    switch = {"on": True, "off": False}
    return TemplateOptions(
        enable_thinking=switch.get(reasoning.think),
        reasoning_effort=reasoning.reasoning_effort,
        preserve_thinking=switch.get(reasoning.preserve_thinking),
    )


class TracedEngine:
    """An engine that also keeps the ids of the tokens it generated last."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.token_ids: list[int] = []

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        return self._engine.tokenizer

    @property
    def template(self) -> ChatTemplate:
        """Its chat template."""
        return self._engine.template

    def submit(self, request: GenerateRequest) -> GenerationStream:
        """Queue a request and start a new list of ids."""
        self.token_ids = []
        return _TracedStream(self._engine.submit(request), self.token_ids)

    def abort(self, request_id: str) -> bool:
        """End the request of that id."""
        return self._engine.abort(request_id)

    def views(self) -> tuple[RequestView, ...]:
        """Who runs, then who waits."""
        return self._engine.views()

    def stats(self) -> EngineStats:
        """Counters now."""
        return self._engine.stats()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class _TracedStream:
    def __init__(self, stream: GenerationStream, token_ids: list[int]) -> None:
        self._stream, self._token_ids = stream, token_ids

    def __iter__(self) -> Iterator[Event]:
        for event in self._stream:
            self._note(event)
            yield event

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self._stream:
            self._note(event)
            yield event

    def cancel(self) -> None:
        self._stream.cancel()

    def _note(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self._token_ids.append(event.token_id)


def ids_sha256(token_ids: list[int]) -> str:
    """SHA-256 of the ids as little-endian 32-bit words: equal exactly when the tokens are."""
    words = array.array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return hashlib.sha256(words.tobytes()).hexdigest()


def trace_line(token_ids: list[int]) -> str:
    """The line that two runs compare."""
    return f"[TokenTrace] tokens={len(token_ids)} sha256={ids_sha256(token_ids)}"


def figures(end: ReplyEnd) -> str:
    """Counts and rates of one reply in one line."""
    usage = end.usage
    computed = usage.prompt_tokens - usage.cached_tokens
    parts = [
        f"prompt {usage.prompt_tokens} tokens" + _rate(computed, usage.prefill_s),
        f"reply {usage.completion_tokens} tokens" + _rate(usage.completion_tokens, usage.decode_s),
    ]
    if usage.cached_tokens:
        parts.insert(1, f"{usage.cached_tokens} cached")
    if usage.draft_tokens:
        parts.append(f"{usage.draft_tokens_accepted} of {usage.draft_tokens} drafts stood")
    if usage.reasoning_tokens:
        parts.append(f"{usage.reasoning_tokens} of them reasoning")
    return ", ".join([*parts, f"ended by {end.finish_reason.value}", f"seed {end.seed}"])


def cut_short_note(end: ReplyEnd, max_tokens: int | None) -> str | None:
    """A sentence for a reply that stopped before its answer, None for any other."""
    if end.finish_reason.value != "length" or end.content or not end.reasoning:
        return None
    limit = "the context is full" if max_tokens is None else f"-n {max_tokens} is reached"
    return f"The reply ended while still thinking: {limit}. Raise -n, or use --think off."


def printable(text: str, stream: Any) -> str:
    """`text` for `stream`: untouched for a file or pipe, without control codes for a terminal."""
    return text.translate(_CONTROLS) if stream.isatty() else text


def _rate(count: int, seconds: float) -> str:
    return f" ({count / seconds:.1f}/s)" if count and seconds else ""
