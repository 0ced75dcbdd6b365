"""What users report of tool calls, reasoning and answer formats, each row a test (cases.md B, C)."""

from __future__ import annotations

import json

import pytest

from api.serving import app_of, error_of, events_of, request
from civetta.chat.message import ToolSpec
from civetta.chat.reply import ReplyParser, assemble
from fake_engine import FakeEngine

USER = {"role": "user", "content": "Hi"}
EDIT = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "note": {"type": "string"},
                "ids": {"type": "array"},
                "count": {"type": "integer"},
                "share": {"type": "number"},
                "dry": {"type": "boolean"},
                "spot": {"type": "object"},
                "none": {"type": "null"},
                "loose": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            },
        },
    },
}
TOOL = ToolSpec(name="edit", parameters=EDIT["function"]["parameters"])


def call(**arguments):
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function=edit>\n{parameters}</function>\n</tool_call>"


def chat(text, *, stream=False, engine=None, **body):
    engine = engine or FakeEngine(text)
    body = {"messages": [USER], "tools": [EDIT], "stream": stream, **body}
    response = request(app_of(engine), "POST", "/v1/chat/completions", body=body)
    assert response.status_code == 200, response.text
    return streamed(response.text) if stream else buffered(response.json())


def buffered(done):
    (choice,) = done["choices"]
    message = choice["message"]
    calls = [
        (item["function"]["name"], item["function"]["arguments"])
        for item in message.get("tool_calls") or []
    ]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": calls,
        "reason": choice["finish_reason"],
    }


def streamed(text):
    """As `buffered`; checks on the way what every stream keeps to."""
    found = {"content": "", "reasoning": "", "calls": [], "reason": None}
    ids = {}
    for item in events_of(text):
        for choice in item["choices"]:
            delta = choice["delta"]
            found["content"] += delta.get("content") or ""
            found["reasoning"] += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls") or []:
                index, function = part["index"], part["function"]
                if index == len(found["calls"]):
                    ids[index] = part["id"]
                    found["calls"].append([function["name"], ""])
                assert part.get("id", ids[index]) == ids[index], "an id is stable"
                assert ("name" in function) == ("id" in part), "the name comes once"
                found["calls"][index][1] += function.get("arguments", "")
            found["reason"] = choice["finish_reason"] or found["reason"]
    assert len(set(ids.values())) == len(ids)
    found["calls"] = [tuple(each) for each in found["calls"]]
    for _, arguments in found["calls"]:
        assert isinstance(json.loads(arguments), dict), "joined deltas are one JSON object"
    return found


BAD_HEADERS = {
    "<parameter=\nids>\n[1]\n</parameter>\n": {"ids": [1]},
    "<parameter=ids: [1]\n</parameter>\n": {"ids": [1]},
    "<parameter=note=\nhello\n</parameter>\n": {"note": "hello"},
    "<parameter=what is this\nhello\n</parameter>\n": {},
}


@pytest.mark.parametrize("header", BAD_HEADERS, ids=repr)
def test_case_16_malformed_parameters_are_repaired_or_dropped_alike_in_stream_and_buffer(header):
    """A grammar rules them out; a reply that no grammar bound may hold them all the same."""
    text = f"t</think>\n\n<tool_call>\n<function=edit>\n{header}</function>\n</tool_call>"
    whole = chat(text)
    assert chat(text, stream=True) == whole
    assert [json.loads(arguments) for _, arguments in whole["calls"]] == [BAD_HEADERS[header]]
    assert whole["content"] == ""


def test_case_17_two_functions_in_one_block_are_two_calls():
    text = (
        "<tool_call>\n<function=edit>\n<parameter=count>\n1\n</parameter>\n</function>\n"
        "<function=edit>\n<parameter=count>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    for size in (1, 2, 7, len(text)):
        parser = ReplyParser(thinking=False, tools=[TOOL], new_id=str)
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        deltas = [delta for part in parts for delta in parser.push(part)] + parser.finish()
        calls = assemble(deltas).tool_calls
        assert [(c.id, c.mapping) for c in calls] == [("0", {"count": 1}), ("1", {"count": 2})]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 1000])
