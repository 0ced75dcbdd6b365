"""Endpoints about the server itself: health, readiness, models, metrics. All are cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse, Response

from civetta.api.wire import json_response
from civetta.errors import EngineClosed, ModelNotFound, RouteNotFound

if TYPE_CHECKING:
    from starlette.requests import Request

    from civetta.engine.protocol import EngineClient, EngineStats, ModelInfo
    from civetta.options import Settings

_METRICS = (
    ("prompt_tokens_total", "counter", "Prompt tokens computed (reused ones not counted)."),
    ("prompt_tokens_cached_total", "counter", "Prompt tokens reused from the cache."),
    ("prompt_seconds_total", "counter", "Seconds spent on prompts."),
    ("tokens_predicted_total", "counter", "Tokens generated."),
    ("tokens_predicted_seconds_total", "counter", "Seconds spent on generating."),
    ("requests_total", "counter", "Requests that reached the engine."),
    ("requests_cancelled_total", "counter", "Requests ended by their client or a limit."),
    ("requests_failed_total", "counter", "Requests that failed."),
    ("requests_put_back_total", "counter", "Times a request had to compute its state again."),
    ("n_tokens_max", "gauge", "Longest sequence so far, in tokens."),
    ("kv_cache_usage_ratio", "gauge", "Share of the key/value pages that sessions or cache hold."),
    ("kv_cache_tokens", "gauge", "Tokens in the sequences that run."),
    ("stalls_total", "counter", "Steps that took longer than --stall-timeout-ms."),
    ("cache_hits_ram_total", "counter", "Prompts that began from a state in RAM."),
    ("cache_hits_disk_total", "counter", "Prompts that began from a state on disk."),
    ("cache_misses_total", "counter", "Prompts that began from nothing."),
    ("cache_entries", "gauge", "States kept in RAM."),
    ("cache_ram_bytes", "gauge", "Bytes of the states kept in RAM."),
    ("cache_disk_bytes", "gauge", "Bytes of the states kept on disk."),
    ("cache_evicted_total", "counter", "States given up for room."),
    ("spec_decode_num_drafts_total", "counter", "Rounds of a reply with drafted tokens."),
    ("spec_decode_num_draft_tokens_total", "counter", "Tokens drafted and verified."),
    ("spec_decode_num_accepted_tokens_total", "counter", "Drafted tokens that stood."),
    ("requests_processing", "gauge", "Requests running."),
    ("requests_deferred", "gauge", "Requests waiting."),
)


def engine_of(request: Request) -> EngineClient:
    """The engine, once it is there. Raises EngineClosed while the model loads or after closing."""
    engine: EngineClient | None = request.app.state.engine
    if engine is None:
        raise EngineClosed("The model is still loading: try again shortly.")
    return engine


async def health(request: Request) -> Response:
    """GET /health, /healthz, /v1/health: 200 once requests are served.

    503 while the model loads, and while a step takes longer than --stall-timeout-ms.
    """
    engine: EngineClient | None = request.app.state.engine
    if engine is None:
        return json_response({"status": "loading model"}, 503, {"Retry-After": "1"})
    stalled_s = engine.stats().stalled_s
    if stalled_s:
        return json_response({"status": "stalled", "stalled_s": round(stalled_s, 1)}, 503)
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """GET /ready, /readyz, /v1/ready: as health, with the model id."""
    engine: EngineClient | None = request.app.state.engine
    if engine is None:
        return json_response({"status": "loading model"}, 503, {"Retry-After": "1"})
    return json_response({"status": "ready", "model": model_id(request)})


async def models(request: Request) -> Response:
    """GET /v1/models: the one model that is served."""
    return json_response({"object": "list", "data": [_entry(request)]})


async def model(request: Request) -> Response:
    """GET /v1/models/{id}. Raises ModelNotFound for another id."""
    check_model(request, request.path_params["model_id"], param="model")
    return json_response(_entry(request))


async def abort(request: Request) -> Response:
    """DELETE /v1/requests/{id}: end the request that was answered with this X-Request-ID.

    Raises RouteNotFound when no such request waits or runs.
    """
    request_id = request.path_params["request_id"]
    if not engine_of(request).abort(request_id):
        raise RouteNotFound(
            f"No request {request_id[:80]!r} waits or runs: it has ended, or never was here."
        )
    return json_response({"id": request_id, "object": "request", "aborted": True})


async def metrics(request: Request) -> Response:
    """GET /metrics: Prometheus text with llama.cpp's names; all zero while the model loads."""
    engine: EngineClient | None = request.app.state.engine
    values = {} if engine is None else _metric_values(engine.stats())
    lines = []
    for name, kind, text in _METRICS:
        lines.append(f"# HELP llamacpp:{name} {text}")
        lines.append(f"# TYPE llamacpp:{name} {kind}")
        lines.append(f"llamacpp:{name} {values.get(name, 0)}")
    return PlainTextResponse(
        "\n".join(lines) + "\n", media_type="text/plain; version=0.0.4; charset=utf-8"
    )


