"""Running totals of the engine: written by the step thread, read by anybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from civetta.cache.protocol import MissReason
from civetta.decode.lengths import MOST_DRAFTS
from civetta.engine.histogram import FIRST_TOKEN_S, INTER_TOKEN_S, WHOLE_S, Histogram
from civetta.engine.protocol import DurationStats, EngineStats
from civetta.engine.request import RequestState

if TYPE_CHECKING:
    from civetta.cache.protocol import CacheStats
    from civetta.engine.request import Request
    from civetta.types import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """How things stand at one moment."""

    running: int
    waiting: int
    restoring: int
    requests: int
    session_tokens: int
    pages_total: int
    pages_free: int
    cache: CacheStats


class Rate:
    """Tokens a second over the newest stretch of work of about a second; 0 before any."""

    __slots__ = ("_seconds", "_tokens", "_value")

    def __init__(self) -> None:
        self._tokens, self._seconds, self._value = 0, 0.0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count work; a stretch that is complete becomes the value."""
        self._tokens += tokens
        self._seconds += seconds
        if self._seconds >= 1.0:
            self._value = self._tokens / self._seconds
            self._tokens, self._seconds = 0, 0.0

    @property
    def value(self) -> float:
        """The last complete stretch's; the present one's while there is none."""
        return self._value or (self._tokens / self._seconds if self._seconds else 0.0)


class Tally:
    """Counters since the start; durations are time the model worked, in seconds."""

    __slots__ = (
        "_first_token",
        "_inter_token",
        "_misses",
        "_queue",
        "_whole",
        "cached_tokens",
        "cancelled",
        "decode_rate",
        "decode_rounds",
        "decode_s",
        "decoded_rows",
        "drafted_depths",
        "drafts",
        "failed",
        "generated_tokens",
        "longest_sequence",
        "prefill_rate",
        "prefill_s",
        "prompt_tokens",
        "put_back",
        "steps",
    )

    def __init__(self) -> None:
        self.cancelled = self.failed = 0
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.prefill_s = self.decode_s = 0.0
        self.longest_sequence = self.put_back = self.steps = 0
        self.drafts = 0
        self.drafted_depths = [(0, 0)] * MOST_DRAFTS  # drafted, accepted
        self.decode_rounds = self.decoded_rows = 0
        self.prefill_rate, self.decode_rate = Rate(), Rate()
        self._queue, self._first_token = Histogram(FIRST_TOKEN_S), Histogram(FIRST_TOKEN_S)
        self._inter_token, self._whole = Histogram(INTER_TOKEN_S), Histogram(WHOLE_S)
        self._misses = dict.fromkeys((reason.value for reason in MissReason), 0)

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        """Count prompt tokens that the model computed."""
        self.prompt_tokens += n_tokens
        self.prefill_s += seconds
        self.prefill_rate.add(n_tokens, seconds)

    def decoded(self, rows: int, tokens: int, seconds: float) -> None:
        """Count a round: `rows` replies got `tokens` tokens together."""
        self.decode_rounds += 1
        self.decoded_rows += rows
        self.decode_s += seconds
        self.decode_rate.add(tokens, seconds)

    def first_token(self, usage: Usage) -> None:
        """Count how long a request waited for its first token."""
        self._queue.add(usage.queue_s)
        self._first_token.add(usage.queue_s + usage.prefill_s)

    def delivered(self, gap_s: float) -> None:
        """Count the time between two deliveries of one reply."""
        self._inter_token.add(gap_s)

    def drafted(self, n_drafts: int, n_accepted: int) -> None:
        """Count one reply's drafts of a round, depth by depth."""
        self.drafts += 1
        for depth in range(n_drafts):
            drafted, accepted = self.drafted_depths[depth]
            self.drafted_depths[depth] = (drafted + 1, accepted + (depth < n_accepted))

    def ended(self, request: Request, usage: Usage) -> None:
        """Count how a request ended, and after which time: last, so that who sees it sees the rest."""
        if request.saving is not None and request.saving.miss is not None:
            self._misses[request.saving.miss] += 1
        self.cancelled += request.state is RequestState.CANCELLED
        self.failed += request.state is RequestState.FAILED
        self._whole.add(usage.queue_s + usage.prefill_s + usage.decode_s)

    def stats(self, now: LoopState) -> EngineStats:
        """The totals, with how things stand now, as the protocol's frozen record."""
        return EngineStats(
            running=now.running,
            waiting=now.waiting,
            restoring=now.restoring,
            session_tokens=now.session_tokens,
            pages_total=now.pages_total,
            pages_free=now.pages_free,
            cache=now.cache,
            requests_total=now.requests,
            prompt_tokens_total=self.prompt_tokens,
            generated_tokens_total=self.generated_tokens,
            cached_tokens_total=self.cached_tokens,
            prefill_s_total=self.prefill_s,
            decode_s_total=self.decode_s,
            requests_cancelled_total=self.cancelled,
            requests_failed_total=self.failed,
            longest_sequence_tokens=self.longest_sequence,
            put_back_total=self.put_back,
            steps_total=self.steps,
            drafts_total=self.drafts,
            draft_tokens_total=sum(drafted for drafted, _ in self.drafted_depths),
            draft_tokens_accepted_total=sum(accepted for _, accepted in self.drafted_depths),
            draft_depths=tuple(self.drafted_depths),
            durations=DurationStats(
                queue=self._queue.stats(),
                first_token=self._first_token.stats(),
                inter_token=self._inter_token.stats(),
                whole=self._whole.stats(),
            ),
            cache_misses=tuple(self._misses.items()),
            prefill_rate=self.prefill_rate.value,
            decode_rate=self.decode_rate.value,
            decode_rounds_total=self.decode_rounds,
            decoded_rows_total=self.decoded_rows,
        )
