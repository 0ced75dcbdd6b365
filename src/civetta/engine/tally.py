"""Running totals of the engine: written by the step thread, read by anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.engine.protocol import EngineStats
from civetta.engine.request import RequestState

if TYPE_CHECKING:
    from civetta.engine.request import Request


class Tally:
    """Counters since the start; durations are time the model worked, in seconds."""

    __slots__ = (
        "cached_tokens",
        "cancelled",
        "decode_s",
        "failed",
        "generated_tokens",
        "prefill_s",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self.cancelled = self.failed = 0
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.prefill_s = self.decode_s = 0.0

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        """Count prompt tokens that the model computed."""
        self.prompt_tokens += n_tokens
        self.prefill_s += seconds

    def ended(self, request: Request) -> None:
        """Count how a request ended."""
        self.cancelled += request.state is RequestState.CANCELLED
        self.failed += request.state is RequestState.FAILED

    def stats(self, *, running: int, waiting: int, requests: int) -> EngineStats:
        """The totals as the protocol's frozen record."""
        return EngineStats(
            running=running,
            waiting=waiting,
            prompt_tokens_total=self.prompt_tokens,
            generated_tokens_total=self.generated_tokens,
            cached_tokens_total=self.cached_tokens,
            prefill_s_total=self.prefill_s,
            decode_s_total=self.decode_s,
            requests_total=requests,
            requests_cancelled_total=self.cancelled,
            requests_failed_total=self.failed,
        )
