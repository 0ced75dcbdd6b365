"""What llama-swap relies on: it starts the server, asks for its health, passes streams on, stops it.

It was not run here (docs/clients/llama-swap.md); what is asked and read is what its sources ask and
read: a check that wants 200, requests as Go's reverse proxy sends them, the last event of a stream
that has `usage` or `timings`, SIGTERM.
"""

from __future__ import annotations

import json
import signal
import socket
import threading

import httpx2
import pytest

from api.live import live, until
from api.serving import app_of, request
from cli.test_serve import Serving
from fake_engine import FakeEngine

pytestmark = pytest.mark.timeout(60)
ASKED = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/completion": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 99},
}
AS_GO_SENDS_IT = (
    "X-Forwarded-For: 127.0.0.1\r\nAccept-Encoding: gzip\r\nUser-Agent: Go-http-client/1.1\r\n"
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def health_of(port):
    """Status of the check; 0 while nothing listens."""
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code
    except httpx2.ConnectError:
        return 0


def test_its_check_passes_when_the_model_is_loaded_and_not_before(tmp_path):
    port, go = free_port(), tmp_path / "go"
    loading = (
        "lambda settings: [time.sleep(0.01) for _ in iter("
        f"lambda: __import__('os').path.exists({str(go)!r}), True)] and None or engine(settings)"
    )
    with Serving("--port", str(port), "--served-model-name", "nano", build=loading) as serving:
        seen = {health_of(port)}
        serving.line("loading")
        seen.add(health_of(port))
        assert seen <= {0, 503}
        assert 503 in seen
        go.touch()
        until(lambda: health_of(port) == 200)
        assert httpx2.get(f"{serving.url}/v1/models").json()["data"][0]["id"] == "nano"
        assert serving.url.endswith(f":{port}")
        assert serving.end(signal.SIGTERM) == 0


def test_a_swap_while_the_model_loads_ends_the_process():
    with Serving(build="never") as serving:
        port = serving.line("loading").split("health=")[1].split("/")[2].rsplit(":", 1)[1]
        assert health_of(port) == 503
        assert serving.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_passes_its_proxy_event_by_event_and_uncompressed(path):
    """The first token is on the wire while the second is not generated yet."""
    gate = threading.Event()
    engine = FakeEngine("ab", before_token=lambda index: index == 0 or gate.wait(30))
    body = json.dumps({**ASKED[path], "stream": True, "model": "nano"}).encode()
    half = len(body) // 2
    with live(engine, served_model_name="nano") as server, server.connect() as peer:
        headers = f"Host: x\r\n{AS_GO_SENDS_IT}Transfer-Encoding: chunked\r\n\r\n"
        peer.send(
            f"POST {path} HTTP/1.1\r\n{headers}".encode()
            + b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n"
            % (half, body[:half], len(body) - half, body[half:])
        )
        head, _, _ = peer.until(b'"a"').partition(b"\r\n\r\n")
        assert b"text/event-stream" in head.lower()
        assert b"content-encoding" not in head.lower()
        gate.set()
        peer.until(b"0\r\n\r\n")
        peer.send(f"GET /health HTTP/1.1\r\nHost: x\r\n{AS_GO_SENDS_IT}\r\n".encode())
        assert peer.reply()[0] == 200, "its pool uses the connection again"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_its_figures_are_in_the_last_event_that_has_any(path, stream):
    body = {**ASKED[path], "stream": stream}
    if path in ("/v1/completions", "/v1/chat/completions") and stream:
        body["stream_options"] = {"include_usage": True}
    text = request(app_of(FakeEngine("abc", cached_tokens=1)), "POST", path, body=body).text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in (lines if stream else [text])]
    last = next(e for e in reversed(events) if {"usage", "timings"} & set(e))
    timings = last["timings"]
    assert (timings["cache_n"], timings["predicted_n"]) == (1, 3)
    assert {"prompt_n", "prompt_per_second", "predicted_per_second", "prompt_ms"} <= set(timings)