def test_case_18_a_chunk_with_a_close_and_the_next_open_makes_no_phantom_call(size, exact):
    text = call(path="a") + call(path="b")
    parser = ReplyParser(thinking=False, tools=[TOOL], exact=exact)
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    deltas = [delta for part in parts for delta in parser.push(part)] + parser.finish()
    assert [c.mapping for c in assemble(deltas).tool_calls] == [{"path": "a"}, {"path": "b"}]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "7", 7),
        ("count", "007", 7),
        ("share", "1.5", 1.5),
        ("dry", "true", True),
        ("none", "null", None),
        ("ids", "[1,2]", [1, 2]),
        ("spot", '{"x": [1]}', {"x": [1]}),
        ("path", "007", "007"),
        ("path", "true", "true"),
        ("path", "[1,2]", "[1,2]"),
        ("path", "", ""),
        ("loose", "5", 5),
        ("loose", "five", "five"),
    ],
)
def test_case_20_values_have_the_types_of_the_schema(key, text, value):
    reply = "t</think>\n\n" + call(**{key: text})
    for found in (chat(reply), chat(reply, stream=True)):
        ((name, arguments),) = found["calls"]
        assert name == "edit"
        assert json.loads(arguments) == {key: value}
        assert type(json.loads(arguments)[key]) is type(value)


@pytest.mark.parametrize("stream", [True, False])
def test_case_23_tool_text_in_the_thought_stays_thought(stream):
    found = chat(f"I could {call(path='x')} or not\n</think>\n\nNo.", stream=stream)
    assert found["reasoning"] == f"I could {call(path='x')} or not"
    assert (found["content"], found["calls"], found["reason"]) == ("No.", [], "stop")


@pytest.mark.parametrize("stream", [True, False])
def test_case_24_none_leaves_calls_as_text(stream):
    found = chat("t</think>\n\n" + call(path="x"), tool_choice="none", stream=stream)
    assert (found["content"], found["calls"]) == (call(path="x"), [])


@pytest.mark.parametrize(
    ("body", "starts", "calls_max"),
    [
        ({}, "call", None),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, "call", 1),
        ({"tool_choice": "required"}, "answer", None),
        ({"tool_choice": {"type": "function", "function": {"name": "edit"}}}, "answer", None),
    ],
)
def test_case_24_choices_become_constraints(body, starts, calls_max):
    """What the engine makes of them: tests/engine/test_tool_choice.py."""
    engine = FakeEngine("t</think>\n\n" + call(path="x"))
    chat("", engine=engine, **body)
    constraint = engine.requests[0].constraint
    assert (constraint.starts, constraint.calls_max) == (starts, calls_max)


def test_case_24_a_choice_that_cannot_be_met_is_refused():
    for choice in ("required", {"type": "function", "function": {"name": "edit"}}):
        body = {"messages": [USER], "tool_choice": choice}
        response = request(app_of(FakeEngine()), "POST", "/v1/chat/completions", body=body)
        assert response.status_code == 400
        assert error_of(response)["param"] == "tool_choice"


@pytest.mark.parametrize("stream", [True, False])
def test_case_25_a_budget_that_ends_inside_a_call_keeps_the_calls_before_it(stream):
    text = "t</think>\n\n" + call(path="a") + "\n" + call(path="b" * 40)
    found = chat(text, stream=stream, max_tokens=len(call(path="a")) + 60)
    assert [json.loads(arguments) for _, arguments in found["calls"]] == [{"path": "a"}]
    assert found["reason"] == "length"
    assert found["content"] == ""


@pytest.mark.parametrize("stream", [True, False])
def test_case_26_a_call_behind_a_thought_leaves_no_marker_in_the_content(stream):
    found = chat("thought\n</think>\n\n" + call(path="a"), stream=stream)
    assert found["reason"] == "tool_calls"
    assert found["content"].strip("\n") == ""
    assert found["reasoning"] == "thought"
    assert found["calls"] == [("edit", '{"path": "a"}')]


@pytest.mark.parametrize("stream", [True, False])
def test_case_28_a_thought_that_was_cut_is_no_answer(stream):
    found = chat("on and on and on", stream=stream, max_tokens=9)
    assert (found["reasoning"], found["content"]) == ("on and on", "")
    assert found["reason"] == "length"


@pytest.mark.parametrize("stop", [[], ["unlikely stop"]])
def test_case_30_the_end_of_a_thought_leaves_no_fragment_whatever_holds_it_back(stop):
    text = "a thought</think>\n\nan answer"
    for stream in (True, False):
        found = chat(text, stream=stream, **({"stop": stop} if stop else {}))
        assert (found["reasoning"], found["content"]) == ("a thought", "an answer")


