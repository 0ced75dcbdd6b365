"""Fetching an image over https from a public address, and from no other.

The name is resolved once, every address it has must be public, and the connection goes to an
address that was checked, so that a second answer of the name server cannot lead elsewhere.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urljoin, urlsplit

from civetta.chat.image_rules import BadImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_BYTES = 20 << 20
TIMEOUT_S = 15.0
MAX_REDIRECTS = 3
TOTAL_S = 30.0
"""What all addresses of one request may take together."""
_PIECE_BYTES = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
# A picture whose server knows no type for it comes as bytes; decoding tells what it is.
_BYTES = ("application/octet-stream", "binary/octet-stream")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Not public either: the protocols' own addresses, documentation, relays, and the address at which
# virtual machines of one cloud reach their host. Python's own table differs from version to version.
_INNER = tuple(
    ipaddress.ip_network(text)
    for text in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "3fff::/20", "5f00::/16")
)
_ISATAP = 0x5EFE

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: Address) -> bool:
    """Whether an address is on the open network; those that carry an IPv4 address inside are
    judged by it."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is None and int(address) >> 32 & 0xFDFF_FFFF == _ISATAP:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address.is_site_local:
            return False
    if any(address in network for network in _INNER):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _resolve(host: str, port: int) -> list[str]:
    return [str(item[4][0]) for item in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFetcher:
    """Fetches; the fields beside the limits are there to be replaced in tests."""

    timeout_s: float = TIMEOUT_S
    max_bytes: int = MAX_BYTES
    allowed: Callable[[Address], bool] = is_public
    resolve: Callable[[str, int], list[str]] = _resolve
    context: ssl.SSLContext = field(default_factory=ssl.create_default_context)

    def fetch(self, url: str) -> bytes:
        """The body of a 200 reply; at most MAX_REDIRECTS redirects, each checked like the first.

        Raises BadImage. Looking names up, connecting and reading together take `timeout_s` at most.
        """
        deadline_s = time.monotonic() + self.timeout_s
        for _ in range(MAX_REDIRECTS + 1):
            found = self._once(_parsed(url), deadline_s)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise BadImage(f"its address redirects more than {MAX_REDIRECTS} times")

    def _once(self, url: SplitResult, deadline_s: float) -> bytes | str:
        """The body, or where a redirect points to."""
        host = url.hostname or ""
        try:
            with self._connection(url, host, deadline_s) as connection:
                path = (url.path or "/") + (f"?{url.query}" if url.query else "")
                connection.request("GET", path, headers={"Accept-Encoding": "identity"})
                with contextlib.closing(connection.getresponse()) as reply:
                    if reply.status in _REDIRECTS:
                        return str(reply.headers.get("Location", ""))
                    if reply.status != 200:
                        raise BadImage(f"{host} answered with status {reply.status}")
                    _check_type(reply, host)
                    return self._body(reply, deadline_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if time.monotonic() >= deadline_s:
                raise BadImage(f"{host} did not send it within {self.timeout_s:g} s") from error
            raise BadImage(f"it cannot be fetched from {host} ({_why(error)})") from error

    @contextlib.contextmanager
    def _connection(
        self, url: SplitResult, host: str, deadline_s: float
    ) -> Iterator[http.client.HTTPSConnection]:
        """A connection to an address that was checked; it is cut off at the deadline."""
        port = url.port or 443
        address = self._checked(host, port, deadline_s)
        left_s = max(deadline_s - time.monotonic(), 0.001)
        plain = socket.create_connection((address, port), timeout=left_s)
        held = [plain]
        # A timeout of the socket begins anew with every byte that a slow sender drips.
        watchdog = threading.Timer(left_s, _cut, [held])
        watchdog.daemon = True
        watchdog.start()
        connection = http.client.HTTPSConnection(host, port)
        try:
            secure = self.context.wrap_socket(
                plain, server_hostname=host, do_handshake_on_connect=False
            )
            connection.sock = held[0] = secure
            secure.do_handshake()
            yield connection
        finally:
            watchdog.cancel()
            connection.close()
            held[0].close()

    def _checked(self, host: str, port: int, deadline_s: float) -> str:
        addresses = self._looked_up(host, port, deadline_s)
        for text in addresses:
            if not self.allowed(ipaddress.ip_address(text.partition("%")[0])):
                raise BadImage(f"{host} is not on the public network")
        if not addresses:
            raise BadImage(f"{host} has no address")
        return addresses[0]

    def _looked_up(self, host: str, port: int, deadline_s: float) -> list[str]:
        """Addresses of a name. A resolver that takes too long is left to end on its own."""
        found: list[list[str] | OSError | ValueError] = []

        def ask() -> None:
            try:
                found.append(self.resolve(host, port))
            except (OSError, ValueError) as error:
                found.append(error)

        asking = threading.Thread(target=ask, name="civetta-resolve", daemon=True)
        asking.start()
        asking.join(max(deadline_s - time.monotonic(), 0))
        if not found:
            raise TimeoutError
        answer = found[0]
        if isinstance(answer, list):
            return answer
        raise answer

    def _body(self, reply: http.client.HTTPResponse, deadline_s: float) -> bytes:
        pieces: list[bytes] = []
        size = reply.length or 0
        if size > self.max_bytes:
            raise BadImage(f"it has {size} bytes, and {self.max_bytes} are the limit")
        size = 0
        while piece := reply.read(_PIECE_BYTES):
            size += len(piece)
            if size > self.max_bytes:
                raise BadImage(f"it has more than {self.max_bytes} bytes")
            pieces.append(piece)
            if time.monotonic() >= deadline_s:
                break
        if time.monotonic() >= deadline_s:
            raise TimeoutError
        if reply.length:
            raise BadImage("its transfer broke off")
        return b"".join(pieces)


class RequestFetcher:
    """Fetches the images of one request, within a time for all of them; used by one thread."""

    def __init__(
        self,
        fetcher: ImageFetcher | None = None,
        *,
        total_s: float = TOTAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetcher, self._total_s, self._clock = fetcher, total_s, clock
        self._left_s = total_s

    def fetch(self, url: str) -> bytes:
        """The body of what the address names; raises BadImage."""
        if self._left_s <= 0:
            raise BadImage(
                f"the images before it took all of the {self._total_s:g} s in which those of one"
                " request are fetched; send data URLs"
            )
        self._fetcher = self._fetcher or ImageFetcher()  # which reads the trusted certificates
        within_s = min(self._fetcher.timeout_s, self._left_s)
        began_s = self._clock()
        try:
            return replace(self._fetcher, timeout_s=within_s).fetch(url)
        finally:
            self._left_s -= self._clock() - began_s


def _check_type(reply: http.client.HTTPResponse, host: str) -> None:
    """Refuse what calls itself a page, a video and so on before it is read.

    Which kind of image it is the bytes say: servers and caches mislabel those among each other.
    """
    kind = reply.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind and kind not in _BYTES and not kind.startswith("image/"):
        raise BadImage(f"{host} sent {kind[:40]!r}, which is no image")


def _parsed(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port_ok = parts.port is None or parts.port > 0
    except ValueError as error:
        raise BadImage("its address is not well-formed") from error
    if parts.scheme.lower() != "https":
        raise BadImage(f"its address leads to {parts.scheme[:16] or 'nothing'}, not to https")
    if not parts.hostname or not port_ok or not url.isascii() or any(c <= " " for c in url):
        raise BadImage("its address is not well-formed")
    if parts.username is not None or parts.password is not None:
        raise BadImage("its address has a user name in it")
    return parts


def _why(error: Exception) -> str:
    """A connection's fault in words."""
    faults = (
        (socket.gaierror, "the name has no address"),
        (ssl.SSLCertVerificationError, "its certificate is not trusted"),
        (ConnectionRefusedError, "the connection is refused"),
        (ConnectionError, "the connection broke off"),
    )
    return next((words for kind, words in faults if isinstance(error, kind)), type(error).__name__)


def _cut(held: list[socket.socket]) -> None:
    """End both directions, under the TLS layer: a read in another thread returns at once."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(held[0], socket.SHUT_RDWR)
