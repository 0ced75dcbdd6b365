"""Requests while they wait or run: ending one by its id, passing the cache, what a reply cost."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from api.serving import RawClient, app_of, error_of, http, request
from civetta.api.accounting import timings_payload, usage_payload
from civetta.types import CacheSaving, Usage
from fake_engine import FakeEngine

pytestmark = pytest.mark.timeout(60)


def slow(index):
    import time

    time.sleep(0.002)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_delete_ends_a_running_request(path, stream):
    body = {"stream": stream, "prompt": "x"}
    if "chat" in path:
        body = {"stream": stream, "messages": [{"role": "user", "content": "x"}]}

    async def scene():
        engine = FakeEngine("y" * 100_000, before_token=slow)
        app = app_of(engine)
        client = RawClient(app, path, body)
        run = asyncio.create_task(client.run())
        while not engine.requests:
            await asyncio.sleep(0.001)
        async with http(app) as other:
            reply = await other.delete(f"/v1/requests/{engine.requests[0].request_id}")
        await asyncio.wait_for(run, 20)
        return engine, client, reply

    engine, client, reply = asyncio.run(scene())
    assert reply.status_code == 200
    assert reply.json() == {"id": "r1", "object": "request", "aborted": True}
    assert engine.finished[0].usage.completion_tokens < 100_000
    if stream:
        assert json.loads(client.text.rstrip().split("data: ")[-1])["error"]["code"] == (
            "request_aborted"
        )
    else:
        assert client.sent[0]["status"] == 499
        assert json.loads(client.text)["error"]["code"] == "request_aborted"


def test_delete_of_an_unknown_request_is_a_404():
    app = app_of(FakeEngine())
    assert error_of(request(app, "DELETE", "/v1/requests/r99"))["code"] == "not_found"
    assert request(app, "DELETE", "/v1/requests/r99").status_code == 404
    assert request(app, "GET", "/v1/requests/r99").status_code == 405


@pytest.mark.parametrize(("value", "used"), [(None, True), (True, True), (False, False)])
def test_cache_prompt_false_passes_the_cache(value, used):
    engine = FakeEngine()
    app = app_of(engine)
    fields = {} if value is None else {"cache_prompt": value}
    request(app, "POST", "/v1/completions", body={"prompt": "x", **fields})
    messages = [{"role": "user", "content": "x"}]
    request(app, "POST", "/v1/chat/completions", body={"messages": messages, **fields})
    assert [asked.use_cache for asked in engine.requests] == [used, used]


def test_usage_and_timings_tell_what_was_cached_and_why_not_more():
    usage = Usage(
        prompt_tokens=100,
        completion_tokens=2,
        cached_tokens=60,
        cache=CacheSaving(source="disk", miss="diverged", miss_token=61, wait_s=0.25),
    )
    payload = usage_payload(usage)
    assert payload["prompt_tokens_details"] == {"cached_tokens": payload["cached_tokens"]}
    assert payload["cached_tokens"] == 60
    assert "draft_tokens" not in payload
    timings = timings_payload(usage)
    assert (timings["cache_n"], timings["prompt_n"]) == (60, 40)
    assert (timings["cache_source"], timings["cache_miss_reason"]) == ("disk", "diverged")
    assert (timings["cache_miss_token"], timings["shared_prefix_wait_ms"]) == (61, 250)
    whole = timings_payload(dataclasses.replace(usage, cache=CacheSaving(source="ram")))
    assert "cache_miss_reason" not in whole
