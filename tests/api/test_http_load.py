"""Many clients, slow ones, leaving ones and hostile ones, against the real step loop."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from api.live import live, until
from civetta.chat.template import ChatTemplate
from civetta.engine.engine import Engine
from civetta.options import EngineOptions
from engine.fakes import ByteTokenizer, FakeModel, babble, babbled, info, says
from fake_engine import FakeEngine

pytestmark = pytest.mark.timeout(120)
PROMPT = "0123456789"
CHUNK = 2


class Gate:
    """A hook of the model's that holds every launch from the `n`-th on, until it is opened."""

    def __init__(self, hold_at):
        self.hold_at, self.launches = hold_at, 0
        self.held, self.opened = threading.Event(), threading.Event()

    def __call__(self, session, ids):
        self.launches += 1
        if self.launches >= self.hold_at:
            self.held.set()
            assert self.opened.wait(30)


def engine_of(model, *, sessions=1, context_tokens=4096, **more):
    options = EngineOptions(
        sessions=sessions, max_pending=100, prefill_batch=CHUNK, prefill_chunk=CHUNK
    )
    return Engine(
        model,
        info(context_tokens),
        tokenizer=ByteTokenizer(),
        template=ChatTemplate(),
        options=options,
        **more,
    )


def completion(**fields):
    return {"prompt": PROMPT, "temperature": 0, **fields}


def text_of(data):
    """The text of a whole streamed response."""
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
    return "".join(c["text"] for line in lines for c in json.loads(line)["choices"])


# ---- case 40: disconnects at every stage ---------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stage", "hold_at"), [("first chunk", 1), ("prefill", 3), ("first token", 6), ("decode", 8)]
)
def test_case_40_a_client_that_leaves_frees_its_session_within_one_launch(stage, hold_at, stream):
    gate = Gate(hold_at)
    model = FakeModel(babble, on_forward=gate)
    with engine_of(model) as engine, live(engine) as server:
        peer = server.connect()
        peer.post("/v1/completions", completion(stream=stream, ignore_eos=True))
        assert gate.held.wait(20)
        peer.socket.close()
        until(lambda: server.open_requests == 0)  # noticed while the model computes
        launches = gate.launches
        gate.opened.set()
        until(lambda: engine.stats().running == 0)
        assert gate.launches == launches, "nothing more is computed for it"
        assert engine.stats().requests_cancelled_total == 1
        assert model.open_sessions == 0
        with server.connect() as other:
            other.post("/v1/completions", completion(max_tokens=5))
            assert other.reply()[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_case_40_a_queued_client_that_leaves_never_starts(stream):
    gate, opened = Gate(1), []
    model = FakeModel(says(len(PROMPT), "a"), on_forward=gate, on_open=lambda: opened.append(1))
    with engine_of(model) as engine, live(engine) as server:
        with server.connect() as first:
            first.post("/v1/completions", completion())
            assert gate.held.wait(20)
            queued = server.connect()
            queued.post("/v1/completions", completion(stream=stream))
            until(lambda: engine.stats().waiting == 1)
            queued.socket.close()
            until(lambda: server.open_requests == 1)
            gate.opened.set()
            assert first.reply()[0] == 200
        until(lambda: engine.stats().running == engine.stats().waiting == 0)
        assert len(opened) == 1
        assert engine.stats().requests_cancelled_total == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n",
        b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"prompt": "x',
    ],
    ids=["connected", "half a line", "headers", "half a body"],
)
def test_case_40_a_client_that_leaves_before_its_request_is_whole(sent):
    with engine_of(FakeModel(babble)) as engine, live(engine) as server:
        peer = server.connect()
        peer.send(sent)
        until(lambda: server.connections == 1)
        if b"\r\n\r\n" in sent:
            until(lambda: server.open_requests == 1)
        peer.socket.close()
        until(lambda: server.connections == server.open_requests == 0)
        assert engine.stats().requests_total == 0


def test_case_42_silence_is_filled_while_a_prompt_is_computed():
    """Progress events do not count as signs of life: nothing of them reaches the client."""
    gate = Gate(5)
    with engine_of(FakeModel(babble, on_forward=gate)) as engine, live(engine) as server:
        server.app.state.pace = type(server.app.state.pace)(ping_s=0.01, headers_after_s=0.01)
        with server.connect() as peer:
            peer.post("/v1/completions", completion(stream=True, max_tokens=3))
            assert b"data:" not in peer.until(b": ping\n\n")
            assert gate.held.wait(20)
            peer.until(b": ping\n\n")
            gate.opened.set()
            peer.until(b"[DONE]")


