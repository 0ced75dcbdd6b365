from __future__ import annotations

import json

import pytest

from civetta.chat.answer_format import AnswerFormat, answer_grammar
from civetta.chat.schema import closed, schema_grammar, walk
from civetta.errors import RequestInvalid


def nested(depth):
    inner = {"type": "integer"}
    for _ in range(depth - 1):
        inner = {"type": "array", "items": inner}
    return inner


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (nested(65), "p" + ".items" * 64),
        ({"enum": list(range(1001))}, "p.enum"),
        ({"anyOf": [{}, {"enum": list(range(1001))}]}, "p.anyOf.1.enum"),
        ({"properties": {f"p{i}": {} for i in range(501)}}, "p"),
        ({"$defs": {"a": {"minLength": 100_001}}}, "p.$defs.a.minLength"),
        ({"maxItems": 10**9}, "p.maxItems"),
        (
            {
                "properties": {f"p{i}": {} for i in range(5001)},
                "required": [f"p{i}" for i in range(5001)],
            },
            "p",
        ),
        ({"enum": ["x" * 120_001]}, "p"),
        ({"description": "x" * (2 * 1024 * 1024)}, "p"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_schemas_out_of_bounds_are_refused_by_their_place(schema, place):
    with pytest.raises(RequestInvalid) as caught:
        schema_grammar(schema, strict=False, param="p")
    assert caught.value.param == place
    assert caught.value.code == "invalid_schema"


@pytest.mark.parametrize(
    "schema",
    [
        nested(64),
        {"enum": list(range(1000))},
        {"properties": {f"p{i}": {} for i in range(500)}},
        {"maxItems": 100_000, "required": "odd", "properties": [1], "items": False},
    ],
    ids=lambda value: str(value)[:40],
)
def test_schemas_at_the_bounds_are_taken(schema):
    assert schema_grammar(schema, strict=True, param="p").kind == "json_schema"


def test_objects_that_list_properties_are_closed_unless_they_say_otherwise():
    schema = {
        "properties": {
            "plain": {"properties": {"a": {}}},
            "open": {"properties": {"a": {}}, "additionalProperties": True},
            "typed": {"properties": {"a": {}}, "additionalProperties": {"properties": {"b": {}}}},
            "free": {"type": "object"},
            "parts": {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        },
        "$defs": {"x": {"properties": {}}},
    }
    before = json.dumps(schema)
    found = closed(schema)
    assert json.dumps(schema) == before
    inner = found["properties"]
    assert found["additionalProperties"] is False
    assert inner["plain"]["additionalProperties"] is False
    assert inner["open"]["additionalProperties"] is True
    assert inner["typed"]["additionalProperties"]["additionalProperties"] is False
    assert "additionalProperties" not in inner["free"]
    assert inner["parts"] == schema["properties"]["parts"]
    assert found["$defs"]["x"]["additionalProperties"] is False


def test_walk_names_every_part():
    schema = {"anyOf": [{"items": {"x": 1}}, True], "$defs": {"d": {"not": {}}}}
    places = [place for place, _, _ in walk(schema)]
    assert places == ["", "/$defs/d", "/$defs/d/not", "/anyOf/0", "/anyOf/0/items"]


@pytest.mark.parametrize("kind", ["regex", "lark"])
def test_long_grammars_are_refused(kind):
    with pytest.raises(RequestInvalid, match="larger"):
        answer_grammar(AnswerFormat(kind=kind, text="a" * 300_000, param="p"))
    assert answer_grammar(AnswerFormat(kind=kind, text="a")).text == "a"
