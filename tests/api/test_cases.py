"""Reported cases of streams, stops, usage and company, on OpenAI's and llama.cpp's endpoints."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.live import live
from api.serving import app_of, error_of, request
from civetta.engine import engine as engine_module
from civetta.engine.engine import Engine
from civetta.options import EngineOptions
from engine.fakes import ByteTokenizer, FakeModel, info
from fake_engine import FakeEngine

pytestmark = pytest.mark.timeout(60)
PATHS = ("/v1/completions", "/v1/chat/completions", "/completion")
EMOJI = "🌍 👩‍👩‍👧‍👦 한글 日本語 é ñ 🇫🇷 \u200d end"


def body_of(path, **fields):
    if "chat" in path:
        messages = [{"role": "user", "content": "x"}]
        thinking = {"chat_template_kwargs": {"enable_thinking": False}}
        return {"messages": messages, **thinking, **fields}
    return {"prompt": "x", **fields}


def asked(engine, path, **fields):
    return request(app_of(engine), "POST", path, body=body_of(path, **fields))


def pieces(response):
    """Texts of a stream's events, in order."""
    assert response.status_code == 200, response.text
    found = []
    for line in response.text.split("\n\n"):
        if line.startswith("data: {"):
            payload = json.loads(line[6:])
            found += [payload["content"]] if "content" in payload else []
            for choice in payload.get("choices", []):
                found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return found


def whole(response):
    reply = response.json()
    if "content" in reply:
        return reply["content"]
    choice = reply["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("alpha beta gamma delta", "beta gamma", "alpha "),
        ("the quick brown fox", "own fox", "the quick br"),
        ("Hello\nUser: next", "\nUser:", "Hello"),
        ("beta gam", "beta gamma", "beta gam"),
        ("a beta gxmma", "beta gamma", "a beta gxmma"),
        ("bebeta gamma", "beta gamma", "be"),
        ('{"a": "}"}', '"}', '{"a": '),
        ("é日本", "日", "é"),
    ],
)
def test_case_37_stops_cut_exactly_and_only_true_prefixes_wait(path, text, stop, kept):
    streamed = pieces(asked(FakeEngine(text), path, stop=[stop], stream=True))
    assert "".join(streamed) == whole(asked(FakeEngine(text), path, stop=stop)) == kept
    sent = ""
    for piece in streamed:
        sent += piece
        assert kept.startswith(sent), "nothing of a stop string was ever sent"


@settings(max_examples=25, deadline=None)
@given(
    text=st.text(alphabet="ab\né🌍", max_size=20),
    stops=st.lists(st.text(alphabet="ab\né🌍", min_size=1, max_size=4), max_size=3),
    path=st.sampled_from(PATHS),
)
def test_case_37_and_39_a_stream_is_the_buffer_for_any_text_and_stops(text, stops, path):
    streamed = "".join(pieces(asked(FakeEngine(text), path, stop=stops, stream=True)))
    buffered = whole(asked(FakeEngine(text), path, stop=stops))
    assert streamed == buffered
    if "chat" not in path:  # a chat's parser strips the white space around an answer
        cuts = {text[: text.index(stop)] for stop in stops if stop in text}
        assert buffered in (cuts or {text})
    assert not any(stop in buffered for stop in stops)


@pytest.mark.parametrize("path", PATHS)
def test_case_39_characters_come_whole_and_once(path):
    streamed = pieces(asked(FakeEngine(EMOJI), path, stream=True))
    assert "".join(streamed) == whole(asked(FakeEngine(EMOJI), path)) == EMOJI
    assert not any("\ufffd" in piece for piece in streamed)
    size = "max_completion_tokens" if "chat" in path else "max_tokens"
    for tokens in range(1, 9, 2):  # a cut in the midst of a character is the one exception
        cut = whole(asked(FakeEngine(EMOJI), path, **{size: tokens}))
        assert cut == "".join(pieces(asked(FakeEngine(EMOJI), path, stream=True, **{size: tokens})))
        assert EMOJI.startswith(cut.rstrip("\ufffd"))


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("include", [True, False, None])
def test_case_45_usage_is_in_the_last_chunk_when_asked_for_and_timings_always(path, include):
    engine = FakeEngine("abc", cached_tokens=1)
    options = {} if include is None else {"stream_options": {"include_usage": include}}
    text = asked(engine, path, stream=True, **options).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    assert len(with_usage) == bool(include)
    timed = next(chunk for chunk in chunks if "timings" in chunk)
    assert timed["choices"][0]["finish_reason"] == "stop"
    assert timed["timings"]["cache_n"] == 1
    if include:
        assert chunks[-1]["choices"] == []
        usage = chunks[-1]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 1
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
        assert usage["total_tokens"] == usage["prompt_tokens"] + 3
        assert chunks[-1]["timings"] == timed["timings"], "proxies read the last chunk alone"
    assert "usage" in asked(engine, path).json(), "a buffered reply always has it"


