"""`build_app`: the route table, the middleware, and errors as JSON."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from civetta.api.account import Traffic
from civetta.api.delivery import Pace
from civetta.api.guard import METHOD_CHARS, Guard
from civetta.api.keys import KeyRing, read_keys
from civetta.api.refusal import refusal
from civetta.api.responses.store import ResponseStore
from civetta.api.routes import ENDPOINTS, routes
from civetta.api.seal import ThoughtSeal
from civetta.api.seal_key import kept_key
from civetta.api.trace import Trace
from civetta.api.web_page import page_routes
from civetta.errors import CivettaError, MethodNotAllowed, RouteNotFound

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from civetta.engine.protocol import EngineClient
    from civetta.options import ServerOptions, Settings


def build_app(
    engine: EngineClient | None, settings: Settings, *, pace: Pace | None = None
) -> Starlette:
    """The HTTP application.

    With `engine` None it answers health checks (503) until `app.state.engine` is set. The caller
    closes `app.state.responses`, where it is not None. Raises UsageError for a file of keys or a
    trace that cannot be used, StoreUnusable for a folder of responses.
    """
    api_keys = read_keys(settings.server)
    traffic, keys = Traffic(), KeyRing(api_keys)
    path = settings.server.trace
    trace = None if path is None else Trace(Path(path))
    app = Starlette(
        routes=[*page_routes(), *routes()],
        middleware=[
            Middleware(Guard, options=settings.server, keys=keys, traffic=traffic, trace=trace),
        ],
        exception_handlers={CivettaError: _refused, HTTPException: _no_route},
    )
    app.state.engine = engine
    app.state.settings = settings
    app.state.pace = pace or Pace()
    app.state.responses, kept = _open_store(settings.server)
    app.state.seal = ThoughtSeal(api_keys, kept)
    app.state.traffic = traffic
    app.state.parsing = asyncio.Semaphore(1)
    app.state.endpoints = ENDPOINTS
    return app


def _open_store(options: ServerOptions) -> tuple[ResponseStore | None, bytes | None]:
    """The stored responses, and the key of thoughts that is kept beside them."""
    if options.store is None:
        return None, None
    folder = Path(options.store).expanduser()
    return ResponseStore(folder, days=options.store_days), kept_key(folder)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, CivettaError), "registered for this class"
    return refusal(request.scope, error)


async def _no_route(request: Request, found: Exception) -> Response:
    assert isinstance(found, HTTPException), "registered for this class"
    path = request.url.path[:200]
    if found.status_code == 405:
        response = refusal(
            request.scope,
            MethodNotAllowed(
                f"{request.method[:METHOD_CHARS]} is not a method of {path}: see the documentation."
            ),
        )
        response.headers.update(found.headers or {})
        return response
    error = RouteNotFound(f"There is nothing at {path}: the API is below /v1.")
    return refusal(request.scope, error)
