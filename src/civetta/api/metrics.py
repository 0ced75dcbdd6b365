"""GET /metrics: Prometheus text. One row a metric; reading changes nothing and costs no device work.

Names are llama.cpp's where it has one, vLLM's where only it has, so that dashboards of both work.
Labels are few and fixed: a status, a miss reason, a draft's depth, a bucket.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse

from civetta.engine.protocol import EngineStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from starlette.requests import Request
    from starlette.responses import Response

    from civetta.api.account import Traffic
    from civetta.engine.protocol import EngineClient, HistogramStats

Sample = tuple[str, float]
"""Labels in Prometheus' spelling, possibly empty, and the value."""

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Metric:
    """One family: its name, what it means, and how it is read from the engine's counters."""

    name: str
    kind: str
    text: str
    read: Callable[[EngineStats], float | Iterable[Sample]]


METRICS = (
    Metric(
        "llamacpp:prompt_tokens_total",
        "counter",
        "Prompt tokens computed (reused ones not counted).",
        lambda s: s.prompt_tokens_total,
    ),
    Metric(
        "llamacpp:prompt_tokens_cached_total",
        "counter",
        "Prompt tokens reused from the cache.",
        lambda s: s.cached_tokens_total,
    ),
    Metric(
        "llamacpp:prompt_seconds_total",
        "counter",
        "Seconds spent on prompts.",
        lambda s: s.prefill_s_total,
    ),
    Metric(
        "llamacpp:prompt_tokens_seconds",
        "gauge",
        "Prompt tokens a second, over the newest second of that work.",
        lambda s: s.prefill_rate,
    ),
    Metric(
        "llamacpp:tokens_predicted_total",
        "counter",
        "Tokens generated.",
        lambda s: s.generated_tokens_total,
    ),
    Metric(
        "llamacpp:tokens_predicted_seconds_total",
        "counter",
        "Seconds spent on generating.",
        lambda s: s.decode_s_total,
    ),
    Metric(
        "llamacpp:predicted_tokens_seconds",
        "gauge",
        "Tokens generated a second by all replies, over the newest second of that work.",
        lambda s: s.decode_rate,
    ),
    Metric(
        "llamacpp:n_decode_total",
        "counter",
        "Launches that computed the next tokens of replies.",
        lambda s: s.decode_rounds_total,
    ),
    Metric(
        "llamacpp:n_busy_slots_per_decode",
        "gauge",
        "Replies in such a launch, on average since the start.",
        lambda s: _ratio(s.decoded_rows_total, s.decode_rounds_total),
    ),
    Metric(
        "llamacpp:n_tokens_max",
        "gauge",
        "Longest sequence so far, in tokens.",
        lambda s: s.longest_sequence_tokens,
    ),
    Metric("llamacpp:requests_processing", "gauge", "Requests running.", lambda s: s.running),
    Metric("llamacpp:requests_deferred", "gauge", "Requests waiting.", lambda s: s.waiting),
    Metric(
        "llamacpp:requests_restoring",
        "gauge",
        "Requests whose stored state is being read from disk.",
        lambda s: s.restoring,
    ),
    Metric(
        "llamacpp:requests_total",
        "counter",
        "Requests that reached the engine.",
        lambda s: s.requests_total,
    ),
    Metric(
        "llamacpp:requests_cancelled_total",
        "counter",
        "Requests ended by their client or a limit.",
        lambda s: s.requests_cancelled_total,
    ),
    Metric(
        "llamacpp:requests_failed_total",
        "counter",
        "Requests that failed.",
        lambda s: s.requests_failed_total,
    ),
    Metric(
        "llamacpp:requests_put_back_total",
        "counter",
        "Times a request had to compute its state again.",
        lambda s: s.put_back_total,
    ),
    Metric(
        "llamacpp:kv_cache_usage_ratio",
        "gauge",
        "Share of the key/value pages that sessions or cache hold.",
        lambda s: _ratio(s.pages_total - s.pages_free, s.pages_total),
    ),
    Metric(
        "llamacpp:kv_cache_tokens",
        "gauge",
        "Tokens in the sequences that run.",
        lambda s: s.session_tokens,
    ),
    Metric("civetta:kv_pages", "gauge", "Key/value pages of 64 tokens.", lambda s: s.pages_total),
    Metric("civetta:kv_pages_free", "gauge", "Those that nobody holds.", lambda s: s.pages_free),
    Metric(
        "llamacpp:stalls_total",
        "counter",
        "Steps that took longer than --stall-timeout-ms.",
        lambda s: s.stalls_total,
    ),
    Metric(
        "llamacpp:cache_hits_ram_total",
        "counter",
        "Prompts that began from a state in RAM.",
        lambda s: s.cache.hits_ram_total,
    ),
    Metric(
        "llamacpp:cache_hits_disk_total",
        "counter",
        "Prompts that began from a state on disk.",
        lambda s: s.cache.hits_disk_total,
    ),
    Metric(
        "llamacpp:cache_misses_total",
        "counter",
        "Prompts that began from nothing.",
        lambda s: s.cache.misses_total,
    ),
    Metric(
        "civetta:cache_miss_reasons_total",
        "counter",
        "Ended requests whose prompt was not reused as far as it was known, by reason.",
        lambda s: [(f'reason="{reason}"', count) for reason, count in s.cache_misses],
    ),
    Metric(
        "llamacpp:cache_entries",
        "gauge",
        "States kept in RAM.",
        lambda s: s.cache.entries_ram,
    ),
    Metric(
        "civetta:cache_entries_disk", "gauge", "States on disk.", lambda s: s.cache.entries_disk
    ),
    Metric(
        "llamacpp:cache_ram_bytes",
        "gauge",
        "Bytes of the states kept in RAM.",
        lambda s: s.cache.ram_bytes,
    ),
    Metric(
        "civetta:cache_ram_budget_bytes",
        "gauge",
        "Most that they may take.",
        lambda s: s.cache.ram_budget_bytes,
    ),
    Metric(
        "llamacpp:cache_disk_bytes",
        "gauge",
        "Bytes of the states kept on disk.",
        lambda s: s.cache.disk_bytes,
    ),
    Metric(
        "civetta:cache_disk_budget_bytes",
        "gauge",
        "Most that they may take.",
        lambda s: s.cache.disk_budget_bytes,
    ),
    Metric(
        "civetta:cache_disk_queue",
        "gauge",
        "States waiting to be written.",
        lambda s: s.cache.disk_queue,
    ),
    Metric("civetta:cache_kept_total", "counter", "States kept.", lambda s: s.cache.kept_total),
    Metric(
        "civetta:cache_refused_total",
        "counter",
        "States not kept for lack of room.",
        lambda s: s.cache.refused_total,
    ),
    Metric(
        "llamacpp:cache_evicted_total",
        "counter",
        "States given up for room.",
        lambda s: s.cache.evicted_total,
    ),
    Metric(
        "civetta:cache_damaged_total",
        "counter",
        "Stored states whose bytes were bad.",
        lambda s: s.cache.damaged_total,
    ),
    Metric(
        "llamacpp:spec_decode_num_drafts_total",
        "counter",
        "Rounds of a reply with drafted tokens.",
        lambda s: s.drafts_total,
    ),
    Metric(
        "llamacpp:spec_decode_num_draft_tokens_total",
        "counter",
        "Tokens drafted and verified.",
        lambda s: s.draft_tokens_total,
    ),
    Metric(
        "llamacpp:spec_decode_num_accepted_tokens_total",
        "counter",
        "Drafted tokens that stood.",
        lambda s: s.draft_tokens_accepted_total,
    ),
    Metric(
        "vllm:spec_decode_num_draft_tokens_per_pos_total",
        "counter",
        "Tokens drafted, by place in the draft from 0.",
        lambda s: [(f'position="{i}"', drafted) for i, (drafted, _) in enumerate(s.draft_depths)],
    ),
    Metric(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Drafted tokens that stood, by place in the draft from 0.",
        lambda s: [(f'position="{i}"', stood) for i, (_, stood) in enumerate(s.draft_depths)],
    ),
    Metric(
        "civetta:device_memory_bytes",
        "gauge",
        "Bytes that tensors take on the GPU; 0 on a CPU.",
        lambda s: s.device_bytes,
    ),
)

