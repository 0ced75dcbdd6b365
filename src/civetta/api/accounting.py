"""What a generation cost, in the spellings of OpenAI (`usage`), llama.cpp and `Server-Timing`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from civetta.types import Usage


def usage_payload(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


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


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _ratio(amount: float, by: float) -> float:
    return amount / by if by else 0.0
