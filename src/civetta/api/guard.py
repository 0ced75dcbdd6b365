"""Pure-ASGI middleware: request id, API key, body and concurrency limits, one log line a request.

It sits outside everything that reads the body, and it never wraps `receive` in a way that would
hide a disconnect (the reason for not using BaseHTTPMiddleware).
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import logging
import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders

from civetta.api.wire import body_too_large, error_response
from civetta.errors import CivettaError, RequestFailed, TooManyRequests, Unauthorized
from civetta.log import log_event

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from civetta.options import ServerOptions

PUBLIC_PATHS = frozenset(
    {"/health", "/healthz", "/v1/health", "/ready", "/readyz", "/v1/ready"},
)
CLIENT_CLOSED = 499
_DRAIN_FACTOR = 8  # a body up to this many times the limit is read and dropped before the 413
_log = logging.getLogger("civetta.api")


class Guard:
    """Wraps the app; owns the counter of request ids and the number of open requests."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._options = options
        self._key_digest = None if options.api_key is None else _digest(options.api_key)
        self._ids = itertools.count(1)
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every other scope type passes through untouched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"r{next(self._ids)}"
        scope.setdefault("state", {})["request_id"] = request_id
        reply = _Reply(send, request_id)
        started = time.monotonic()
        self._open += 1
        try:
            await self._serve(scope, receive, reply)
        finally:
            self._open -= 1
            _log_request(scope, request_id, reply.status, time.monotonic() - started)

    async def _serve(self, scope: Scope, receive: Receive, reply: _Reply) -> None:
        try:
            await self._check(scope, receive)
            await self._app(scope, receive, reply)
        except CivettaError as error:
            await _answer(error, scope, receive, reply)
        except Exception:  # noqa: BLE001 - the root of a request: it ends the request, logged whole
            _log.exception("request id=%s failed", scope["state"]["request_id"])
            fault = RequestFailed(
                "The server failed on this request; its log says why under"
                f" {scope['state']['request_id']}."
            )
            await _answer(fault, scope, receive, reply)

    async def _check(self, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        if scope["path"] in PUBLIC_PATHS:
            return
        if self._open > self._options.max_connections:
            raise TooManyRequests(
                f"{self._options.max_connections} requests are open already: try again later, or"
                " start the server with a larger --max-connections."
            )
        if self._key_digest is not None and scope["method"] != "OPTIONS":
            _check_key(headers, self._key_digest)
        length = headers.get("content-length", "")
        limit = self._options.max_request_bytes
        if length.isascii() and length.isdigit() and int(length) > limit:
            if "expect" not in headers and int(length) <= limit * _DRAIN_FACTOR:
                await _drain(receive)  # else clients see a reset while they still write
            raise body_too_large(limit)


class _Reply:
    """`send` with the request id added; remembers the status for the log."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-ID"] = self._request_id
        await self._send(message)


async def _answer(error: CivettaError, scope: Scope, receive: Receive, reply: _Reply) -> None:
    """Send the error as a response, unless a response is under way already."""
    if reply.status is None:
        await error_response(error)(scope, receive, reply)


async def _drain(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


def _check_key(headers: Headers, key_digest: bytes) -> None:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    if not hmac.compare_digest(_digest(given), key_digest):
        raise Unauthorized(
            "The API key is missing or wrong: send the server's key as 'Authorization: Bearer KEY'."
        )


def _digest(text: str) -> bytes:
    """Equal lengths for the comparison, whatever was sent."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _log_request(scope: Scope, request_id: str, status: int | None, seconds: float) -> None:
    status = CLIENT_CLOSED if status is None else status
    level = logging.DEBUG if scope["path"] in PUBLIC_PATHS else logging.INFO
    client = scope.get("client")
    log_event(
        _log,
        level,
        "request",
        id=request_id,
        method=scope["method"],
        path=scope["path"],
        status=status,
        ms=round(seconds * 1000),
        client=client[0] if client else None,
    )