@pytest.mark.parametrize("path", PATHS)
def test_case_42_progress_comes_before_the_first_token_when_asked_for(path):
    engine = FakeEngine("ab", cached_tokens=1)
    text = asked(engine, path, stream=True, return_progress=True).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    told = [place for place, chunk in enumerate(chunks) if "prompt_progress" in chunk]
    progress = chunks[told[-1]]["prompt_progress"]
    assert progress["processed"] == progress["total"] == len(engine.requests[0].prompt_ids)
    assert progress["cache"] == 1
    spoken = next(place for place, chunk in enumerate(chunks) if '"a"' in json.dumps(chunk))
    assert told[-1] < spoken
    assert "prompt_progress" not in asked(FakeEngine("ab"), path, stream=True).text


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"max_completion_tokens": 2}, 2),
        ({"max_tokens": 2}, 2),
        ({"max_completion_tokens": 2, "max_tokens": 2}, 2),
        ({"max_completion_tokens": None, "max_tokens": 2}, 2),
        ({"max_tokens": None}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 10**9}, 10**9),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"max_completion_tokens": 2, "max_tokens": 3}, "max_completion_tokens"),
    ],
)
def test_case_51_budgets_of_a_chat(fields, budget):
    engine = FakeEngine("abcdef")
    response = asked(engine, "/v1/chat/completions", **fields)
    if isinstance(budget, str):
        assert response.status_code == 400
        assert error_of(response)["param"] == budget
        return
    assert engine.requests[0].max_tokens == budget
    reason = response.json()["choices"][0]["finish_reason"]
    assert reason == ("length" if budget == 2 else "stop")


SAYS, TOLD = {"role": "assistant", "content": "I said."}, {"role": "tool", "content": "42"}
ITEMS = [
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "42"},
]
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "s"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "developer", "content": "s"}]}),
        ("/v1/chat/completions", {"messages": [SAYS]}),
        ("/v1/chat/completions", {"messages": [SAYS, TOLD]}),
        ("/v1/responses", {"input": [SAYS]}),
        ("/v1/responses", {"input": ITEMS}),
        ("/v1/messages", {"messages": [{"role": "system", "content": "s"}]}),
        ("/v1/messages", {"messages": [SAYS, RESULT]}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_case_54_without_a_users_turn_it_is_a_clean_400(path, body, stream):
    response = request(app_of(FakeEngine()), "POST", path, body={**body, "stream": stream})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("invalid_messages", next(iter(body)))
    assert "user message" in error["message"]


def test_case_53_several_system_and_developer_turns_fold_into_the_first():
    roles = ["system", "user", "system", "developer", "user", "developer"]
    engine = FakeEngine("ok")
    messages = [{"role": role, "content": text} for role, text in zip(roles, "ABCDEF", strict=True)]
    asked(engine, "/v1/chat/completions", messages=messages)
    prompt = engine.tokenizer.decode(engine.requests[0].prompt_ids)
    assert prompt.startswith("<|im_start|>system\nA\n\nC\n\nD\n\nF<|im_end|>\n<|im_start|>user\nB")
    assert prompt.count("<|im_start|>system") == 1


def test_case_65_a_long_prompt_does_not_freeze_a_stream():
    """Between two tokens of a stream at most one chunk of another's prompt is computed."""
    chunk, launches = 4, []

    def note(session, ids):
        launches.append(len(ids))

    model = FakeModel(lambda ids: 97 + len(ids) % 26, on_forward=note)
    options = EngineOptions(sessions=2, max_pending=4, prefill_batch=64, prefill_chunk=chunk)
    logging.getLogger("civetta").setLevel(logging.ERROR)
    with (
        Engine(
            model, info(4096), tokenizer=ByteTokenizer(), template=None, options=options
        ) as engine,
        live(engine) as server,
        server.connect() as stream,
        server.connect() as long,
    ):
        stream.post(
            "/v1/completions",
            {"prompt": "xy", "stream": True, "max_tokens": 3000, "ignore_eos": True},
        )
        stream.until(b'"text":')
        long.post("/v1/completions", {"prompt": "z" * 600, "max_tokens": 2})
        assert long.reply()[0] == 200
    prompt = [place for place, size in enumerate(launches) if size > 1][1:]
    assert sum(launches[place] for place in prompt) >= 600
    assert max(launches[place] for place in prompt) <= chunk
    assert all(b - a > 1 for a, b in itertools.pairwise(prompt)), "a token between each"


def test_case_67_health_fails_while_a_step_is_stalled_and_recovers():
    engine = FakeEngine()
    stats, stalled_s = engine.stats, 61.25
    engine.stats = lambda: dataclasses.replace(stats(), stalled_s=stalled_s)
    app = app_of(engine)
    response = request(app, "GET", "/health")
    assert response.status_code == 503
    assert response.json() == {"status": "stalled", "stalled_s": 61.2}
    assert request(app, "GET", "/ready").status_code == 503
    stalled_s = 0.0
    assert request(app, "GET", "/health").status_code == 200


def test_case_67_a_lost_device_is_told_on_every_way(monkeypatch):
    """That the process then ends with 75: tests/cli/test_serve.py."""

    def fail(session, ids):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(engine_module, "device_fault", lambda device: "it is gone")
    model = FakeModel(lambda ids: 97, on_forward=fail)
    with Engine(model, info(), tokenizer=ByteTokenizer(), template=None) as engine:
        app = app_of(engine)
        assert request(app, "GET", "/health").status_code == 200
        for _ in range(2):
            response = request(app, "POST", "/v1/completions", body={"prompt": "x"})
            assert (response.status_code, error_of(response)["code"]) == (503, "device_lost")
        for path in ("/health", "/ready"):
            response = request(app, "GET", path)
            assert (response.status_code, response.json()) == (503, {"status": "device lost"})
