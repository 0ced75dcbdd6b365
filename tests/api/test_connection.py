"""What happens on a connection before and between requests."""

from __future__ import annotations

import json
import socket

import pytest

from api.live import live, until
from fake_engine import FakeEngine

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def server():
    with live(FakeEngine("hello"), max_header_bytes=4096) as running:
        yield running


def code_of(body):
    return json.loads(body)["error"]["code"]


def test_a_connection_serves_many_requests_and_errors_do_not_end_it(server):
    with server.connect() as peer:
        for body, status in (
            ({"prompt": "x"}, 200),
            ({"promt": "x"}, 400),
            (b"{", 400),
            ({"prompt": "x"}, 200),
        ):
            peer.post("/v1/completions", body)
            assert peer.reply()[0] == status
        peer.post("/v1/completions", {"prompt": "x", "stream": True})
        assert b"[DONE]" in peer.until(b"0\r\n\r\n")
        peer.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert peer.reply()[0] == 200


def test_pipelined_requests_are_answered_in_order(server):
    with server.connect() as peer:
        peer.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        got = peer.until(b"}")
        while got.count(b"HTTP/1.1 200") < 2:
            got += peer.until(b"}")


def test_a_chunked_body_is_read(server):
    body = b'{"prompt": "x"}'
    with server.connect() as peer:
        peer.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"".join(b"1\r\n" + body[i : i + 1] + b"\r\n" for i in range(len(body)))
            + b"0\r\n\r\n"
        )
        assert peer.reply()[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40 + b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET / HTTQ/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["tls", "nonsense", "version", "header", "length", "zero byte"],
)
def test_bytes_that_are_not_http_get_a_json_error_and_the_door(server, data):
    with server.connect() as peer:
        peer.send(data)
        status, headers, body = peer.reply()
        assert (status, headers["content-type"]) == (400, "application/json")
        assert code_of(body) == "bad_http"
        assert peer.rest() == b""
    assert server.open_requests == 0


def test_a_request_with_two_ends_is_refused_and_what_follows_is_not_read(server):
    """A proxy before this server may see one request where another sees two."""
    with server.connect() as peer:
        peer.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        status, headers, body = peer.reply()
        assert (status, headers["connection"], code_of(body)) == (400, "close", "bad_http")
        assert peer.rest() == b""


def test_a_long_method_is_not_sent_back_whole(server):
    with server.connect() as peer:
        peer.send(b"A" * 4000 + b" /health HTTP/1.1\r\nHost: x\r\n\r\n")
        status, _, body = peer.reply()
        assert (status, code_of(body)) == (405, "method_not_allowed")
        assert len(body) < 300


def test_a_header_flood_is_refused_while_it_comes(server):
    with server.connect() as peer:
        flood = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-A: " + b"y" * (64 << 20)
        with pytest.raises(OSError, match=r"reset|pipe"):  # closed while we still write
            peer.send(flood)
    assert server.open_requests == 0
    until(lambda: server.connections == 0)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"y" * 5000 + b"\r\n\r\n",
        b"GET /health?" + b"q" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 700 + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"y" * 4200,
    ],
    ids=["one", "query", "many", "unfinished"],
)
def test_headers_over_the_limit_are_a_431(server, head):
    with server.connect() as peer:
        peer.send(head)
        status, _, body = peer.reply()
        assert status == 431
        assert code_of(body) == "headers_too_large"
        assert "--max-header-bytes" in json.loads(body)["error"]["message"]


def test_headers_that_never_end_are_given_up():
    with live(FakeEngine()) as server:
        server.config.headers_s = 0.05
        with server.connect() as silent, server.connect() as slow:
            slow.send(b"GET /health HTTP/1.1\r\nHo")
            for peer in (silent, slow):
                status, _, body = peer.reply()
                assert (status, code_of(body)) == (408, "header_timeout")
                assert peer.rest() == b""
        until(lambda: server.connections == 0)


def test_a_body_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr("civetta.api.wire.BODY_TIMEOUT_S", 0.05)
    with live(FakeEngine()) as server, server.connect() as peer:
        peer.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        status, _, body = peer.reply()
        assert (status, code_of(body)) == (408, "body_timeout")


def test_a_broken_chunked_body_ends_its_request_alone(server):
    with server.connect() as peer:
        peer.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
        )
        assert peer.reply()[0] == 400
    until(lambda: server.open_requests == 0)


def test_more_connections_than_there_is_room_for_are_refused():
    with live(FakeEngine(), max_connections=1) as server:
        server.config.most_connections = 2
        peers = [server.connect() for _ in range(3)]
        status, _, body = peers[2].reply()
        assert (status, code_of(body)) == (503, "too_many_connections")
        peers[0].send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert peers[0].reply()[0] == 200
        for peer in peers:
            peer.socket.close()
        until(lambda: server.connections == 0)


def _has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "::"])
def test_it_listens_on_ipv6(host):
    with live(FakeEngine("hello"), host=host) as server:
        with server.connect() as peer:
            peer.post("/v1/completions", {"prompt": "x"})
            assert peer.reply()[0] == 200
        if host == "::":  # every address, IPv4 too
            server.address = ("127.0.0.1", server.address[1])
            with server.connect() as peer:
                peer.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert peer.reply()[0] == 200


def test_every_response_has_an_id_and_a_duration(server):
    with server.connect() as peer:
        for path in ("/health", "/v1/models", "/nowhere"):
            peer.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            headers = peer.reply()[1]
            assert headers["x-request-id"].startswith("r")
            assert headers["server-timing"].startswith("total;dur=")
            assert "server" not in headers
        peer.post("/v1/completions", {"prompt": "x"})
        assert "ttft;dur=" in peer.reply()[1]["server-timing"]
        peer.post("/v1/completions", {"prompt": "x", "stream": True})
        assert b"server-timing: queue;dur=" in peer.until(b"\r\n\r\n")