def test_case_42_progress_is_told_when_asked_for():
    with engine_of(FakeModel(babble)) as engine, live(engine) as server, server.connect() as peer:
        peer.post("/completion", completion(stream=True, n_predict=3, return_progress=True))
        got = peer.until(b'"stop":true')
        told = [
            json.loads(line[6:])["prompt_progress"]
            for line in got.split(b"\n")
            if b"prompt_progress" in line
        ]
        done = [item["processed"] for item in told]
        assert done == sorted(set(done))
        assert done[-1] == len(PROMPT) == told[0]["total"]


# ---- case 43: slow readers -----------------------------------------------------------------------


def test_case_43_a_client_that_reads_nothing_is_bounded_and_hurts_nobody():
    model = FakeModel(lambda ids: 97 + len(ids) % 26)  # never ends
    with (
        engine_of(model, sessions=4, context_tokens=100_000, max_unread=200) as engine,
        live(engine) as server,
    ):
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        stuck = server.connect(receive_bytes=4096)
        stuck.post("/v1/completions", completion(stream=True, ignore_eos=True))
        others = [server.connect() for _ in range(3)]
        for _ in range(3):
            for peer in others:
                peer.post("/v1/completions", completion(max_tokens=20))
            texts = {json.loads(peer.reply()[2])["choices"][0]["text"] for peer in others}
            assert len(texts) == 1
        until(lambda: engine.stats().requests_failed_total == 1, 60)
        assert engine.stats().running == 0, "its session is free although it still holds the line"
        waiting = [
            c.transport.get_write_buffer_size() for c in server.server.server_state.connections
        ]
        assert max(waiting) < 200_000
        stuck.until(b'"code":"output_backpressure"')  # a reader that wakes up is told
        for peer in (stuck, *others):
            peer.socket.close()
        until(lambda: server.connections == server.open_requests == 0)


def test_case_43_a_slow_reader_gets_the_whole_reply():
    with live(FakeEngine("abc" * 1000)) as server, server.connect(receive_bytes=4096) as peer:
        peer.post("/v1/completions", {"prompt": "x", "stream": True})
        until(lambda: server.open_requests == 1)
        got = peer.until(b"[DONE]")
        assert text_of(_unchunked(got)) == "abc" * 1000


def _unchunked(data):
    """Bodies of chunks; a chunk is one or more whole events here."""
    _, _, data = data.partition(b"\r\n\r\n")
    return b"\n".join(part for part in data.split(b"\r\n"))


# ---- many, and hostile ---------------------------------------------------------------------------


def test_64_clients_at_once_each_get_their_own_reply():
    with engine_of(FakeModel(babble), sessions=8) as engine, live(engine) as server:

        def ask(index):
            prompt = f"{index:04d} of many"
            with server.connect() as peer:
                peer.post(
                    "/v1/completions",
                    {"prompt": prompt, "temperature": 0, "max_tokens": 30, "stream": True},
                )
                return prompt, text_of(_unchunked(peer.until(b"[DONE]")))

        with ThreadPoolExecutor(64) as pool:
            replies = dict(pool.map(ask, range(64)))
        assert len(replies) == 64
        for prompt, text in replies.items():
            ids = babbled(prompt.encode(), 30)
            assert text == bytes(token for token in ids if token < 256).decode()
        until(lambda: server.open_requests == 0)


def test_the_65th_request_is_told_to_come_back():
    gate = threading.Event()
    engine = FakeEngine(before_start=gate.wait)
    with live(engine) as server:
        peers = [server.connect() for _ in range(64)]
        for peer in peers:
            peer.post("/v1/completions", {"prompt": "x"})
        until(lambda: len(engine.requests) == 64)
        with server.connect() as late:
            late.post("/v1/completions", {"prompt": "x"})
            status, _, body = late.reply()
            assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
            late.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert late.reply()[0] == 200, "health is answered all the same"
        gate.set()
        assert [peer.reply()[0] for peer in peers] == [200] * 64
        for peer in peers:
            peer.socket.close()


