"""Numbers of tool calls come back as they were sampled, through every API that keeps their text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.serving import app_of, request
from civetta.chat.coerce import coerce, parse_json
from civetta.chat.json_text import json_text
from civetta.chat.sandbox import _tojson
from fake_engine import FakeEngine

SPELLED = "[1.50, -0, -0.0, 2E3, 1e-07, 10.0, 3, 0.1, 123456789012345678.25]"
NUMBERS = st.from_regex(
    r"-?(0|[1-9][0-9]{0,8})(\.[0-9]{1,6})?([eE][+-]?[0-9]{1,2})?", fullmatch=True
)
TEXTS = st.recursive(
    NUMBERS,
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda parts: "[" + ", ".join(parts) + "]")
        | inner.map(lambda text: '{"ä": ' + text + ', "b": null}')
    ),
    max_leaves=8,
)
TOOL = {
    "type": "function",
    "name": "go",
    "function": {
        "name": "go",
        "parameters": {"properties": {"at": {"type": "array"}, "share": {"type": "number"}}},
    },
}
CALL = (
    f"<tool_call>\n<function=go>\n<parameter=at>\n{SPELLED}\n</parameter>\n"
    "<parameter=share>\n0.500\n</parameter>\n</function>\n</tool_call>"
)


@given(TEXTS)
def test_what_was_read_is_written_as_it_was(text):
    assert json_text(parse_json(text)) == text
    assert _tojson(parse_json(text)) == text
    assert json.loads(json_text(parse_json(text))) == json.loads(text)


@pytest.mark.parametrize("text", ["+1.5", ".5", "1_0.5", "1.", " 1.50"])
def test_a_repaired_number_is_json(text):
    assert json.loads(json_text(coerce(text, {"type": "number"}, {}))) == float(text)


def test_deep_numbers_are_written_shortest_and_nothing_fails():
    text = "[" * 300 + "1.50" + "]" * 300
    assert json.loads(json_text(parse_json(text))) == json.loads(text)


def replayed(messages):
    engine = FakeEngine("ok")
    body = {"messages": messages, "tools": [{"type": "function", "function": TOOL["function"]}]}
    assert request(app_of(engine), "POST", "/v1/chat/completions", body=body).status_code == 200
    return engine.tokenizer.decode(engine.requests[0].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_call_goes_back_token_for_token(stream):
    tools = [{"type": "function", "function": TOOL["function"]}]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "stream": stream}
    body["reasoning_effort"] = "none"
    reply = request(app_of(FakeEngine(CALL)), "POST", "/v1/chat/completions", body=body)
    if stream:
        events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line[6:7] == "{"]
        parts = [p for e in events for c in e["choices"] for p in c["delta"].get("tool_calls", [])]
        arguments = "".join(part["function"].get("arguments", "") for part in parts)
    else:
        (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
        arguments = call["function"]["arguments"]
    assert arguments == f'{{"at": {SPELLED}, "share": 0.500}}'
    call = {"id": "1", "type": "function", "function": {"name": "go", "arguments": arguments}}
    turn = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    assert CALL in replayed(turn)


def test_a_call_of_responses_goes_back_token_for_token():
    tool = {"type": "function", "name": "go", "parameters": TOOL["function"]["parameters"]}
    body = {"input": "Hi", "tools": [tool], "reasoning": {"effort": "none"}}
    done = request(app_of(FakeEngine(CALL)), "POST", "/v1/responses", body=body).json()
    (call,) = done["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    engine = FakeEngine("ok")
    again = {**body, "input": [{"role": "user", "content": "Hi"}, call, output]}
    assert request(app_of(engine), "POST", "/v1/responses", body=again).status_code == 200
    assert CALL in engine.tokenizer.decode(engine.requests[0].prompt_ids)
