"""Thoughts that come back sealed: `include: ["reasoning.encrypted_content"]`."""

from __future__ import annotations

import base64
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.serving import app_of, request, server
from api.test_chat_completions import CALL, THOUGHT
from api.typed_events import response_of, typed_events
from civetta.api import seal_key
from civetta.api.seal import ThoughtSeal
from civetta.api.seal_key import kept_key
from civetta.errors import StoreUnusable
from fake_engine import FakeEngine

SEALED = {"include": ["reasoning.encrypted_content"], "store": False}
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@given(st.text())
def test_what_was_sealed_opens_again_and_tells_nothing(thought):
    seal = ThoughtSeal(("k",))
    sealed = seal.seal(thought)
    assert seal.open(sealed) == thought
    assert sealed != seal.seal(thought), "each has a nonce of its own"
    if len(thought) > 2:
        assert thought.encode() not in base64.b64decode(sealed.rpartition(".")[2])


@given(st.integers(min_value=0), st.integers(1, 255))
def test_one_changed_byte_anywhere_is_found(place, change):
    head, _, body = ThoughtSeal(("k",)).seal("I think so.").rpartition(".")
    data = bytearray(base64.b64decode(body))
    data[place % len(data)] ^= change
    assert ThoughtSeal(("k",)).open(f"{head}.{base64.b64encode(data).decode()}") is None


@pytest.mark.parametrize(
    "text", ["", "gAAAAAB", "civetta.1.", "civetta.1.AAAA", "ä", "civetta.1.ä"]
)
def test_what_others_made_does_not_open(text):
    assert ThoughtSeal(("k",)).open(text) is None


def test_servers_with_a_key_in_common_read_each_other_and_others_do_not():
    sealed = ThoughtSeal(("new", "old")).seal("Hm.")
    assert ThoughtSeal(("old", "new")).open(sealed) == "Hm."
    assert ThoughtSeal(("old",)).open(sealed) is None
    assert ThoughtSeal(()).open(ThoughtSeal(()).seal("Hm.")) is None, "no key: one process alone"


def ask(app, text, **body):
    app.state.engine = FakeEngine(text)
    reply = request(app, "POST", "/v1/responses", body={"input": "Hi", **body})
    assert reply.status_code == 200, reply.text
    return reply, app.state.engine


def prompt_of(engine):
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids)


