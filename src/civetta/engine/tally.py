"""Running totals of the engine: written by the step thread, read by anybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from civetta.decode.lengths import MOST_DRAFTS
from civetta.engine.protocol import EngineStats
from civetta.engine.request import RequestState

if TYPE_CHECKING:
    from civetta.cache.protocol import CacheStats
    from civetta.engine.request import Request


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


class Tally:
    """Counters since the start; durations are time the model worked, in seconds."""

    __slots__ = (
        "cached_tokens",
        "cancelled",
        "decode_s",
        "drafted_depths",
        "drafts",
        "failed",
        "generated_tokens",
        "longest_sequence",
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

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        """Count prompt tokens that the model computed."""
        self.prompt_tokens += n_tokens
        self.prefill_s += seconds

    def drafted(self, n_drafts: int, n_accepted: int) -> None:
        """Count one reply's drafts of a round, depth by depth."""
        self.drafts += 1
        for depth in range(n_drafts):
            drafted, accepted = self.drafted_depths[depth]
            self.drafted_depths[depth] = (drafted + 1, accepted + (depth < n_accepted))

    def ended(self, request: Request) -> None:
        """Count how a request ended."""
        self.cancelled += request.state is RequestState.CANCELLED
        self.failed += request.state is RequestState.FAILED

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
        )
