"""What a request leaves behind: one log line, trace records, figures; never a word of its text."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import stat
from pathlib import Path

import pytest

from api.serving import RawClient, app_of, request, server
from civetta.api.trace import Trace
from civetta.errors import ReadFailed, UsageError
from fake_engine import FakeEngine

MARKER = "XYZZYMARKER"
SECRET = "REPLYSECRET"
CHAT = {"messages": [{"role": "user", "content": MARKER}]}
BODIES = [
    ("/v1/completions", {"prompt": MARKER}),
    ("/v1/completions", {"prompt": MARKER, "stream": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/completion", {"prompt": MARKER}),
    ("/tokenize", {"content": MARKER}),
    ("/apply-template", CHAT),
    ("/v1/completions", {"prompt": MARKER, "max_tokens": 0}),
    ("/v1/completions", {"prompt": MARKER, "stop": [MARKER], "nope": MARKER}),
    ("/v1/completions", {"prompt": MARKER, MARKER: 1}),
]


@pytest.fixture
def lines(caplog):
    """Lines of the request log."""
    caplog.set_level(logging.DEBUG, logger="civetta")
    return lambda: [r.getMessage() for r in caplog.records if r.getMessage().startswith("request ")]


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_no_text_of_a_request_or_reply_in_log_trace_or_metrics(tmp_path, caplog, lines, path, body):
    trace = tmp_path / "trace"
    app = app_of(FakeEngine(SECRET), **server(api_key=("sesame",), trace=str(trace)))
    key = {"authorization": "Bearer sesame"}
    request(app, "POST", path, body=body, headers=key)
    metrics = request(app, "GET", "/metrics", headers=key).text
    slots = request(app, "GET", "/slots", headers=key).text
    for text in (caplog.text, trace.read_text(), metrics, slots):
        for secret in (MARKER, SECRET, "sesame"):
            assert secret not in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completion"])
def test_one_line_a_request_with_what_it_cost(lines, path, stream):
    body = CHAT if "chat" in path else {"prompt": "Hi"}
    app = app_of(FakeEngine("ab", cached_tokens=1))
    request(app, "POST", path, body={**body, "stream": stream})
    assert len(lines()) == 1
    words = dict(word.split("=", 1) for word in lines()[0].split(" ")[1:])
    assert words["id"] == "r1"
    assert (words["path"], words["status"], words["reason"]) == (path, "200", "stop")
    assert (words["cached"], words["tokens"], words["cache"]) == ("1", "2", "none")
    assert words.keys() >= {"ms", "client", "prompt", "queue_ms", "ttft_ms", "pp", "tg"}


def test_the_line_of_a_refusal_and_of_a_failure_has_the_code(lines):
    def broken(index):
        raise ReadFailed("The table could not be read.")

    request(app_of(FakeEngine()), "POST", "/v1/completions", body={"prompt": ""})
    app = app_of(FakeEngine("ab", before_token=broken))
    request(app, "POST", "/v1/completions", body={"promt": "x"})
    request(app, "POST", "/v1/completions", body={"prompt": "x", "stream": True})
    found = [line.split("error=")[1].split(" ")[0] for line in lines()[1:]]
    assert found == ["unsupported_parameter", "read_failed"]


def test_the_line_of_several_choices_adds_them_up(lines):
    body = {"prompt": "Hi", "n": 3, "max_tokens": 2}
    request(app_of(FakeEngine("abcdef")), "POST", "/v1/completions", body=body)
    words = dict(word.split("=", 1) for word in lines()[0].split(" ")[1:])
    assert (words["tokens"], words["prompt"], words["reason"]) == ("6", "6", "length")


def test_a_client_that_left_is_told_as_such(lines):
    async def scene():
        app = app_of(
            FakeEngine("y" * 5000, before_token=lambda index: __import__("time").sleep(1e-3))
        )
        client = RawClient(app, "/v1/completions", {"prompt": "x", "stream": True})
        run = asyncio.create_task(client.run())
        await client.until(lambda self: len(self.sent) > 3)
        await client.disconnect()
        await asyncio.wait_for(run, 5)

    asyncio.run(scene())
    assert "reason=client_gone" in lines()[0]


def test_the_trace_has_a_record_for_each_event(tmp_path):
    path = tmp_path / "trace"
    app = app_of(FakeEngine("ab", cached_tokens=1), **server(trace=str(path)))
    for stream in (False, True):
        request(app, "POST", "/v1/completions", body={"prompt": "Hi", "stream": stream})
    request(app, "POST", "/v1/completions", body={"promt": "Hi"})
    found = records(path)
    assert [record["event"] for record in found] == [
        *("request", "started", "first_token", "end") * 2,
        *("request", "end"),
    ]
    assert [record["id"] for record in found] == ["r1"] * 4 + ["r2"] * 4 + ["r3"] * 2
    assert found[1] | {"prompt_tokens": 2, "cached_tokens": 1} == found[1]
    end = found[3]
    assert (end["status"], end["reason"], end["tokens"], end["cached"]) == (200, "stop", 2, 1)
    assert found[9]["error"] == "unsupported_parameter"
    for first, second in itertools.pairwise(found):
        assert second["time"] >= first["time"]
        assert second["ms"] >= first["ms"] or second["id"] != first["id"]


def test_a_trace_is_the_owners_alone_and_is_appended_to(tmp_path):
    path = tmp_path / "trace"
    path.write_text('{"old": 1}\n')
    path.chmod(0o600)
    for _ in range(2):
        trace = Trace(path)
        trace.write("r1", "request")
        trace.close()
        trace.write("r1", "nobody reads this")
    assert len(records(path)) == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made = tmp_path / "new"
    Trace(made).close()
    assert stat.S_IMODE(made.stat().st_mode) == 0o600


def test_a_trace_that_cannot_be_opened_is_told_at_the_start(tmp_path):
    with pytest.raises(UsageError, match="--trace"):
        app_of(FakeEngine(), **server(trace=str(tmp_path / "no" / "trace")))


def test_a_full_disk_ends_the_trace_and_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "trace"
    trace = Trace(path)
    trace.write("r1", "request")
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:5]))
    trace.write("r1", "end")
    monkeypatch.undo()
    trace.write("r2", "request")
    assert [record["event"] for record in records(Path(path))] == ["request"]
