"""`FakeEngine`: an `EngineClient` that types a given text, byte by byte, on a thread of its own."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from civetta.chat.stop import StopMatcher
from civetta.chat.template import ChatTemplate
from civetta.chat.tokenizer import IncrementalDecoder, Tokenizer
from civetta.chat.vocabulary import byte_alphabet, read_gguf
from civetta.engine.outbox import Outbox, OutboxStream
from civetta.engine.protocol import (
    EngineStats,
    Finished,
    GenerateRequest,
    ModelInfo,
    Progress,
    PromptLogprobs,
    RequestView,
    Started,
    TokenEvent,
)
from civetta.errors import CivettaError, ContextOverflow, EngineClosed
from civetta.types import CancelCause, FinishReason, TokenLogprob, Usage

if TYPE_CHECKING:
    from collections.abc import Callable

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def byte_tokenizer() -> Tokenizer:
    """One token a byte, then the special tokens that templates use."""
    tokens = [*byte_alphabet(), *SPECIALS, *MARKERS]
    return Tokenizer(
        read_gguf(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "qwen35",
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.merges": [],
                "tokenizer.ggml.token_type": [1] * 256 + [3] * len(SPECIALS) + [4] * len(MARKERS),
                "tokenizer.ggml.eos_token_id": 258,
            }
        )
    )


class FakeEngine:
    """Answers every request with `reply(request)`; keeps the requests for tests to look at.

    `before_start` and `before_token` are called on the request's thread and may block or raise.
    """

    def __init__(
        self,
        reply: str | Callable[[GenerateRequest], str] = "hello",
        *,
        context_tokens: int = 4096,
        cached_tokens: int = 0,
        before_start: Callable[[], None] = lambda: None,
        before_token: Callable[[int], None] = lambda index: None,
        refuse: CivettaError | None = None,
    ) -> None:
        self._reply = (lambda request: reply) if isinstance(reply, str) else reply
        self._context_tokens = context_tokens
        self._cached_tokens = cached_tokens
        self._before_start, self._before_token = before_start, before_token
        self._refuse = refuse
        self.tokenizer = byte_tokenizer()
        self.requests: list[GenerateRequest] = []
        self.active: tuple[RequestView, ...] = ()
        self.finished: list[Finished] = []
        self.ended = threading.Semaphore(0)
        self.closed = False
        self._cancelled: dict[str, list[threading.Event]] = {}  # one a choice
        self._aborted: set[str] = set()

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            model_id="fake-model",
            path="fake.gguf",
            context_tokens=self._context_tokens,
            vocab_size=self.tokenizer.vocab_size,
            parameters=1234,
            format="GGUF F32",
            device="cpu",
            dtype="f32",
            created_s=1_700_000_000,
            has_tokenizer=True,
        )

    @property
    def template(self) -> ChatTemplate:
        return ChatTemplate()

    def submit(self, request: GenerateRequest) -> OutboxStream:
        if self.closed:
            raise EngineClosed("closed")
        if self._refuse is not None:
            raise self._refuse
        if len(request.prompt_ids) >= self._context_tokens:
            raise ContextOverflow(len(request.prompt_ids), self._context_tokens, request.max_tokens)
        self.requests.append(request)
        outbox, cancelled = Outbox(max_unread=1 << 20), threading.Event()
        self._cancelled.setdefault(request.request_id, []).append(cancelled)
        run = threading.Thread(target=self._run, args=(request, outbox, cancelled), daemon=True)
        run.start()
        return OutboxStream(outbox, cancelled.set)

    def abort(self, request_id: str) -> bool:
        if request_id not in self._cancelled:
            return False
        self._aborted.add(request_id)
        for cancelled in self._cancelled[request_id]:
            cancelled.set()
        return True

    @property
    def cancelling(self) -> bool:
        """Whether a request that still runs was called off."""
        return any(event.is_set() for events in list(self._cancelled.values()) for event in events)

    def views(self) -> tuple[RequestView, ...]:
        return self.active

    def stats(self) -> EngineStats:
        return EngineStats(
            running=0,
            waiting=0,
            prompt_tokens_total=sum(len(request.prompt_ids) for request in self.requests),
            generated_tokens_total=sum(end.usage.completion_tokens for end in self.finished),
            cached_tokens_total=0,
            prefill_s_total=0.5,
            decode_s_total=0.25,
            requests_total=len(self.requests),
            requests_cancelled_total=0,
            requests_failed_total=0,
        )

    def close(self) -> None:
        self.closed = True
        for cancelled in [event for events in list(self._cancelled.values()) for event in events]:
            cancelled.set()

    def _run(self, request: GenerateRequest, outbox: Outbox, cancelled: threading.Event) -> None:
        try:
            self._before_start()
            self._type(request, outbox, cancelled)
        except CivettaError as error:
            outbox.fail(error)
        finally:
            self._cancelled.pop(request.request_id, None)
            self.ended.release()

    def _cause(self, request: GenerateRequest, usage: Usage) -> CancelCause:
        if request.request_id in self._aborted:
            return CancelCause.ABORTED
        late = request.timeout_s is not None and usage.decode_s >= request.timeout_s
        return CancelCause.TIMEOUT if late else CancelCause.SHUTDOWN

    def _type(self, request: GenerateRequest, outbox: Outbox, cancelled: threading.Event) -> None:
        prompt_tokens = len(request.prompt_ids)
        outbox.put(Started(prompt_tokens=prompt_tokens, cached_tokens=self._cached_tokens))
        outbox.put(Progress(processed_tokens=prompt_tokens, prompt_tokens=prompt_tokens))
        count = request.sampling.logprobs
        if request.prompt_logprobs is not None and count is not None:
            for part in (request.prompt_ids[1:3], request.prompt_ids[3:]):
                found = tuple(_logprob(request, token_id) for token_id in part)
                outbox.put(PromptLogprobs(logprobs=found))
        decoder = IncrementalDecoder(self.tokenizer)
        stops = StopMatcher(request.stop)
        ids = self.tokenizer.encode(self._reply(request)) if request.max_tokens != 0 else []
        reason, count, started_s = FinishReason.STOP, 0, time.monotonic()
        if request.max_tokens == 0:
            reason = FinishReason.LENGTH
        for index, token_id in enumerate(ids):
            self._before_token(index)
            if cancelled.is_set():
                reason = FinishReason.CANCELLED
                break
            count += 1
            text = stops.push(decoder.push(token_id))
            outbox.put(
                TokenEvent(token_id=token_id, text=text, logprob=_logprob(request, token_id))
            )
            if stops.hit is not None:
                break
            if request.max_tokens is not None and count >= request.max_tokens:
                reason = FinishReason.LENGTH
                break
        rest = "" if stops.hit is not None else stops.push(decoder.flush()) + stops.flush()
        usage = Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=count,
            cached_tokens=self._cached_tokens,
            queue_s=0.001,
            prefill_s=0.01,
            decode_s=max(time.monotonic() - started_s, 1e-6),
        )
        end = Finished(
            reason=reason, usage=usage, text=rest, stop=stops.hit, cause=self._cause(request, usage)
        )
        self.finished.append(end)
        outbox.put(end)


def _logprob(request: GenerateRequest, token_id: int) -> TokenLogprob | None:
    count = request.sampling.logprobs
    if count is None:
        return None
    top = tuple(((token_id + rank) % 256, -0.5 - rank) for rank in range(count))
    return TokenLogprob(token_id=token_id, logprob=-0.5, top=top)
