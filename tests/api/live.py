"""The server on a real socket, in this process: what ASGI clients cannot reach."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

from civetta.api.app import build_app
from civetta.api.connection import ConnectionConfig
from civetta.cli.serve import listen
from civetta.options import ServerOptions, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fake_engine import FakeEngine


class Live:
    """A running server; `app` is its application, `config` uvicorn's."""

    def __init__(self, engine: FakeEngine | None, options: ServerOptions, **topics: Any) -> None:
        self.app = build_app(engine, Settings(server=options, **topics))
        self.config = ConnectionConfig(self.app, options)
        self.server = uvicorn.Server(self.config)
        self.listener = listen(options)
        self.address = self.listener.getsockname()[:2]
        self._thread = threading.Thread(
            target=lambda: self.server.run(sockets=[self.listener]), daemon=True
        )

    def start(self) -> None:
        self._thread.start()
        until(lambda: self.server.started)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server ends when it is told to"

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    @property
    def open_requests(self) -> int:
        return int(self.app.state.traffic.open)

    def connect(self, **kwargs: Any) -> Peer:
        return Peer(self.address, **kwargs)


class Peer:
    """A client that sends bytes by hand."""

    def __init__(self, address: Any, *, receive_bytes: int | None = None) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(20)
        self.socket.connect(address)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def post(self, path: str, body: Any, *, headers: str = "") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send(
            f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )

    def until(self, mark: bytes) -> bytes:
        """Read until `mark` has come."""
        got = b""
        while mark not in got:
            data = self.socket.recv(65_536)
            assert data, f"the server closed after {got[-200:]!r}"
            got += data
        return got

    def rest(self) -> bytes:
        """Read until the server closes."""
        got = b""
        try:
            while data := self.socket.recv(65_536):
                got += data
        except ConnectionResetError:
            pass
        return got

    def reply(self) -> tuple[int, dict[str, str], bytes]:
        """One response with a Content-Length."""
        got = self.until(b"\r\n\r\n")
        head, _, body = got.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
        while len(body) < int(headers["content-length"]):
            body += self.socket.recv(65_536)
        return int(status.split(" ")[1]), headers, body


@contextmanager
def live(engine: FakeEngine | None, topics: Any = None, **options: Any) -> Iterator[Live]:
    server = Live(engine, ServerOptions(port=0, **options), **(topics or {}))
    server.start()
    try:
        yield server
    finally:
        server.stop()


def until(condition: Any, timeout_s: float = 20.0) -> None:
    """Wait for what another thread does."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.002)
