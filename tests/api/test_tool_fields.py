"""A fault of a tool is told by the field in which that dialect, and that shape, declares it."""

from __future__ import annotations

import pytest

from api.serving import app_of, error_of, request
from fake_engine import FakeEngine

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 2}},
}
USER = {"role": "user", "content": "x"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def nested(name="go", key="parameters"):
    return {"type": "function", "function": {"name": name, "strict": True, key: SCHEMA}}


def flat(name="go"):
    return {"type": "function", "name": name, "strict": True, "parameters": SCHEMA}


def claudes(name="go"):
    return {"name": name, "strict": True, "input_schema": SCHEMA}


HOSTED = {"type": "web_search"}
SHAPES = [
    (CHAT, [nested()], "tools[0].function", "parameters"),
    (CHAT, [nested(key="parametersJsonSchema")], "tools[0].function", "parametersJsonSchema"),
    (CHAT, [flat()], "tools[0]", "parameters"),
    (RESPONSES, [HOSTED, flat()], "tools[1]", "parameters"),
    (
        RESPONSES,
        [HOSTED, {"type": "namespace", "name": "n", "tools": [HOSTED, flat()]}],
        "tools[1].tools[1]",
        "parameters",
    ),
    (MESSAGES, [claudes()], "tools[0]", "input_schema"),
    (f"{MESSAGES}/count_tokens", [claudes()], "tools[0]", "input_schema"),
]


def refused(path, tools):
    said = {"input": "x"} if path == RESPONSES else {"messages": [USER]}
    reply = request(app_of(FakeEngine()), "POST", path, body={**said, "tools": tools})
    assert reply.status_code == 400, reply.text
    error = error_of(reply)
    assert error["code"] == "invalid_tools"
    assert error["message"].startswith(error["param"])
    return error["param"]


@pytest.mark.parametrize(("path", "tools", "field", "key"), SHAPES)
def test_a_schema_that_cannot_be_met_is_named_by_its_field(path, tools, field, key):
    assert refused(path, tools) == f"{field}.{key}.properties.n"


@pytest.mark.parametrize(
    ("path", "shape", "field"),
    [
        (CHAT, nested, "tools[1].function.name"),
        (CHAT, flat, "tools[1].name"),
        (RESPONSES, flat, "tools[1].name"),
        (MESSAGES, claudes, "tools[1].name"),
    ],
)
def test_a_name_that_cannot_be_is_named_by_its_field(path, shape, field):
    assert refused(path, [shape("fine"), shape("a b")]) == field