@pytest.mark.parametrize("content", [None, "", "text"])
@pytest.mark.parametrize("reasoning", [None, "because"])
def test_case_32_replayed_reasoning_is_rendered(content, reasoning):
    engine = FakeEngine("ok")
    turn = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "edit", "arguments": "{}"}}
        ],
    }
    if reasoning is not None:
        turn["reasoning_content"] = reasoning
    messages = [USER, turn, {"role": "tool", "tool_call_id": "c1", "content": "done"}]
    chat("", engine=engine, messages=messages)
    prompt = engine.tokenizer.decode(engine.requests[0].prompt_ids)
    assert f"<think>\n{reasoning or ''}\n</think>\n\n{content or ''}" in prompt


def test_case_33_conflicting_controls_are_refused():
    for body in (
        {"reasoning_effort": "none", "enable_thinking": True},
        {"reasoning_effort": "turbo"},
        {"thinking": {"type": "disabled"}, "enable_thinking": True},
    ):
        response = request(
            app_of(FakeEngine()), "POST", "/v1/chat/completions", body={"messages": [USER], **body}
        )
        assert response.status_code == 400
        assert error_of(response)["code"] == "invalid_reasoning"
    for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
        chat("t</think>\n\nx", reasoning_effort=effort)


@pytest.mark.parametrize("stream", [True, False])
def test_case_34_json_comes_behind_the_thought_and_lies_in_the_content(stream):
    engine = FakeEngine('free { thought\n</think>\n\n{"a": 1}')
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    found = chat("", engine=engine, stream=stream, tools=[], response_format=form)
    assert found["reasoning"] == "free { thought"
    assert json.loads(found["content"]) == {"a": 1}
    asked = engine.requests[0]
    assert asked.thinking
    assert asked.constraint.starts == "answer"


def test_case_35_a_default_left_out_is_the_default_given():
    prompts = []
    for body in ({}, {"enable_thinking": True}):
        engine = FakeEngine("t</think>\n\nx")
        found = chat("", engine=engine, **body)
        assert (found["reasoning"], found["content"]) == ("t", "x")
        prompts.append(engine.requests[0].prompt_ids)
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("form", "place", "says"),
    [
        ({"type": "json_schema"}, "response_format.json_schema", "required"),
        (
            {"type": "json_schema", "json_schema": {"schema": {
                "type": "object", "properties": {
                    "good": {"type": "string"},
                    "bad": {"type": "array", "minItems": 1, "items": {"minimum": 3, "maximum": 2,
                                                       "type": "integer"}}},
                "required": ["bad"]}}},
            "response_format.json_schema.schema.properties.bad.items",
            "minimum",
        ),
        (
            {"type": "json_schema", "json_schema": {"strict": True, "schema": {
                "type": "object", "properties": {"a": {"type": "string", "not": {}}}}}},
            "response_format.json_schema.schema.properties.a",
            "not",
        ),
        ({"type": "json_object", "schema": {"enum": []}}, "response_format.schema", "empty"),
        (
            {"type": "json_object", "schema": {"properties": {"a": {"$ref": "http://x.test/y"}}}},
            "response_format.schema.properties.a",
            "refers to 'http://x.test/y', and nothing outside of the schema is read; put that part",
        ),
        ({"type": "regex", "regex": "(a"}, "response_format.regex", "regex"),
        ({"type": "lark", "lark": "begin: x"}, "response_format.lark", ""),
    ],
)  # fmt: skip
def test_a_format_that_cannot_be_carried_out_names_the_place(form, place, says):
    body = {"messages": [USER], "response_format": form}
    response = request(app_of(FakeEngine()), "POST", "/v1/chat/completions", body=body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == place
    assert says in error["message"]


def test_what_a_lenient_schema_cannot_say_is_left_out():
    schema = {"type": "object", "properties": {"a": {"type": "string", "not": {}}}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert chat("t</think>\n\n{}", tools=[], response_format=form)["content"] == "{}"


def test_a_strict_tool_that_cannot_be_carried_out_names_the_place():
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 2}},
            },
        },
    }
    body = {"messages": [USER], "tools": [EDIT, tool]}
    response = request(app_of(FakeEngine()), "POST", "/v1/chat/completions", body=body)
    error = error_of(response)
    assert (error["param"], error["code"]) == (
        "tools[1].function.parameters.properties.n",
        "invalid_tools",
    )
    tool["function"]["strict"] = False
    assert chat("t</think>\n\nx", tools=[EDIT, tool])["content"] == "x"
