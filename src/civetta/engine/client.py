"""A conversation in, a reply out: what every HTTP dialect and the command line share.

`ChatClient` renders and encodes a conversation, submits it, and splits the text that comes back
into reasoning, content and tool calls. It needs an `EngineClient` and nothing else of the engine.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from civetta.chat.answer_format import AUTO
from civetta.chat.reply import ContentDelta, Reply, ReplyParser, assemble
from civetta.chat.template import TemplateOptions
from civetta.chat.video_text import with_times
from civetta.decode.presets import resolve
from civetta.engine.constraining import constraint_of
from civetta.engine.fetching import read_beside
from civetta.engine.protocol import (
    Finished,
    GenerateRequest,
    Progress,
    PromptLogprobs,
    Started,
    TokenEvent,
)
from civetta.errors import ContextOverflow
from civetta.types import (
    CancelCause,
    FinishReason,
    SamplingOverrides,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from civetta.chat.answer_format import AnswerFormat, ToolChoice
    from civetta.chat.message import Conversation, ToolCall, ToolSpec
    from civetta.chat.reply import Delta
    from civetta.engine.protocol import EngineClient, Event, GenerationStream
    from civetta.options import ReasoningOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """How one reply is asked for.

    `template` says whether and how hard to think and whether old thoughts stay. `sampling` goes
    before the server's values and the preset of the thinking mode. `tools` False neither offers
    nor parses the conversation's tools; `tool_choice` says whether they are called. `answer_format`
    binds the answer, not the thought; `thinking_budget` tokens of thought at most. An empty
    `request_id` is replaced by a random one.
    """

    template: TemplateOptions = field(default_factory=TemplateOptions)
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    tools: bool = True
    parallel_tool_calls: bool = True
    tool_choice: ToolChoice = AUTO
    answer_format: AnswerFormat | None = None
    thinking_budget: int | None = None
    timeout_s: float | None = None
    use_cache: bool = True
    request_id: str = ""
    client_id: str = ""


def choices_of(request: GenerateRequest, n: int) -> list[GenerateRequest]:
    """n requests for one prompt: choice i is the reply to the same request with the seed plus i."""
    seed = request.sampling.seed
    return [
        replace(request, sampling=replace(request.sampling, seed=(seed + i) % 2**64))
        for i in range(n)
    ]


def submit_all(engine: EngineClient, requests: Sequence[GenerateRequest]) -> list[GenerationStream]:
    """Queue all of them, or none: raises what `EngineClient.submit` raises."""
    streams: list[GenerationStream] = []
    try:
        for request in requests:
            streams.append(engine.submit(request))
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return streams


def thinking_budget(server: ReasoningOptions) -> int | None:
    """The budget that the reasoning flags stand for; None is no limit."""
    return None if server.thinking_budget == -1 else server.thinking_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedReply:
    """A request ready to submit, and how the text that comes back is to be read.

    `thinking`: the reply begins inside a thought. `plain`: it is not parsed, all of it is content.
    `exact`: its calls are texts of their grammar.
    """

    request: GenerateRequest
    thinking: bool = False
    tools: tuple[ToolSpec, ...] = ()
    parallel_tool_calls: bool = True
    plain: bool = False
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyDelta:
    """What one generated token made certain: perhaps nothing, perhaps several things.

    `in_reasoning`: the token was generated within the thought (its closing marker included).
    """

    deltas: tuple[Delta, ...]
    logprob: TokenLogprob | None = None
    in_reasoning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyEnd:
    """The whole reply. `seed` repeats it; `stop` is the stop string that ended it.

    `cause` says who ended one whose reason is CANCELLED.
    """

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    usage: Usage
    seed: int
    stop: str | None = None
    cause: CancelCause | None = None


ReplyEvent = Started | Progress | ReplyDelta | ReplyEnd
"""In this order: Started, Progress any number of times, ReplyDelta likewise, ReplyEnd once."""


class ChatClient:
    """Asks one engine for replies. `server` holds the sampling values of the server's flags."""

    def __init__(self, engine: EngineClient, *, server: SamplingOverrides | None = None) -> None:
        self._engine = engine
        self._server = server

    async def generate(
        self, conversation: Conversation, options: ReplyOptions | None = None
    ) -> ReplyStream:
        """Queue a reply; rendering, encoding and compiling happen on a worker thread.

        Raises RequestInvalid, TemplateError, TokenizerError, ContextOverflow, EngineBusy or
        EngineClosed before anything runs. Failures after that raise from the stream.
        """
        prepared = await self.prepared(conversation, options)
        if prepared.request.constraint is None:
            return self.submit(prepared)
        return await asyncio.to_thread(self.submit, prepared)

    def generate_sync(
        self, conversation: Conversation, options: ReplyOptions | None = None
    ) -> ReplyStream:
        """Queue a reply from a plain thread; raises as `generate` does."""
        return self.submit(self.prepare(conversation, options))

    async def generate_choices(
        self, conversation: Conversation, options: ReplyOptions, n: int
    ) -> list[ReplyStream]:
        """Queue n replies to one prompt, whose seeds follow each other; raises as `generate` does."""
        return await read_beside(self._generate_choices, conversation, options, n)

    def _generate_choices(
        self, conversation: Conversation, options: ReplyOptions, n: int
    ) -> list[ReplyStream]:
        prepared = self.prepare(conversation, options)
        asked = choices_of(prepared.request, n)
        streams = submit_all(self._engine, asked)
        return [
            ReplyStream(stream, replace(prepared, request=request))
            for stream, request in zip(streams, asked, strict=True)
        ]

    async def prepared(
        self, conversation: Conversation, options: ReplyOptions | None = None
    ) -> PreparedReply:
        """`prepare` on a worker thread."""
        return await read_beside(self.prepare, conversation, options)

    def prepare(
        self, conversation: Conversation, options: ReplyOptions | None = None
    ) -> PreparedReply:
        """Render, encode, read images and videos; nothing is queued, the prompt's length is not
        checked.

        Raises RequestInvalid, ImageInvalid, VideoInvalid, TemplateError, TokenizerError, or
        ContextOverflow for images that alone overflow the context.
        """
        options = options or ReplyOptions()
        if conversation.tools and (not options.tools or options.tool_choice.mode == "none"):
            conversation = replace(conversation, tools=())
        rendered = self._engine.template.render(conversation, options.template)
        media = None
        if conversation.media:
            from civetta.engine.image_prompt import PromptMedia  # brings numpy and PIL

            media = PromptMedia.read(conversation.media, self._engine.info)
            rendered = with_times(rendered, media.times)
        check_length(self._engine, rendered.text)
        prompt_ids = self._engine.tokenizer.encode(
            rendered.text, literal_starts=rendered.literal_starts
        )
        request = replace(
            self._request(tuple(prompt_ids), options),
            thinking=rendered.opens_thinking,
            thinking_budget=options.thinking_budget,
            constraint=constraint_of(conversation.tools, options),
        )
        if media is not None:
            request = media.lay(request)
        return PreparedReply(
            request=request,
            thinking=rendered.opens_thinking,
            tools=conversation.tools,
            parallel_tool_calls=options.parallel_tool_calls,
            exact=request.constraint is not None,
        )

    def prepare_text(self, prompt: str, options: ReplyOptions | None = None) -> PreparedReply:
        """Encode a raw prompt, without template; the reply is content throughout.

        Raises RequestInvalid or TokenizerError.
        """
        check_length(self._engine, prompt)
        prompt_ids = self._engine.tokenizer.encode(prompt)
        return PreparedReply(
            request=self._request(tuple(prompt_ids), options or ReplyOptions()), plain=True
        )

    def submit(self, prepared: PreparedReply) -> ReplyStream:
        """Queue what was prepared; raises what `EngineClient.submit` raises."""
        return ReplyStream(self._engine.submit(prepared.request), prepared)

    def _request(self, prompt_ids: tuple[int, ...], options: ReplyOptions) -> GenerateRequest:
        return GenerateRequest(
            request_id=options.request_id or uuid.uuid4().hex,
            prompt_ids=prompt_ids,
            sampling=resolve(
                options.sampling,
                self._server,
                thinking=options.template.thinking,
                logprobs=options.logprobs,
                logit_bias=options.logit_bias,
            ),
            max_tokens=options.max_tokens,
            stop=options.stop,
            ignore_eos=options.ignore_eos,
            timeout_s=options.timeout_s,
            use_cache=options.use_cache,
            client_id=options.client_id,
        )


