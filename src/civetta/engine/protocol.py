"""All that `api` and `cli` know of the engine: what goes in, which events come out.

One request is a list of token ids with sampling parameters; its events arrive in this order:
`Started` once, `Progress` and `PromptLogprobs` any number of times, `TokenEvent` per generated
token, `Finished` once.
A failure raises from the stream instead of `Finished`. Token text is byte-safe: joining every
`text` gives the reply; stop strings never appear in it, not even in part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from civetta.cache.protocol import CacheStats
from civetta.types import (
    CancelCause,
    Constraint,
    FinishReason,
    SamplingParams,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from civetta.chat.image_rules import ImageSupport
    from civetta.chat.images import PreparedImage
    from civetta.chat.template import ChatTemplate
    from civetta.chat.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestImage:
    """An image of a prompt; its placeholder ids are prompt_ids[position : position + tokens].

    `image.digest` identifies its pixels.
    """

    position: int
    image: PreparedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One generation: everything the reply depends on, and nothing else.

    max_tokens None means: until an end token or the context is full; 0 reads the prompt only. `stop`
    strings cut the text before them; `ignore_eos` generates past end tokens. `timeout_s` bounds
    queue plus generation.
    `use_cache` False computes the whole prompt; what is computed may be kept all the same.
    `thinking`: the prompt leaves a thought open. A thought longer than `thinking_budget` tokens is
    closed; what follows it, or parts of that, obey the `constraint`. `prompt_logprobs`: tell the
    log-probability of each prompt token and of so many rivals; all of the prompt is then computed.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    timeout_s: float | None = None
    client_id: str = ""
    use_cache: bool = True
    images: tuple[RequestImage, ...] = ()
    thinking: bool = False
    thinking_budget: int | None = None
    constraint: Constraint | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request left the queue; `cached_tokens` prompt tokens need no work."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Prompt tokens processed so far, cached ones included."""

    processed_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of further prompt tokens, in order; the first token has none.

    All of them come before the first TokenEvent.
    """

    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One generated token; `text` is what became certain with it (may be empty).

    The token that ends a reply has an event too, without text and without logprob.
    """

    token_id: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end: `text` is what was held back and is certain now; `stop` the stop string that hit.

    `cause` says who ended a reply whose reason is CANCELLED.
    """

    reason: FinishReason
    usage: Usage
    text: str = ""
    stop: str | None = None
    cause: CancelCause | None = None


Event = Started | Progress | PromptLogprobs | TokenEvent | Finished


class GenerationStream(Protocol):
    """Events of one request, readable once, from a coroutine or from a plain thread."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Events as an async iterator; raises CivettaError when the request failed."""
        ...

    def __iter__(self) -> Iterator[Event]:
        """Events as a blocking iterator; raises CivettaError when the request failed."""
        ...

    def cancel(self) -> None:
        """End the request within one step or one prefill chunk; safe from any thread, any time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about the loaded model that clients may ask for."""

    model_id: str
    path: str
    context_tokens: int
    vocab_size: int
    parameters: int
    format: str  # for example "GGUF Q8_0" or "safetensors BF16"
    device: str
    dtype: str
    created_s: int
    has_tokenizer: bool
    images: ImageSupport | None = None  # None: text only


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One request that waits or runs, as counts alone; nothing of its text.

    `state` is a `RequestState` as text; `processed_tokens` of the prompt are done, cached ones
    included; `max_tokens` None: until the context is full.
    """

    request_id: str
    state: str
    prompt_tokens: int
    cached_tokens: int
    processed_tokens: int
    generated_tokens: int
    max_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramStats:
    """Durations counted by range: counts[i] fell in (bounds_s[i-1], bounds_s[i]], the last above."""

    bounds_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    sum_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationStats:
    """Of all requests since the start, in seconds.

    `first_token` and `queue` count from submission; `inter_token` is between a reply's successive
    deliveries (with drafts, one may bring several tokens); `whole` is from submission to the end.
    """

    queue: HistogramStats = field(default_factory=HistogramStats)
    first_token: HistogramStats = field(default_factory=HistogramStats)
    inter_token: HistogramStats = field(default_factory=HistogramStats)
    whole: HistogramStats = field(default_factory=HistogramStats)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Live counters for health, metrics and slots."""

    running: int
    waiting: int
    prompt_tokens_total: int
    generated_tokens_total: int
    cached_tokens_total: int
    prefill_s_total: float
    decode_s_total: float
    requests_total: int
    requests_cancelled_total: int
    requests_failed_total: int
    restoring: int = 0
    steps_total: int = 0
    stalls_total: int = 0
    device_lost: bool = False  # it failed for good, and so does every request
    stalled_s: float = 0.0  # how long the present step takes, once that is called a stall
    longest_sequence_tokens: int = 0
    session_tokens: int = 0  # tokens in the sequences that run now
    pages_total: int = 0
    pages_free: int = 0
    put_back_total: int = 0  # requests that had to compute their state again
    cache: CacheStats = field(default_factory=CacheStats)
    drafts_total: int = 0  # rounds of a reply that had drafts
    draft_tokens_total: int = 0
    draft_tokens_accepted_total: int = 0
    draft_depths: tuple[tuple[int, int], ...] = ()  # by depth: drafted, accepted
    durations: DurationStats = field(default_factory=DurationStats)
    cache_misses: tuple[tuple[str, int], ...] = ()  # by reason: prompts of ended requests
    prefill_rate: float = 0.0  # tokens a second of the newest second of such work
    decode_rate: float = 0.0
    decode_rounds_total: int = 0  # launches that computed the next tokens of replies
    decoded_rows_total: int = 0  # replies in those launches, summed
    device_bytes: int = 0  # memory that tensors take on a GPU


class EngineClient(Protocol):
    """The engine as its users see it."""

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer; raises TokenizerError when the checkpoint has none."""
        ...

    @property
    def template(self) -> ChatTemplate:
        """Its chat template (the file's own, else the built-in one)."""
        ...

    def submit(self, request: GenerateRequest) -> GenerationStream:
        """Queue a request. One with a constraint may take long to compile: call on a worker thread.

        Raises ContextOverflow, RequestInvalid, EngineBusy or EngineClosed before anything runs.
        """
        ...

    def abort(self, request_id: str) -> bool:
        """End the request of that id within one step or chunk; False when none waits or runs."""
        ...

    def views(self) -> tuple[RequestView, ...]:
        """Who runs, in order of admission, then who waits; cheap."""
        ...

    def stats(self) -> EngineStats:
        """Counters now; cheap, no device work."""
        ...

    def close(self) -> None:
        """Cancel what runs, release everything; idempotent."""
        ...
