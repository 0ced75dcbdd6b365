from __future__ import annotations

import asyncio
import json
import queue
import threading
import time

import pytest

from api.serving import RawClient, app_of, error_of, events_of, request, server
from civetta.api.delivery import Pace
from civetta.errors import ContextOverflow, EngineBusy, ReadFailed
from civetta.options import EngineOptions
from civetta.types import FinishReason
from fake_engine import FakeEngine

ENDLESS = "x" * 100_000


def slow(_):
    time.sleep(0.001)


def fail_at(count):
    def check(index):
        if index == count:
            raise ReadFailed("The n-gram table could not be read.")

    return check


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_during_decode_cancels(stream):
    engine = FakeEngine(ENDLESS, before_token=slow)
    app = app_of(engine)

    async def run():
        client = RawClient(app, "/v1/completions", {"prompt": "x", "stream": stream})
        task = asyncio.create_task(client.run())
        if stream:
            await client.until(lambda self: len(self.sent) > 5)
        else:
            await asyncio.sleep(0.05)
        await client.disconnect()
        await asyncio.wait_for(task, 5)
        return client

    client = asyncio.run(run())
    assert engine.ended.acquire(timeout=5)
    assert engine.finished[0].reason is FinishReason.CANCELLED
    if not stream:
        assert client.sent == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_while_queued_cancels(stream):
    gate = threading.Event()
    engine = FakeEngine(ENDLESS, before_start=gate.wait)
    app = app_of(engine)

    async def run():
        client = RawClient(app, "/v1/completions", {"prompt": "x", "stream": stream})
        task = asyncio.create_task(client.run())
        while not engine.requests:
            await asyncio.sleep(0.001)
        await client.disconnect()
        await asyncio.wait_for(task, 5)

    asyncio.run(run())
    gate.set()
    assert engine.ended.acquire(timeout=5)
    assert engine.finished[0].usage.completion_tokens == 0


def test_keep_alives_fill_silence_and_headers_do_not_wait_for_ever():
    gate = threading.Event()
    engine = FakeEngine("ok", before_start=gate.wait)
    app = app_of(engine, pace=Pace(ping_s=0.02, headers_after_s=0.05))

    async def run():
        client = RawClient(app, "/v1/completions", {"prompt": "x", "stream": True})
        task = asyncio.create_task(client.run())
        await client.until(lambda self: self.text.count(": ping\n\n") >= 3)
        gate.set()
        await task
        return client

    client = asyncio.run(run())
    assert client.sent[0]["status"] == 200
    headers = dict(client.sent[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    pieces = [
        json.loads(line[6:]) for line in client.text.split("\n\n") if line.startswith("data: {")
    ]
    assert "".join(item["choices"][0]["text"] for item in pieces) == "ok"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineBusy("The queue is full."), 429, "queue_full"),
        (ContextOverflow(5000, 4096, 100), 400, "context_length_exceeded"),
    ],
)
def test_refusals_come_before_the_headers(stream, error, status, code):
    body = {"prompt": "x", "stream": stream}
    response = request(app_of(FakeEngine(refuse=error)), "POST", "/v1/completions", body=body)
    assert response.status_code == status
    assert error_of(response)["code"] == code
    if status == 429:
        assert response.headers["retry-after"] == "1"


def test_context_overflow_carries_both_sizes():
    app = app_of(FakeEngine(context_tokens=10))
    response = request(app, "POST", "/v1/completions", body={"prompt": "x" * 20, "stream": True})
    error = error_of(response)
    assert response.status_code == 400
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (20, 10)


def raise_read_failed():
    raise ReadFailed("The n-gram table could not be read.")


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_before_the_start_is_a_status(stream):
    app = app_of(FakeEngine(before_start=raise_read_failed))
    response = request(app, "POST", "/v1/completions", body={"prompt": "x", "stream": stream})
    assert response.status_code == 500
    assert error_of(response)["code"] == "read_failed"


def test_a_late_failure_is_the_last_event_of_a_stream():
    app = app_of(FakeEngine("abcdef", before_token=fail_at(3)))
    response = request(app, "POST", "/v1/completions", body={"prompt": "x", "stream": True})
    lines = response.text.strip().split("\n\n")
    assert response.status_code == 200
    assert json.loads(lines[-1][6:])["error"]["code"] == "read_failed"
    assert "[DONE]" not in response.text
    whole = request(app, "POST", "/v1/completions", body={"prompt": "x"})
    assert whole.status_code == 500


def test_the_servers_time_limit_is_an_error_with_its_flag():
    streams = queue.SimpleQueue()

    def late(index):
        if index == 1:
            time.sleep(0.03)  # the limit passes while it generates
            streams.get(timeout=20).cancel()

    engine = FakeEngine("xyz", before_token=late)
    app = app_of(engine, engine=EngineOptions(request_timeout_ms=20))
    submit = engine.submit

    def submit_with_deadline(generate):
        assert generate.timeout_s == 0.02
        stream = submit(generate)
        streams.put(stream)
        return stream

    engine.submit = submit_with_deadline
    response = request(app, "POST", "/v1/completions", body={"prompt": "x"})
    assert response.status_code == 504
    assert error_of(response)["code"] == "request_timeout"
    assert "--request-timeout-ms" in error_of(response)["message"]


def test_dropped_fields_are_named_in_the_reply():
    app = app_of(FakeEngine("a"), **server(unknown_fields="warn"))
    for stream in (True, False):
        body = {"prompt": "x", "stream": stream, "provider": {"a": 1}}
        response = request(app, "POST", "/v1/completions", body=body)
        assert response.status_code == 200
        assert response.headers["x-civetta-ignored"] == "provider"
    assert events_of(
        request(app, "POST", "/v1/completions", body={"prompt": "x", "stream": True}).text
    )