def check_length(engine: EngineClient, text: str) -> None:
    """Raise ContextOverflow for a text that is too long whatever its tokens are.

    Encoding it would take the memory and the time of all the others for nothing.
    """
    least, context_tokens = engine.tokenizer.least_tokens(text), engine.info.context_tokens
    if least >= context_tokens:
        raise ContextOverflow(least, context_tokens, 1)


class ReplyStream:
    """Events of one reply; read once, by a coroutine or by a plain thread.

    Leaving the iteration early cancels the request, as does forgetting the stream.
    """

    def __init__(self, events: GenerationStream, prepared: PreparedReply) -> None:
        self._events = events
        self._reader = _ReplyReader(prepared)
        self.request = prepared.request

    def cancel(self) -> None:
        """Ask for the end; what was generated still comes, then ReplyEnd with CANCELLED."""
        self._events.cancel()

    async def __aiter__(self) -> AsyncIterator[ReplyEvent]:
        """Iterate from a coroutine; raises the CivettaError that ended the generation."""
        try:
            async for event in self._events:
                for item in self._reader.read(event):
                    yield item
        finally:
            self._events.cancel()

    def __iter__(self) -> Iterator[ReplyEvent]:
        """Iterate, blocking; raises the CivettaError that ended the generation."""
        try:
            for event in self._events:
                yield from self._reader.read(event)
        finally:
            self._events.cancel()

    async def result(self) -> ReplyEnd:
        """Read to the end; raises the CivettaError that ended the generation."""
        async for item in self:
            if isinstance(item, ReplyEnd):
                return item
        raise AssertionError("a stream ends with Finished or an error")

    def result_sync(self) -> ReplyEnd:
        """Read to the end, blocking; raises as `result` does."""
        for item in self:
            if isinstance(item, ReplyEnd):
                return item
        raise AssertionError("a stream ends with Finished or an error")


