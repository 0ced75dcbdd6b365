"""Endpoints about the server itself: health, readiness, models, ending a request. All are cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.api.model_list import model_entry, model_list
from civetta.api.wire import json_response
from civetta.errors import EngineClosed, ModelNotFound, RouteNotFound

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from civetta.engine.protocol import EngineClient
    from civetta.options import Settings


def engine_of(request: Request) -> EngineClient:
    """The engine, once it is there. Raises EngineClosed while the model loads or after closing."""
    engine: EngineClient | None = request.app.state.engine
    if engine is None:
        raise EngineClosed("The model is still loading: try again shortly.")
    return engine


async def health(request: Request) -> Response:
    """GET /health, /healthz, /v1/health: 200 once requests are served.

    503 while the model loads, while a step takes longer than --stall-timeout-ms, and once the device
    is lost.
    """
    engine: EngineClient | None = request.app.state.engine
    if engine is None:
        return json_response({"status": "loading model"}, 503, {"Retry-After": "1"})
    stats = engine.stats()
    if stats.device_lost:
        return json_response({"status": "device lost"}, 503)
    if stats.stalled_s:
        stalled_s = round(stats.stalled_s, 1)
        return json_response({"status": "stalled", "stalled_s": stalled_s}, 503)
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """GET /ready, /readyz, /v1/ready: as health, with the model id."""
    alive = await health(request)
    if alive.status_code != 200:
        return alive
    return json_response({"status": "ready", "model": model_id(request)})


async def models(request: Request) -> Response:
    """GET /v1/models: the one model that is served."""
    return json_response(model_list(model_id(request), engine_of(request).info))


async def model(request: Request) -> Response:
    """GET /v1/models/{id}: that model. Raises ModelNotFound for another id."""
    check_model(request, request.path_params["model_id"])
    return json_response(model_entry(model_id(request), engine_of(request).info))


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


def model_id(request: Request) -> str:
    """The public id: --served-model-name, else the model's own."""
    name: str | None = request.app.state.settings.server.served_model_name
    return name or engine_of(request).info.model_id


def check_model(request: Request, asked: str | None) -> None:
    """Raise ModelNotFound unless `asked` is the model that is served, or left out."""
    if asked is None:
        return
    served = model_id(request)
    if asked != served:
        raise ModelNotFound(
            f"The model {asked[:200]!r} is not served here: use {served!r}.", param="model"
        )


def client_of(request: Request) -> str:
    """The address that the request came from, for fairness between clients."""
    return request.client.host if request.client else ""


def timeout_of(settings: Settings) -> float | None:
    """Seconds that a request may wait and generate; None is no limit."""
    return settings.engine.request_timeout_ms / 1000 or None