HOSTILE = {
    "deep arrays": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "closed deep": b'{"prompt":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "many arrays": b'{"prompt":[' + b"[]," * 500_000 + b"[]]}",
    "many numbers": b'{"prompt":[' + b"1," * 1_500_000 + b"1]}",
    "no end of a string": b'{"prompt":["' + b'\\"[' * 1_000_000,
    "long number": b'{"prompt":"x","seed":' + b"9" * 100_000 + b"}",
    "long key": b'{"' + b"k" * 1_000_000 + b'":1}',
    "duplicate": b'{"prompt":"x","prompt":"y"}',
    "infinite": b'{"prompt":"x","temperature":1e999}',
    "surrogate": b'{"prompt":"\\ud800"}',
    "not utf-8": b'{"prompt":"\xff"}',
    "empty": b"",
    "null": b"null",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_a_400_whose_message_is_short(name):
    with live(FakeEngine("ok")) as server, server.connect() as peer:
        peer.post("/v1/completions", HOSTILE[name])
        status, _, body = peer.reply()
        assert status == 400
        assert len(body) < 1000
        peer.post("/v1/completions", {"prompt": "x"})
        assert peer.reply()[0] == 200


def test_a_body_over_the_limit_is_a_413_and_the_stream_beside_it_goes_on():
    gate = threading.Semaphore(0)
    engine = FakeEngine("hello", before_token=lambda index: gate.acquire())
    with live(engine, max_request_bytes=100_000) as server, server.connect() as stream:
        stream.post("/v1/completions", {"prompt": "x", "stream": True})
        gate.release()
        stream.until(b'"text":"h"')
        with server.connect() as big:
            big.post("/v1/completions", b'{"prompt":"' + b"x" * 300_000 + b'"}')
            assert big.reply()[0] == 413
        gate.release(4)
        stream.until(b"[DONE]")


def test_a_large_body_is_parsed_beside_the_streams(monkeypatch):
    """While it is parsed, tokens flow and health is answered."""
    from civetta.api import wire

    parsing, done, parse = threading.Event(), threading.Event(), wire.parse_json

    def slow(body, **how):
        if len(body) > wire.SMALL_BODY_BYTES:
            parsing.set()
            assert done.wait(20)
        return parse(body, **how)

    monkeypatch.setattr(wire, "parse_json", slow)
    engine = FakeEngine("hello", context_tokens=1 << 20)
    with live(engine) as server, server.connect() as big, server.connect() as small:
        big.post("/v1/completions", {"prompt": "x" * 200_000})
        assert parsing.wait(20)
        small.post("/v1/completions", {"prompt": "x", "stream": True})
        small.until(b"[DONE]")
        done.set()
        assert big.reply()[0] == 200


WORD = "x" * 1_000_000
WORDY = {
    "/v1/completions": {"prompt": WORD},
    "/completion": {"prompt": WORD},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": WORD}]},
    "/v1/responses": {"input": WORD},
    "/v1/responses/input_tokens": {"input": WORD},
    "/v1/messages": {"messages": [{"role": "user", "content": WORD}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": WORD}]},
    "/tokenize": {"content": WORD},
}


@pytest.mark.parametrize("path", WORDY)
def test_a_word_of_a_million_characters_is_encoded_beside_the_streams(path, monkeypatch):
    """All of another stream comes, and health and a short request, before the word is encoded."""
    typed = threading.Semaphore(0)
    reply = "others" * 5
    engine = FakeEngine(reply, context_tokens=1 << 22, before_token=lambda _: typed.acquire())
    inside, on, encode = threading.Event(), threading.Event(), engine.tokenizer.encode

    def held(text, **how):
        if WORD in text:
            inside.set()
            assert on.wait(60)
        return encode(text, **how)

    monkeypatch.setattr(engine.tokenizer, "encode", held)
    with live(engine) as server, server.connect() as big, server.connect() as stream:
        stream.post("/v1/completions", {"prompt": "x", "stream": True})
        typed.release()
        stream.until(b'"text":"o"')
        big.post(path, WORDY[path])
        assert inside.wait(30)
        for letter in reply[1:-1]:
            typed.release()
            stream.until(b'"text":"%s"' % letter.encode())
        typed.release()
        stream.until(b"[DONE]")
        with server.connect() as other:
            other.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert other.reply()[0] == 200
            other.post("/tokenize", {"content": "x"})
            assert other.reply()[0] == 200
        assert not on.is_set()
        on.set()
        typed.release(len(reply))
        assert big.reply()[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completion"])
def test_a_prompt_far_beyond_the_context_is_not_encoded(path, monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: pytest.fail("encoded"))
    long = "y" * 4_000_000
    body = {"messages": [{"role": "user", "content": long}]} if "chat" in path else {"prompt": long}
    with live(engine) as server, server.connect() as peer:
        peer.post(path, body)
        status, _, reply = peer.reply()
        assert (status, json.loads(reply)["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completion"])
@pytest.mark.parametrize("stream", [False, True])
def test_case_63_what_overflows_the_context_is_a_400_before_the_headers(path, stream):
    long = "x" * 600
    body = {"messages": [{"role": "user", "content": long}]} if "chat" in path else {"prompt": long}
    with (
        engine_of(FakeModel(babble), context_tokens=512) as engine,
        live(engine) as server,
        server.connect() as peer,
    ):
        peer.post(path, {**body, "stream": stream, "max_tokens": 7})
        status, headers, reply = peer.reply()
        error = json.loads(reply)["error"]
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert headers["content-type"] == "application/json"
        assert error["param"] == ("messages" if "chat" in path else "prompt")
        assert error["n_ctx"] == 512
        assert error["n_prompt_tokens"] >= 600
        assert "maximum context length is 512 tokens" in error["message"]
        assert f"requested {error['n_prompt_tokens'] + 7} tokens" in error["message"]