class _ReplyReader:
    """Engine events to reply events, with the reply gathered on the way."""

    def __init__(self, prepared: PreparedReply) -> None:
        self._seed = prepared.request.sampling.seed
        self._parser = (
            None
            if prepared.plain
            else ReplyParser(
                thinking=prepared.thinking,
                tools=prepared.tools,
                parallel=prepared.parallel_tool_calls,
                exact=prepared.exact,
            )
        )
        self._deltas: list[Delta] = []
        self._reasoning_tokens = 0

    def read(self, event: Event) -> Iterator[ReplyEvent]:
        """Zero, one or two events for one of the engine's."""
        if isinstance(event, TokenEvent):
            # Asked before the token is read: the marker that ends the thought is part of it.
            in_reasoning = self._parser is not None and self._parser.in_reasoning
            self._reasoning_tokens += in_reasoning
            deltas = self._push(event.text)
            if deltas or event.logprob is not None:
                yield ReplyDelta(deltas=deltas, logprob=event.logprob, in_reasoning=in_reasoning)
        elif isinstance(event, Finished):
            deltas = self._push(event.text) + self._finish()
            if deltas:
                yield ReplyDelta(deltas=deltas)
            yield self._end(event)
        elif not isinstance(event, PromptLogprobs):
            yield event

    def _push(self, text: str) -> tuple[Delta, ...]:
        if self._parser is not None:
            deltas = tuple(self._parser.push(text))
        else:
            deltas = (ContentDelta(text=text),) if text else ()
        self._deltas += deltas
        return deltas

    def _finish(self) -> tuple[Delta, ...]:
        deltas = () if self._parser is None else tuple(self._parser.finish())
        self._deltas += deltas
        return deltas

    def _end(self, event: Finished) -> ReplyEnd:
        reply: Reply = assemble(self._deltas)
        reason = event.reason
        if reason is FinishReason.STOP and reply.tool_calls:
            reason = FinishReason.TOOL_CALLS
        return ReplyEnd(
            reasoning=reply.reasoning,
            content=reply.content,
            tool_calls=reply.tool_calls,
            finish_reason=reason,
            usage=replace(event.usage, reasoning_tokens=self._reasoning_tokens),
            seed=self._seed,
            stop=event.stop,
            cause=event.cause,
        )
