"""What a generation cost, in the spellings of OpenAI (`usage`), llama.cpp and `Server-Timing`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from civetta.engine.protocol import Started, TokenEvent
from civetta.types import Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.engine.protocol import Progress


def usage_payload(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage` object.

    With what some servers add and their clients read: cached tokens at the top, and drafts.
    """
    payload: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "cached_tokens": usage.cached_tokens,
    }
    if usage.draft_tokens:
        payload["draft_tokens"] = usage.draft_tokens
        payload["draft_tokens_accepted"] = usage.draft_tokens_accepted
    return payload


def accounts(usage: Usage) -> dict[str, Any]:
    """`usage` and `timings`, as a reply and the last chunk of a stream have them.

    Both together: proxies read either from the last event that has one.
    """
    return {"usage": usage_payload(usage), "timings": timings_payload(usage)}


def timings_payload(usage: Usage) -> dict[str, Any]:
    """llama.cpp's `timings` object: milliseconds, and rates of tokens a second.

    Civetta adds where cached tokens came from, and why they were not more.
    """
    computed = usage.prompt_tokens - usage.cached_tokens
    timings: dict[str, Any] = {
        "cache_n": usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": _ms(usage.prefill_s),
        "prompt_per_token_ms": _ms(_ratio(usage.prefill_s, computed)),
        "prompt_per_second": round(_ratio(computed, usage.prefill_s), 3),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": _ms(usage.decode_s),
        "predicted_per_token_ms": _ms(_ratio(usage.decode_s, usage.completion_tokens)),
        "predicted_per_second": round(_ratio(usage.completion_tokens, usage.decode_s), 3),
    }
    cache = usage.cache
    timings["cache_source"] = cache.source
    if cache.miss is not None:
        timings["cache_miss_reason"] = cache.miss
        timings["cache_miss_token"] = cache.miss_token
    if cache.wait_s:
        timings["shared_prefix_wait_ms"] = _ms(cache.wait_s)
    if usage.draft_tokens:
        timings["draft_n"] = usage.draft_tokens
        timings["draft_n_accepted"] = usage.draft_tokens_accepted
        timings["draft_n_by_depth"] = [drafted for drafted, _ in usage.draft_depths]
        timings["draft_n_accepted_by_depth"] = [accepted for _, accepted in usage.draft_depths]
    return timings


def server_timing(usage: Usage) -> str:
    """Value of the `Server-Timing` header of a buffered reply, durations in milliseconds."""
    parts = {
        "queue": usage.queue_s,
        "ttft": usage.queue_s + usage.prefill_s,
        "inter_token": _ratio(usage.decode_s, usage.completion_tokens),
        "total": usage.queue_s + usage.prefill_s + usage.decode_s,
    }
    return ", ".join(f"{name};dur={_ms(seconds)}" for name, seconds in parts.items())


class LiveTimings:
    """The `timings` of a reply that is still coming, and how far its prompt is.

    Durations are those that the server sees, from the request's arrival here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = self._started_s = clock()
        self._first_s: float | None = None
        self._cached_tokens = 0
        self.prompt_tokens = 0
        self.predicted = 0

    def see(self, item: object) -> None:
        """Take note of an event of the engine."""
        if isinstance(item, TokenEvent):
            self.predicted += 1
            if self._first_s is None:
                self._first_s = self._clock()
        elif isinstance(item, Started):
            self.prompt_tokens, self._cached_tokens = item.prompt_tokens, item.cached_tokens
            self._started_s = self._clock()

    def progress(self, item: Progress) -> dict[str, int]:
        """llama.cpp's `prompt_progress` object."""
        return {
            "total": item.prompt_tokens,
            "cache": self._cached_tokens,
            "processed": item.processed_tokens,
            "time_ms": round((self._clock() - self._began_s) * 1000),
        }

    def payload(self) -> dict[str, Any]:
        """The object so far."""
        now_s = self._clock()
        first_s = now_s if self._first_s is None else self._first_s
        return timings_payload(
            Usage(
                prompt_tokens=self.prompt_tokens,
                completion_tokens=self.predicted,
                cached_tokens=self._cached_tokens,
                queue_s=self._started_s - self._began_s,
                prefill_s=first_s - self._started_s,
                decode_s=now_s - first_s,
            )
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _ratio(amount: float, by: float) -> float:
    return amount / by if by else 0.0
