"""Calls that a client parsed and wrote anew render as they were sampled; changed ones as changed."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.serving import app_of, request
from civetta.chat.coerce import parse_json
from civetta.chat.json_text import json_text
from civetta.chat.number_spelling import ID_CHARS_MAX, respelled, with_spellings
from fake_engine import FakeEngine

ID = "call_" + "0a" * 12
SPELLED = '{"at": [1.50, -0, 2E3, {"x": 1.0, "t": true}], "n": 7, "s": "1.50", "big": 1e21}'
NUMBERS = st.from_regex(
    r"-?(0|[1-9][0-9]{0,8})(\.[0-9]{1,6})?([eE][+-]?[0-9]{1,2})?", fullmatch=True
)
CALL = (
    "<tool_call>\n<function=go>\n<parameter=at>\n[1.50, -0, 2E3]\n</parameter>\n"
    "<parameter=share>\n1.0\n</parameter>\n</function>\n</tool_call>"
)
SCHEMA = {"type": "object", "properties": {"at": {"type": "array"}, "share": {"type": "number"}}}


def written_by_javascript(value):
    """What JSON.parse and JSON.stringify leave: doubles, whole ones without a point."""
    if isinstance(value, dict):
        return {key: written_by_javascript(item) for key, item in value.items()}
    if isinstance(value, list):
        return [written_by_javascript(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return int(value)
    return float(value) if isinstance(value, float) else value


@given(st.lists(NUMBERS.filter(lambda text: len(text) <= 12), max_size=2))
def test_an_id_brings_back_what_javascript_lost(numbers):
    text = '{"a": [' + ", ".join(numbers) + "]}"
    call_id = with_spellings(ID, parse_json(text))
    client = written_by_javascript(json.loads(text))
    assert json_text(respelled(client, call_id)) == text
    assert re.fullmatch(r"[a-zA-Z0-9_-]+", call_id)


def test_places_count_numbers_in_their_order_and_nothing_else():
    call_id = with_spellings(ID, parse_json(SPELLED))
    assert call_id == f"{ID}_0n1p50_1n-0_2n2E3_3n1p0_5n1e21"
    client = written_by_javascript(json.loads(SPELLED))
    assert json_text(client) != SPELLED
    assert json_text(respelled(client, call_id)) == SPELLED
    assert json_text(respelled(client, "toolu_" + call_id.removeprefix("call_"))) == SPELLED


def test_a_number_that_the_client_changed_stays_changed():
    call_id = with_spellings(ID, parse_json('{"a": [1.50, 2.0]}'))
    assert json_text(respelled({"a": [1.25, 2]}, call_id)) == '{"a": [1.25, 2.0]}'
    assert json_text(respelled({"a": [True, "1.5"]}, call_id)) == '{"a": [true, "1.5"]}'
    assert json_text(respelled({}, call_id)) == "{}"


def test_plain_numbers_leave_the_id_alone():
    arguments = parse_json(
        '{"a": [0, 7, -12, 0.5, -3.25, 123456789012345], "b": "1.50", "c": null}'
    )
    assert with_spellings(ID, arguments) == ID


def test_the_id_stays_short_and_what_fits_is_kept():
    text = "[" + ", ".join(f"{k}.50" for k in range(1, 40)) + "]"
    call_id = with_spellings(ID, parse_json('{"a": ' + text + "}"))
    assert len(ID) < len(call_id) < ID_CHARS_MAX
    client = {"a": [k + 0.5 for k in range(1, 40)]}
    assert json_text(respelled(client, call_id)).startswith('{"a": [1.50, 2.50, 3.50, ')


@pytest.mark.parametrize(
    "call_id",
    ["", "1", "_0n2", ID, f"{ID}_0n--1", f"{ID}_0n1e", f"{ID}_0nE", f"{ID}_0n1e999",
     f"{ID}_0n" + "9" * 40, f"{ID}_0n2_", f"{ID}_9n1p50", "call_1n5", ID + "_0n1p50" * 999],
)  # fmt: skip
def test_ids_of_others_change_nothing(call_id):
    assert json_text(respelled({"a": 1.5, "b": 10**400}, call_id)) == json_text(
        {"a": 1.5, "b": 10**400}
    )


def asked(path, body):
    engine = FakeEngine("ok")
    answer = request(app_of(engine), "POST", path, body=body)
    assert answer.status_code == 200, answer.text
    return engine.tokenizer.decode(engine.requests[0].prompt_ids)


def sampled(path, body, *, stream=False):
    reply = request(app_of(FakeEngine(CALL)), "POST", path, body={**body, "stream": stream})
    assert reply.status_code == 200, reply.text
    if not stream:
        return reply.json()
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("stream", [False, True])
def test_an_input_of_messages_that_its_client_wrote_anew_renders_as_it_was_sampled(stream):
    body = {
        "max_tokens": 999,
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "go", "input_schema": SCHEMA}],
    }
    done = sampled("/v1/messages", body, stream=stream)
    if stream:
        (block,) = [e["content_block"] for e in done if e["type"] == "content_block_start"]
        text = "".join(e["delta"].get("partial_json", "") for e in done if "delta" in e)
        block = {**block, "input": json.loads(text)}
    else:
        (block,) = done["content"]
    block["input"] = written_by_javascript(block["input"])
    assert json.dumps(block["input"]) == '{"at": [1.5, 0, 2000], "share": 1}'
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "done"}
    turns = [
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [result]},
    ]
    assert CALL in asked("/v1/messages", {**body, "messages": body["messages"] + turns})


def test_an_input_of_messages_that_is_spelled_so_in_the_body_renders_so():
    arguments = '{"at": [1.50, -0, 2E3], "share": 1.0}'
    body = (
        '{"temperature": 0.70, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"},'
        ' {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "go", "input": '
        + arguments
        + '}]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content":'
        ' "done"}]}], "tools": [{"name": "go", "input_schema": {"properties": {"a": {"minimum": -0,'
        ' "maximum": 1.50}}}}]}'
    )
    prompt = asked("/v1/messages", body.encode())
    assert CALL in prompt
    assert '"minimum": 0, "maximum": 1.5}' in prompt


def test_a_chat_client_that_parses_arguments_loses_nothing_either():
    tool = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [tool],
        "reasoning_effort": "none",
    }
    message = sampled("/v1/chat/completions", body)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    call["function"]["arguments"] = json.dumps(
        written_by_javascript(json.loads(call["function"]["arguments"]))
    )
    turns = [message, {"role": "tool", "tool_call_id": call["id"], "content": "done"}]
    assert CALL in asked("/v1/chat/completions", {**body, "messages": body["messages"] + turns})


def test_a_responses_client_that_parses_arguments_loses_nothing_either():
    tool = {"type": "function", "name": "go", "parameters": SCHEMA}
    body = {"input": "Hi", "tools": [tool], "reasoning": {"effort": "none"}}
    (call,) = sampled("/v1/responses", body)["output"]
    call["arguments"] = json.dumps(written_by_javascript(json.loads(call["arguments"])))
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    items = [{"role": "user", "content": "Hi"}, call, output]
    assert CALL in asked("/v1/responses", {**body, "input": items})
