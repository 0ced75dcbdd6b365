"""`civetta serve`: the HTTP API on one address, until SIGTERM, SIGHUP or Ctrl+C.

It listens before it loads, so that health checks answer (503) meanwhile and a taken port is
told at once. SIGTERM stops listening, lets running replies end for --drain-timeout at most, and exits 0;
1 when a step hung and was left behind (way_out.py), 75 when the device was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import math
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

import click
import uvicorn

from civetta.api.app import build_app
from civetta.api.connection import ConnectionConfig
from civetta.checkpoint.existing import existing
from civetta.cli import engine_setup
from civetta.cli.options import settings_command
from civetta.cli.way_out import WayOut
from civetta.errors import DeviceLost, ListenError, UsageError
from civetta.log import log_event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from starlette.applications import Starlette

    from civetta.engine.protocol import EngineClient
    from civetta.options import ServerOptions, Settings

EXIT_INTERRUPTED = 130
TELL_S = 5
"""After the drain: time to tell the clients of replies that were cut off."""

STEP_S = 60.0
"""What a step may take at the end where --stall-timeout-ms does not say when it hangs."""

LOOK_S = 1.0
"""Between looks whether the device is lost."""

STUCK_MS = 120_000
"""A client that takes no byte of what waits for it for so long is given up."""

_STDERR_FD = 2

_log = logging.getLogger("civetta.serve")


@click.command(short_help="Serve the OpenAI HTTP API.")
@click.argument("service", default="llm", metavar="[llm]")
@settings_command(
    "model",
    "vision",
    "sampling",
    "reasoning",
    "engine",
    "cache",
    "drafting",
    "server",
    log_level="info",
)
def serve(settings: Settings, service: str) -> int:
    """Serve the OpenAI HTTP API: chat completions, completions, models, health, metrics.

    llm, the language model, is the one service of this version and may be left out.
    """
    if service != "llm":
        raise UsageError(f"Unknown service {service!r}: this version serves llm only.")
    if settings.model.model is not None:
        existing(settings.model.model)  # before anything says that it loads
    with listen(settings.server) as listener:
        return run_server(settings, listener)


def listen(options: ServerOptions) -> socket.socket:
    """A bound, listening socket. Raises ListenError."""
    place = f"{options.host}:{options.port}"
    try:
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(
            f"Cannot listen on {place}: {error.strerror}. Give another --host (or HOST in the"
            " environment)."
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _end_dead_peers(listener)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ListenError(
            f"Cannot listen on {place}: {error.strerror}. Give another --port or --host (PORT and"
            " HOST in the environment set them too)."
        ) from error
    return listener


def _end_dead_peers(listener: socket.socket) -> None:
    """Let the system close connections whose client is gone, or reads nothing, for STUCK_MS.

    Accepted sockets inherit the options. Where the system lacks one, it goes without.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_MS)


def run_server(settings: Settings, listener: socket.socket) -> int:
    """Load the model while answering health checks, then serve; returns the exit status.

    A process that a fault in compiled code, or in a mapped file, ends says on stderr where it was.
    """
    faulthandler.enable(_STDERR_FD)
    app = build_app(None, settings)
    drain_s = settings.server.drain_timeout

    def cut_off() -> None:
        loader.close()

    drain = threading.Timer(drain_s, cut_off)
    drain.daemon = True
    way_out = WayOut(
        lambda: loader.engine,
        begin=drain.start,
        longest_s=longest_end_s(settings),
        short_s=TELL_S,
    )
    server = Server(
        ConnectionConfig(
            app,
            settings.server,
            timeout_graceful_shutdown=math.ceil(drain_s) + TELL_S,
        ),
        on_exit=way_out.asked,
    )
    _adopt_uvicorn_log()
    url = base_url(listener)
    log_event(
        _log,
        logging.INFO,
        "loading",
        model=settings.model.model or "embedded",
        health=f"{url}/health",
    )
    loader = Loader(app, settings, server, url)
    try:
        with server.capture_signals():  # a quick load says ready before uvicorn would handle them
            loader.start()
            server.run(sockets=[listener])
    finally:
        drain.cancel()
        loader.close()
        way_out.close()
        if app.state.responses is not None:
            app.state.responses.close()
    if loader.error is not None:
        raise loader.error
    return EXIT_INTERRUPTED if signal.SIGINT in server.signals else 0


def longest_end_s(settings: Settings) -> float:
    """Seconds from SIGTERM on after which a server that still runs hangs.

    Replies end, those that were cut off are told, a step ends, the cache's writes end.
    """
    step_s = settings.engine.stall_timeout_ms / 1000 or STEP_S
    return 2 * settings.server.drain_timeout + TELL_S + step_s


