"""What a request's schemas ask and nobody carries out: named to the client, told to the log."""

from __future__ import annotations

import logging

import pytest

from api.serving import app_of, request
from fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "secretname": {"type": "string", "format": "iri"},
        "ids": {"type": "array", "uniqueItems": True},
    },
}
FUNCTION = {"name": "go", "parameters": SCHEMA}
FORM = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
_PLACE = "tools[0].function.parameters.properties"


def of_tool(schema_field):
    return f"{schema_field}.properties.secretname.format, {schema_field}.properties.ids.uniqueItems"


BODIES = [
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
        of_tool("tools[0].function.parameters"),
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "tools": [{"function": {"name": "go", "parametersJsonSchema": SCHEMA}}],
        },
        of_tool("tools[0].function.parametersJsonSchema"),
    ),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [FUNCTION]},
        of_tool("tools[0].parameters"),
    ),
    (
        "/v1/messages",
        {"messages": MESSAGES, "tools": [{"name": "go", "input_schema": SCHEMA}]},
        of_tool("tools[0].input_schema"),
    ),
    (
        "/v1/messages/count_tokens",
        {"messages": MESSAGES, "tools": [{"name": "go", "input_schema": SCHEMA}]},
        of_tool("tools[0].input_schema"),
    ),
    (
        "/v1/responses",
        {"input": "x", "tools": [{"type": "function", **FUNCTION}]},
        of_tool("tools[0].parameters"),
    ),
    (
        "/v1/responses",
        {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [FUNCTION]}]},
        of_tool("tools[0].tools[0].parameters"),
    ),
    (
        "/v1/responses/input_tokens",
        {"input": "x", "tools": [{"type": "function", **FUNCTION}]},
        of_tool("tools[0].parameters"),
    ),
]
FORMATS = [
    ("/v1/chat/completions", {"messages": MESSAGES, "response_format": FORM}, "response_format"),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "response_format": FORM, "n": 2},
        "response_format",
    ),
    ("/v1/completions", {"prompt": "x", "response_format": FORM}, "response_format"),
    ("/completion", {"prompt": "x", "json_schema": SCHEMA}, "json_schema"),
]


@pytest.mark.parametrize(("path", "body", "named"), BODIES)
def test_keywords_of_tools_that_are_not_carried_out_are_named(path, body, named, caplog):
    with caplog.at_level(logging.INFO, logger="civetta.api"):
        reply = request(app_of(FakeEngine("</think>\n\nhello")), "POST", path, body=body)
    assert reply.status_code == 200
    assert reply.headers["X-Civetta-Ignored"] == named
    assert "schema_ignored=format,uniqueItems" in caplog.text
    assert "secretname" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param"), FORMATS)
def test_keywords_of_formats_that_are_not_carried_out_are_named(path, body, param, stream, caplog):
    with caplog.at_level(logging.INFO, logger="civetta.api"):
        reply = request(app_of(FakeEngine()), "POST", path, body={**body, "stream": stream})
    assert reply.status_code == 200
    schema = param if param == "json_schema" else f"{param}.json_schema.schema"
    assert reply.headers["X-Civetta-Ignored"] == (
        f"{schema}.properties.secretname.format, {schema}.properties.ids.uniqueItems"
    )
    assert "schema_ignored=format,uniqueItems" in caplog.text
    assert "secretname" not in caplog.text


def test_nothing_is_named_where_all_is_carried_out(caplog):
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "uuid"}}}
    tool = {"type": "function", "function": {"name": "go", "parameters": schema}}
    body = {"messages": MESSAGES, "tools": [tool], "response_format": {"type": "json_object"}}
    with caplog.at_level(logging.INFO, logger="civetta.api"):
        reply = request(app_of(FakeEngine()), "POST", "/v1/chat/completions", body=body)
    assert "X-Civetta-Ignored" not in reply.headers
    assert "schema_ignored" not in caplog.text


def test_a_long_list_of_names_stays_a_header_that_clients_take():
    properties = {f"p{n}": {"type": "string", "format": "iri"} for n in range(100)}
    tool = {
        "type": "function",
        "function": {"name": "go", "parameters": {"properties": properties}},
    }
    body = {"messages": MESSAGES, "tools": [tool]}
    app = app_of(FakeEngine(context_tokens=65_536))
    reply = request(app, "POST", "/v1/chat/completions", body=body)
    assert reply.status_code == 200
    *named, dots = reply.headers["X-Civetta-Ignored"].split(", ")
    assert dots == "..."
    assert len(reply.headers["X-Civetta-Ignored"]) <= 2000
    assert named == [f"{_PLACE}.p{n}.format" for n in range(len(named))]
    assert len(named) > 30