def done_items(events):
    last = response_of(events)
    assert last["status"] == "completed"
    return [item["item"] for item in events if item["type"] == "response.output_item.done"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stateless_client_replays_the_exact_thought(stream):
    """As Codex does: no store, no ids, the shown text left out."""
    app = app_of(FakeEngine())
    reply, engine = ask(app, THOUGHT, stream=stream, **SEALED)
    items = done_items(typed_events(reply.text)) if stream else reply.json()["output"]
    assert items[0]["type"] == "reasoning"
    assert items[0]["encrypted_content"].startswith("civetta.1.")
    turn = [{"role": "user", "content": "Hi"}]
    for item in items:
        turn.append({k: v for k, v in item.items() if k not in ("id", "status")})
    whole = prompt_of(ask(app, "x", input=turn)[1])
    turn[1] |= {"summary": [], "content": None}
    back, engine = ask(app, "x", input=turn)
    assert prompt_of(engine) == whole
    assert "Let me think." in whole
    assert "x-civetta-ignored" not in back.headers


def test_the_sealed_thought_goes_before_a_summary_that_a_client_rewrote():
    app = app_of(FakeEngine())
    done = ask(app, f"Secret.\n</think>\n\n{CALL}", tools=[WEATHER], **SEALED)[0].json()
    thought = {**done["output"][0], "summary": [{"type": "summary_text", "text": "Other."}]}
    prompt = prompt_of(
        ask(app, "x", input=[{"role": "user", "content": "Hi"}, thought, done["output"][1]])[1]
    )
    assert "Secret." in prompt
    assert "Other." not in prompt


def test_a_seal_that_does_not_open_is_named_and_the_shown_text_stands_in():
    item = {"type": "reasoning", "encrypted_content": "gAAAA", "summary": []}
    item["summary"] = [{"type": "summary_text", "text": "Shown."}]
    asked = [{"role": "user", "content": "Hi"}, item, {"role": "assistant", "content": "Yes"}]
    reply, engine = ask(app_of(FakeEngine()), "x", input=asked, reasoning={"context": "all_turns"})
    assert reply.headers["x-civetta-ignored"] == "input[1].encrypted_content"
    assert "Shown." in prompt_of(engine)


def test_nothing_is_sealed_unasked_and_restarts_with_the_same_key_read_it():
    assert "encrypted_content" not in ask(app_of(FakeEngine()), THOUGHT)[0].json()["output"][0]
    keyed = {"headers": {"x-api-key": "k"}}
    first, second = (app_of(FakeEngine(THOUGHT), **server(api_key=("k",))) for _ in range(2))
    body = {"input": "Hi", **SEALED}
    done = request(first, "POST", "/v1/responses", body=body, **keyed).json()
    thought = {**done["output"][0], "content": None}
    again = {"input": [{"role": "user", "content": "Hi"}, thought]}
    assert (
        "x-civetta-ignored"
        not in request(second, "POST", "/v1/responses", body=again, **keyed).headers
    )


def sealed_by(app):
    reply = request(app, "POST", "/v1/responses", body={"input": "Hi", **SEALED})
    return {**reply.json()["output"][0], "content": None}


def opens(app, thought):
    body = {"input": [{"role": "user", "content": "Hi"}, thought]}
    reply = request(app, "POST", "/v1/responses", body=body)
    assert reply.status_code == 200
    return "x-civetta-ignored" not in reply.headers


def test_with_a_store_and_no_key_a_restart_reads_what_was_sealed(tmp_path):
    app = app_of(FakeEngine(THOUGHT), **server(store=str(tmp_path / "kept")))
    thought = sealed_by(app)
    app.state.responses.close()
    again = app_of(FakeEngine(THOUGHT), **server(store=str(tmp_path / "kept")))
    other = app_of(FakeEngine(THOUGHT), **server(store=str(tmp_path / "other")))
    none = app_of(FakeEngine(THOUGHT))
    try:
        assert opens(again, thought)
        assert not opens(other, thought)
        assert not opens(none, thought)
        assert not opens(app_of(FakeEngine(THOUGHT)), sealed_by(none)), "a process alone"
    finally:
        again.state.responses.close()
        other.state.responses.close()


def test_the_kept_key_is_random_and_its_owners_alone(tmp_path):
    keys = [kept_key(tmp_path / name) for name in ("a", "b") if not (tmp_path / name).mkdir()]
    assert keys[0] != keys[1]
    assert kept_key(tmp_path / "a") == keys[0]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["thoughts.key"]
    assert stat.S_IMODE((tmp_path / "a" / "thoughts.key").stat().st_mode) == 0o600


def test_a_server_that_gets_an_api_key_later_still_reads_what_its_store_sealed(tmp_path):
    kept = kept_key(tmp_path)
    sealed = ThoughtSeal((), kept).seal("Hm.")
    assert ThoughtSeal(("new",), kept).open(sealed) == "Hm."
    assert ThoughtSeal(("new",)).open(ThoughtSeal(("new",), kept).seal("Hm.")) == "Hm."


def test_of_servers_that_start_at_once_all_have_one_key(tmp_path, monkeypatch):
    inner, other = seal_key._make, []

    def late(path):
        inner(path)  # somebody else was first
        other.append(path.read_bytes())
        inner(path)

    monkeypatch.setattr(seal_key, "_make", late)
    assert kept_key(tmp_path) == other[0]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_file_that_is_no_key_is_refused_in_one_sentence(tmp_path, size):
    (tmp_path / "thoughts.key").write_bytes(b"x" * size)
    with pytest.raises(StoreUnusable, match="no key of thoughts") as raised:
        kept_key(tmp_path)
    assert "\n" not in raised.value.message
    with pytest.raises(StoreUnusable):
        app_of(FakeEngine(), **server(store=str(tmp_path)))


def test_a_folder_that_cannot_hold_the_key_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreUnusable, match="cannot be kept"):
        kept_key(tmp_path / "file")