def model_id(request: Request) -> str:
    """The public id: --served-model-name, else the model's own."""
    name: str | None = request.app.state.settings.server.served_model_name
    return name or engine_of(request).info.model_id


def check_model(request: Request, asked: str, *, param: str = "model") -> None:
    """Raise ModelNotFound unless `asked` is the model that is served."""
    served = model_id(request)
    if asked != served:
        raise ModelNotFound(
            f"The model {asked[:200]!r} is not served here: use {served!r}.", param=param
        )


def client_of(request: Request) -> str:
    """The address that the request came from, for fairness between clients."""
    return request.client.host if request.client else ""


def timeout_of(settings: Settings) -> float | None:
    """Seconds that a request may wait and generate; None is no limit."""
    return settings.engine.request_timeout_ms / 1000 or None


def _entry(request: Request) -> dict[str, object]:
    info: ModelInfo = engine_of(request).info
    return {
        "id": model_id(request),
        "object": "model",
        "created": info.created_s,
        "owned_by": "civetta",
        "context_length": info.context_tokens,
        "max_model_len": info.context_tokens,
        "modalities": ["text"],
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "meta": {
            "n_ctx": info.context_tokens,
            "n_vocab": info.vocab_size,
            "n_params": info.parameters,
            "format": info.format,
            "device": info.device,
            "dtype": info.dtype,
        },
    }


def _metric_values(stats: EngineStats) -> dict[str, float]:
    return {
        "prompt_tokens_total": stats.prompt_tokens_total,
        "prompt_tokens_cached_total": stats.cached_tokens_total,
        "prompt_seconds_total": round(stats.prefill_s_total, 6),
        "tokens_predicted_total": stats.generated_tokens_total,
        "tokens_predicted_seconds_total": round(stats.decode_s_total, 6),
        "requests_total": stats.requests_total,
        "requests_cancelled_total": stats.requests_cancelled_total,
        "requests_failed_total": stats.requests_failed_total,
        "requests_put_back_total": stats.put_back_total,
        "n_tokens_max": stats.longest_sequence_tokens,
        "kv_cache_usage_ratio": round(_share(stats.pages_free, stats.pages_total), 6),
        "kv_cache_tokens": stats.session_tokens,
        "stalls_total": stats.stalls_total,
        "cache_hits_ram_total": stats.cache.hits_ram_total,
        "cache_hits_disk_total": stats.cache.hits_disk_total,
        "cache_misses_total": stats.cache.misses_total,
        "cache_entries": stats.cache.entries_ram,
        "cache_ram_bytes": stats.cache.ram_bytes,
        "cache_disk_bytes": stats.cache.disk_bytes,
        "cache_evicted_total": stats.cache.evicted_total,
        "spec_decode_num_drafts_total": stats.drafts_total,
        "spec_decode_num_draft_tokens_total": stats.draft_tokens_total,
        "spec_decode_num_accepted_tokens_total": stats.draft_tokens_accepted_total,
        "requests_processing": stats.running,
        "requests_deferred": stats.waiting,
    }


def _share(free: int, total: int) -> float:
    return (total - free) / total if total else 0.0
