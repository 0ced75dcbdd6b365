from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from civetta.chat.coerce import admitted_types, coerce, parse_json
from civetta.chat.json_text import SpelledFloat

ALL = {"null", "boolean", "integer", "number", "string", "array", "object"}


def typed(*names: str) -> dict[str, object]:
    return {"type": list(names)} if len(names) > 1 else {"type": names[0]}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("007", typed("string"), "007"),
        ("007", typed("integer"), 7),
        ("007", {}, "007"),
        ("true", typed("string"), "true"),
        ("true", typed("boolean"), True),
        ("True", typed("boolean"), True),
        ("True", typed("boolean", "string"), "True"),
        ("true", typed("boolean", "string"), True),
        ("[1,2]", typed("string"), "[1,2]"),
        ("[1,2]", typed("array"), [1, 2]),
        ("[1,2]", typed("object"), "[1,2]"),
        ('{"a": "é"}', typed("object"), {"a": "é"}),
        ("", typed("string"), ""),
        ("", typed("integer"), ""),
        ("", {}, ""),
        ("null", typed("string"), "null"),
        ("null", typed("string", "null"), None),
        ("null", typed("null"), None),
        ("None", typed("integer", "null"), None),
        ("null", typed("integer"), "null"),
        ("5", typed("integer"), 5),
        ("5.0", typed("integer"), 5),
        ("5.5", typed("integer"), "5.5"),
        ("5", typed("number"), 5),
        ("5.0", typed("number"), 5.0),
        (".5", typed("number"), 0.5),
        ("1e3", typed("number"), 1000.0),
        ("1e999", typed("number"), "1e999"),
        ("NaN", typed("number"), "NaN"),
        ("[NaN]", typed("array"), "[NaN]"),
        ("[1e999]", typed("array"), "[1e999]"),
        ('["\\ud800"]', typed("array"), '["\\ud800"]'),
        ("[" * 100_000, typed("array"), "[" * 100_000),
        ("1" * 5000, typed("integer"), "1" * 5000),
        (" 5 \n", typed("integer"), 5),
        (" 5 \n", typed("string"), " 5 \n"),
        ('"5"', typed("integer"), 5),
        ('"5"', typed("string"), '"5"'),
        ('"5"', {}, '"5"'),
        ("5", {}, 5),
        ("hello", {}, "hello"),
        ("hello", None, "hello"),
        ("5", {"anyOf": [typed("string"), typed("integer")]}, 5),
        ("x", {"oneOf": [typed("integer"), typed("string")]}, "x"),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {"enum": ["5", 6]}, "5"),
        ("6", {"enum": ["5", 6]}, 6),
        ("5", {"const": "5"}, "5"),
        ("5", {"allOf": [typed("string", "integer"), typed("integer", "null")]}, 5),
        ("null", {"type": "string", "nullable": True}, None),
        ("5", {"$ref": "#/$defs/a~1b"}, "5"),
        ("5", {"$ref": "elsewhere.json"}, 5),
        ("5", {"type": "mystery"}, 5),
    ],
)
def test_values_follow_the_schema(text, schema, value):
    root = {"$defs": {"a/b": {"type": "string"}}}
    got = coerce(text, schema, root)
    assert got == value
    assert type(got) is type(value) or (isinstance(got, SpelledFloat) and type(value) is float)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(JSON)
def test_json_of_the_declared_type_comes_back(value):
    names = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    schema = typed(names.get(type(value), "null"))
    assert coerce(json.dumps(value, ensure_ascii=False), schema, {}) == value


@given(st.text(max_size=12), st.lists(st.sampled_from(sorted(ALL)), min_size=1, unique=True))
def test_every_result_is_valid_json(text, names):
    value = coerce(text, {"type": names}, {})
    assert parse_json(json.dumps(value, ensure_ascii=False)) == value


@given(st.text(max_size=12))
def test_strings_stay_as_they_are(text):
    assert coerce(text, {"type": "string"}, {}) == text


def test_cyclic_and_bushy_references_end():
    root = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50 + [{"$ref": "#"}] * 50}}}
    root |= {"anyOf": [{"$ref": "#/$defs/a"}] * 50}
    assert admitted_types({"$ref": "#"}, root) == ALL
    deep: dict[str, object] = {"type": "integer"}
    for _ in range(5000):
        deep = {"allOf": [deep]}
    assert admitted_types(deep, {}) == ALL
    assert admitted_types({"type": "string", "const": 3}, {}) == {"string"}