class Server(uvicorn.Server):
    """uvicorn, remembering the signals it got instead of raising them again at the end.

    `on_exit(name)` is told of each, in the midst of anything, and of other causes to stop.
    """

    def __init__(self, config: uvicorn.Config, *, on_exit: Callable[[str], None]) -> None:
        super().__init__(config)
        self.signals: list[int] = []
        self._on_exit = on_exit

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the signals that stop while serving; one that is ignored, as under nohup, stays so."""
        before = {
            sig: signal.signal(sig, self.handle_exit)
            for sig in _SIGNALS
            if signal.getsignal(sig) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain; a second signal ends it."""
        self.signals.append(sig)
        self.force_exit = self.force_exit or len(self.signals) > 1
        self._on_exit(signal.Signals(sig).name)
        super().handle_exit(sig, frame)

    def stop(self, cause: str) -> None:
        """Begin the drain without a signal; any thread."""
        self._on_exit(cause)
        self.should_exit = True


class Loader:
    """Loads the model on a thread, then watches for the loss of its device.

    A failure to load and a lost device stop the server, and are kept in `error`.
    """

    def __init__(self, app: Starlette, settings: Settings, server: Server, url: str) -> None:
        self._app, self._settings, self._server, self._url = app, settings, server, url
        self.engine: EngineClient | None = None
        self._thread = threading.Thread(target=self._load, name="civetta-load", daemon=True)
        self._closed = threading.Event()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def close(self) -> None:
        """Stop the engine if there is one; a load under way is left to die with the process."""
        self._closed.set()
        if self.engine is not None:
            self.engine.close()

    def _load(self) -> None:
        started = time.monotonic()
        try:
            self.engine = engine_setup.build_engine(self._settings)
        except Exception as error:  # noqa: BLE001 - the thread's root: the main thread raises it
            self.error = error
            self._server.should_exit = True
            return
        # What is loaded stays: the collector need not look at it again and again, which takes it
        # tenths of a second in the midst of everybody's tokens.
        gc.collect()
        gc.freeze()
        self._app.state.engine = self.engine
        announce(self._settings, self.engine, self._url, time.monotonic() - started)
        self._watch(self.engine)

    def _watch(self, engine: EngineClient) -> None:
        while not self._closed.wait(LOOK_S):
            if engine.stats().device_lost:
                self.error = DeviceLost(
                    "The device is lost, and the log says how: start the server again."
                )
                self._server.stop("device_lost")
                return


def announce(settings: Settings, engine: EngineClient, url: str, load_s: float) -> None:
    """Tell on stderr where the server is and how to try it."""
    info, options = engine.info, settings.server
    name = options.served_model_name or info.model_id
    log_event(
        _log, logging.INFO, "ready", model=name, format=info.format, device=info.device,
        dtype=info.dtype, context=info.context_tokens, load_s=round(load_s, 2),
    )  # fmt: skip
    key = "" if not _has_keys(options) else " -H 'Authorization: Bearer YOUR_KEY'"
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    print(
        f"civetta serves {name} at {url}/v1; try:"
        f" curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'",
        file=sys.stderr,
        flush=True,
    )
    if not _has_keys(options) and not _is_loopback(options.host):
        log_event(_log, logging.WARNING, "open_to_the_network", host=options.host,
                  cure="--api-key protects it")  # fmt: skip


def base_url(listener: socket.socket) -> str:
    """The URL that a client on this machine uses."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


_CLIENTS_FAULTS = ("Invalid HTTP request", "Unsupported upgrade", "No supported WebSocket")
_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []),  # its terminal was closed
)


def _has_keys(options: ServerOptions) -> bool:
    return bool(options.api_key or options.api_key_file)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _adopt_uvicorn_log() -> None:
    """Let uvicorn's warnings come out as civetta's own lines, if civetta's level lets them.

    What clients do wrong is no warning: anybody could fill the log with it.
    """
    logger, own = logging.getLogger("uvicorn"), logging.getLogger("civetta")
    logger.handlers[:] = own.handlers
    logger.setLevel(max(logging.WARNING, own.level))
    logger.propagate = False
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: not (str(record.msg).startswith(_CLIENTS_FAULTS) or _was_cancelled(record))
    )


def _was_cancelled(record: logging.LogRecord) -> bool:
    """Whether a record tells of a request that the end of serving broke off."""
    return record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
