"""One client connection: uvicorn's HTTP/1.1 protocol, with limits, and errors as JSON.

What comes here is before any request: bytes that are no HTTP, headers that are too large or never
end, more connections than there is room for.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle

from civetta.api.wire import error_payload
from civetta.errors import (
    CivettaError,
    HeadersTooLarge,
    HeaderTimeout,
    RequestInvalid,
    TooManyRequests,
)
from civetta.log import log_event

if TYPE_CHECKING:
    import asyncio

    from starlette.types import ASGIApp

    from civetta.options import ServerOptions

KEEP_ALIVE_S = 75
"""An idle connection is kept for so long: longer than proxies keep theirs, which is 60 s mostly."""
HEADERS_S = 30
"""A request line and headers have to arrive within this."""
CONNECTIONS_A_REQUEST, SPARE_CONNECTIONS = 4, 64
"""Connections kept: so many for each of --max-connections, and some; browsers open idle ones."""


_log = logging.getLogger("civetta.api")


class Connection(H11Protocol):
    """One connection; `config.most_connections` and `config.headers_s` are its limits."""

    config: ConnectionConfig
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers, or refuse when there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > self.config.most_connections:
            self._refuse(
                TooManyRequests(
                    f"{self.config.most_connections} connections are open already: try again"
                    " later, or start the server with a larger --max-connections."
                )
            )
            return
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Read on; the time for headers runs while some have come and not all."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await_headers()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline too."""
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's text
        """Answer bytes that are not HTTP; a request that is under way is told of a disconnect."""
        fault = sys.exception()
        cycle: RequestResponseCycle | None = self.cycle  # there is none before the first request
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if isinstance(fault, h11.RemoteProtocolError) and fault.error_status_hint == 431:
            limit = self.config.h11_max_incomplete_event_size
            self._refuse(
                HeadersTooLarge(
                    f"The request line and headers are larger than {limit} bytes: send less, or"
                    " start the server with a larger --max-header-bytes."
                )
            )
        else:
            log_event(_log, logging.DEBUG, "bad_http", fault=type(fault).__name__)
            self._refuse(RequestInvalid("This is not an HTTP/1.1 request.", code="bad_http"))

    def _await_headers(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.config.headers_s, self._late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self._refuse(
                HeaderTimeout(f"No whole request came within {self.config.headers_s:g} s.")
            )

    def _refuse(self, error: CivettaError) -> None:
        """Send the error, where a response can still be sent, and close."""
        self._stop_waiting()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error_payload(error))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            status = error.http_status
            head = h11.Response(
                status_code=status, headers=headers, reason=STATUS_PHRASES.get(status, b"")
            )
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration, the same whatever else is installed beside it."""

    def __init__(self, app: ASGIApp, options: ServerOptions, **more: Any) -> None:
        super().__init__(
            app,
            http=Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=options.max_header_bytes,
            **more,
        )
        self.headers_s: float = HEADERS_S
        self.most_connections = CONNECTIONS_A_REQUEST * options.max_connections + SPARE_CONNECTIONS
