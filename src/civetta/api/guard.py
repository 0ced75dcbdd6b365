"""Pure-ASGI middleware: request id, API key, CORS, limits, one log line a request.

It sits outside everything that reads the body, and it never wraps `receive` in a way that would
hide a disconnect (the reason for not using BaseHTTPMiddleware).
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect

from civetta.api.account import Account
from civetta.api.cors import Cors
from civetta.api.refusal import refusal
from civetta.api.web_page import PAGE_PATHS
from civetta.api.wire import body_too_large
from civetta.errors import (
    CivettaError,
    HeadersTooLarge,
    RequestFailed,
    RequestInvalid,
    TooManyRequests,
)
from civetta.log import log_event

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from civetta.api.account import Traffic
    from civetta.api.keys import KeyRing
    from civetta.api.trace import Trace
    from civetta.options import ServerOptions

PUBLIC_PATHS = PAGE_PATHS | {
    "/health",
    "/healthz",
    "/v1/health",
    "/ready",
    "/readyz",
    "/v1/ready",
}
"""Answered without an API key, and however many requests are open."""

_POLLED_PATHS = frozenset({"/metrics", "/slots", "/v1/slots"})

CLIENT_CLOSED = 499
METHOD_CHARS = 20
"""Of a method, where it is told: anything may stand there, up to the limit of headers."""

_DRAIN_FACTOR = 8  # a body up to this many times the limit is read and dropped before the 413
_log = logging.getLogger("civetta.api")


class Guard:
    """Wraps the app; owns the counter of request ids.

    `traffic` is counted for the metrics, `trace` told of what happens.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServerOptions,
        keys: KeyRing,
        traffic: Traffic,
        trace: Trace | None,
    ) -> None:
        self._app = app
        self._options = options
        self._traffic, self._trace = traffic, trace
        self._keys = keys
        self._cors = Cors(options.cors_origin)
        self._ids = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every other scope type passes through untouched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        account = Account(f"r{next(self._ids)}", self._trace)
        state = scope.setdefault("state", {})
        state["request_id"], state["account"] = account.request_id, account
        headers = Headers(scope=scope)
        reply = _Reply(send, account, self._cors.headers(headers))
        account.tell("request", method=scope["method"][:METHOD_CHARS], path=scope["path"][:200])
        self._traffic.open += 1
        try:
            await self._serve(scope, receive, reply, headers)
        finally:
            self._traffic.open -= 1
            self._ended(scope, account, CLIENT_CLOSED if reply.status is None else reply.status)

    async def _serve(self, scope: Scope, receive: Receive, reply: _Reply, headers: Headers) -> None:
        try:
            preflight = self._cors.preflight(scope["method"], headers)
            if preflight is not None:
                await preflight(scope, receive, reply)
                return
            _check_end(headers, reply)
            await self._check(scope, receive, headers)
            await self._app(scope, receive, reply)
        except CivettaError as error:
            await _answer(error, scope, receive, reply)
        except ClientDisconnect:  # it left before its body was read
            scope["state"]["account"].reason = "client_gone"
        except Exception:  # noqa: BLE001 - the root of a request: it ends the request, logged whole
            _log.exception("request id=%s failed", scope["state"]["request_id"])
            fault = RequestFailed(
                "The server failed on this request; its log says why under"
                f" {scope['state']['request_id']}."
            )
            await _answer(fault, scope, receive, reply)

    async def _check(self, scope: Scope, receive: Receive, headers: Headers) -> None:
        size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self._options.max_header_bytes:
            raise HeadersTooLarge(
                f"The request line and headers are larger than {self._options.max_header_bytes}"
                " bytes: send less, or start the server with a larger --max-header-bytes."
            )
        if scope["path"] in PUBLIC_PATHS:
            return
        self._keys.check(headers)
        if self._traffic.open > self._options.max_connections:
            raise TooManyRequests(
                f"{self._options.max_connections} requests are open already: try again later, or"
                " start the server with a larger --max-connections."
            )
        length = headers.get("content-length", "")
        limit = self._options.max_request_bytes
        if length.isascii() and length.isdigit() and int(length) > limit:
            if "expect" not in headers and int(length) <= limit * _DRAIN_FACTOR:
                await _drain(receive)  # else clients see a reset while they still write
            raise body_too_large(limit)

    def _ended(self, scope: Scope, account: Account, status: int) -> None:
        self._traffic.statuses[status] += 1
        quiet = scope["path"] in PUBLIC_PATHS or scope["path"] in _POLLED_PATHS
        level = logging.DEBUG if quiet else logging.INFO
        client = scope.get("client")
        figures = account.figures()
        account.tell("end", status=status, **figures)
        log_event(
            _log,
            level,
            "request",
            id=account.request_id,
            method=scope["method"][:METHOD_CHARS],
            path=scope["path"][:200],
            status=status,
            ms=round(account.age_s() * 1000),
            client=client[0] if client else None,
            **figures,
        )


class _Reply:
    """`send` with the headers of every response added; remembers the status for the log."""

    def __init__(self, send: Send, account: Account, marks: dict[str, str]) -> None:
        self._send = send
        self._account = account
        self._marks = marks
        self.status: int | None = None

    def closes(self) -> None:
        """End the connection with this response: nobody knows what its next bytes belong to."""
        self._marks = {**self._marks, "Connection": "close"}

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-ID"] = self._account.request_id
            headers.setdefault("Server-Timing", f"total;dur={self._account.age_s() * 1000:.3f}")
            for name, value in self._marks.items():
                headers[name] = value
        await self._send(message)


def _check_end(headers: Headers, reply: _Reply) -> None:
    if "content-length" in headers and "transfer-encoding" in headers:
        reply.closes()
        raise RequestInvalid(
            "The request has Content-Length and Transfer-Encoding, which say different things of"
            " where it ends: send one of them.",
            code="bad_http",
        )


async def _answer(error: CivettaError, scope: Scope, receive: Receive, reply: _Reply) -> None:
    """Send the error as a response, unless a response is under way already."""
    if reply.status is None:
        await refusal(scope, error)(scope, receive, reply)


async def _drain(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
