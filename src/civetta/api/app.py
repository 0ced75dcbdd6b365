"""`build_app`: the route table, the middleware, and errors as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from civetta.api import chat, completions, service
from civetta.api.delivery import Pace
from civetta.api.guard import Guard
from civetta.api.wire import error_response
from civetta.errors import CivettaError, MethodNotAllowed, RouteNotFound

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from civetta.engine.protocol import EngineClient
    from civetta.options import Settings


def build_app(
    engine: EngineClient | None, settings: Settings, *, pace: Pace | None = None
) -> Starlette:
    """The HTTP application.

    With `engine` None it answers health checks (503) until `app.state.engine` is set.
    """
    app = Starlette(
        routes=_routes(),
        middleware=[Middleware(Guard, options=settings.server)],
        exception_handlers={CivettaError: _refused, HTTPException: _no_route},
    )
    app.state.engine = engine
    app.state.settings = settings
    app.state.pace = pace or Pace()
    return app


def _routes() -> list[Route]:
    health = ("/health", "/healthz", "/v1/health")
    ready = ("/ready", "/readyz", "/v1/ready")
    return [
        *(Route(path, service.health) for path in health),
        *(Route(path, service.ready) for path in ready),
        Route("/metrics", service.metrics),
        Route("/v1/models", service.models),
        Route("/v1/models/{model_id:path}", service.model),
        Route("/v1/requests/{request_id}", service.abort, methods=["DELETE"]),
        Route("/v1/chat/completions", chat.chat_completions, methods=["POST"]),
        Route("/v1/completions", completions.completions, methods=["POST"]),
    ]


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, CivettaError), "registered for this class"
    return error_response(error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for this class"
    path = request.url.path[:200]
    if error.status_code == 405:
        response = error_response(
            MethodNotAllowed(f"{request.method} is not a method of {path}: see the documentation.")
        )
        response.headers.update(error.headers or {})
        return response
    return error_response(RouteNotFound(f"There is nothing at {path}: the API is below /v1."))