HISTOGRAMS: tuple[tuple[str, str, Callable[[EngineStats], HistogramStats]], ...] = (
    (
        "vllm:request_queue_time_seconds",
        "From a request's arrival to its turn.",
        lambda s: s.durations.queue,
    ),
    (
        "vllm:time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        lambda s: s.durations.first_token,
    ),
    (
        "vllm:inter_token_latency_seconds",
        "Between deliveries of one reply; with drafts one may bring several tokens.",
        lambda s: s.durations.inter_token,
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "From a request's arrival to its end.",
        lambda s: s.durations.whole,
    ),
)

_NOTHING = EngineStats(
    running=0,
    waiting=0,
    prompt_tokens_total=0,
    generated_tokens_total=0,
    cached_tokens_total=0,
    prefill_s_total=0.0,
    decode_s_total=0.0,
    requests_total=0,
    requests_cancelled_total=0,
    requests_failed_total=0,
)


async def metrics(request: Request) -> Response:
    """GET /metrics: counters for Prometheus; the engine's are zero while the model loads."""
    engine: EngineClient | None = request.app.state.engine
    stats = _NOTHING if engine is None else engine.stats()
    lines = [*_engine_lines(stats), *_server_lines(request.app.state.traffic)]
    return PlainTextResponse(
        "\n".join(lines) + "\n", media_type="text/plain; version=0.0.4; charset=utf-8"
    )


def _engine_lines(stats: EngineStats) -> Iterator[str]:
    for metric in METRICS:
        value = metric.read(stats)
        samples = [("", value)] if isinstance(value, (int, float)) else value
        yield from _family(metric.name, metric.kind, metric.text, samples)
    for name, text, read in HISTOGRAMS:
        yield from _histogram(name, text, read(stats))


def _server_lines(traffic: Traffic) -> Iterator[str]:
    yield from _family(
        "civetta:http_requests_open", "gauge", "HTTP requests open now.", [("", traffic.open)]
    )
    yield from _family(
        "civetta:http_responses_total",
        "counter",
        "HTTP responses by status; 499 is a client that left.",
        [(f'status="{status}"', count) for status, count in sorted(traffic.statuses.items())],
    )
    resident = _resident_bytes()
    if resident is not None:
        yield from _family(
            "process_resident_memory_bytes",
            "gauge",
            "Memory of this process, mapped files included.",
            [("", resident)],
        )


def _family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{{{labels}}} {_number(value)}" if labels else f"{name} {_number(value)}"


def _histogram(name: str, text: str, stats: HistogramStats) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} histogram"
    total = 0
    for bound_s, count in zip((*stats.bounds_s, "+Inf"), stats.counts, strict=True):
        total += count
        yield f'{name}_bucket{{le="{bound_s}"}} {total}'
    yield f"{name}_sum {_number(stats.sum_s)}"
    yield f"{name}_count {total}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(round(value, 6))


def _resident_bytes() -> int | None:
    """Resident memory as Linux tells it; None elsewhere."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
