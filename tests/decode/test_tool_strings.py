"""`pattern`, lengths and `format` of parameters that are bare text."""

from __future__ import annotations

import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from civetta.chat.answer_format import AnswerFormat, ToolChoice
from civetta.chat.message import ToolSpec
from civetta.chat.text_formats import FORMATS
from civetta.chat.tool_grammar import LooseParameter, call_tail_grammar
from civetta.chat.tools import BlockReader, render_call
from civetta.engine.client import ReplyOptions
from civetta.engine.constraining import constraint_of, format_constraint
from civetta.errors import RequestInvalid
from civetta.types import Constraint, Grammar
from decode.walking import guide_of, say

COMBINED = {"type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const"}


def tool_of(schema, **more):
    text = schema if COMBINED & set(schema) else {"type": "string", **schema}
    parameters = {
        "type": "object",
        "properties": {"text": text, "n": {"type": "integer"}},
        "$defs": {
            "Code": {"type": "string", "pattern": "^[A-Z]{2}$"},
            "Own": {"$ref": "#/$defs/Own"},
        },
    }
    return ToolSpec(name="go", parameters=parameters, **more)


def says(schema, value, *, behind=False):
    """Whether a call with the value can be said; it is then read back as it was said."""
    tool = tool_of(schema)
    given = {"text": value, "n": 5} if behind else {"n": 5, "text": value}
    rendered = render_call("go", given).removeprefix("<tool_call>")
    text = call_tail_grammar([tool])
    guide = guide_of(Constraint(grammar=Grammar(kind="lark", text=text), starts="call"))
    assert say(guide, "<tool_call>")
    said = say(guide, rendered)
    if said:
        reader = BlockReader([tool], exact=True)
        assert [c.arguments for c in [*reader.push(rendered), *reader.finish()]] == [given]
    return said


CASES = [
    ({"pattern": "^[a-z]+$"}, ["abc"], ["ab1", "", "a\n"]),
    ({"pattern": "^(up|down)$"}, ["up", "down"], ["upper", "left"]),
    ({"pattern": "b{2}"}, ["abbc", "bb", "x\nbb"], ["abc"]),
    ({"pattern": "^/etc/"}, ["/etc/", "/etc/fstab"], ["etc/x", "x/etc/"]),
    ({"pattern": r"\.py$"}, ["a.py"], ["a.pyc", "apy"]),
    ({"minLength": 2, "maxLength": 3}, ["ab", "äöü", "a\nb"], ["a", "abcd", ""]),
    ({"minLength": 1}, ["x", "</parameter>", "<tool_call>"], [""]),
    ({"maxLength": 2, "pattern": "^[a-z]*$"}, ["", "ab"], ["abc", "A"]),
    ({"format": "date"}, ["2026-12-02"], ["2026-13-02", "today"]),
    ({"format": "date-time"}, ["2026-12-02T10:00:00Z"], ["2026-12-02", "2026-12-02 10:00:00"]),
    ({"format": "time"}, ["10:00:00+01:00"], ["25:00:00Z", "10:00"]),
    ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ({"format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    ({"format": "email"}, ["a.b@example.org"], ["a.b", "a@"]),
    ({"format": "hostname"}, ["a.example.org"], ["-a", "a..b"]),
    ({"format": "uri"}, ["https://a.org/x?y=1#z"], ["a b", "/x"]),
    ({"format": "duration"}, ["P1DT2H", "P3W"], ["1D"]),
    ({"format": "ipv6"}, ["::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4"], ["1:2", ":::"]),
    ({"pattern": "^a|b$"}, ["ax", "xb"], ["xay", "bx"]),
    ({"pattern": "^(a)|(b)$"}, ["ax", "xb"], ["xay"]),
    ({"pattern": r"^[|]\|(x|y)$"}, ["||x"], ["|", "||"]),
    ({"type": ["string", "null"], "minLength": 5}, [None, "nullx", "abcde"], ["abc"]),
    ({"type": "string", "nullable": True, "maxLength": 1}, [None, "a"], ["ab"]),
    ({"type": ["string", "integer"], "pattern": "^[a-z]"}, [7, -1, "a7"], ["A", "-"]),
    ({"$ref": "#/$defs/Code"}, ["DE"], ["de", "DEU"]),
    (
        {"anyOf": [{"format": "ipv4", "type": "string"}, {"format": "ipv6", "type": "string"}]},
        ["127.0.0.1", "::1"],
        ["localhost"],
    ),
    (
        {"anyOf": [{"$ref": "#/$defs/Code"}, {"enum": ["any", "a/b \x7f"]}, {"type": "null"}]},
        ["DE", "any", "a/b \x7f", None],
        ["none", "a"],
    ),
    ({"oneOf": [{"type": "string", "maxLength": 2}, {"type": "boolean"}]}, ["ab", True], ["abc"]),
    ({"allOf": [{"$ref": "#/$defs/Code"}, {"pattern": "E"}]}, ["DE", "EU"], ["FR"]),
    ({"type": "string", "anyOf": [{"minLength": 3}, {"const": "x"}]}, ["abc", "x"], ["y", ""]),
    ({"anyOf": [{"type": "string", "minLength": 3}, {}]}, ["a", ""], []),
]


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [(s, v, True) for s, good, _ in CASES for v in good]
    + [(s, v, False) for s, _, bad in CASES for v in bad],
)
@pytest.mark.parametrize("behind", [False, True])
def test_only_texts_of_the_schema_can_be_said(schema, value, fits, behind):
    assert says(schema, value, behind=behind) == fits


def test_what_ends_a_value_stays_out_of_a_bounded_text_too():
    assert not says({"minLength": 1}, "x</parameter>\n<parameter=n>")


@pytest.mark.parametrize("schema", [{"pattern": "(?=a)b"}, {"pattern": r"(a)\1"}])
def test_a_pattern_that_cannot_be_carried_out_is_refused_of_a_strict_tool_alone(schema):
    found = constraint_of([tool_of(schema)], ReplyOptions())
    loose = [LooseParameter("go", "text")]
    assert found.grammar.text == call_tail_grammar([tool_of(schema)], loose=loose)
    assert [gap.path for gap in found.gaps] == ["tools[0].parameters.properties.text"]
    with pytest.raises(RequestInvalid, match="cannot be carried out") as raised:
        constraint_of([tool_of(schema, strict=True)], ReplyOptions())
    assert raised.value.code == "invalid_tools"
    assert raised.value.param == "tools[0].parameters.properties.text"


UNHEEDED = [
    ({"format": "iri"}, ["format"]),
    ({"format": "iri", "not": {"const": "x"}}, ["not", "format"]),
    ({"type": ["string", "integer"], "minimum": 3}, ["minimum"]),
    ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 1}]}, ["oneOf"]),
    ({"type": "string", "allOf": [{"if": {"minLength": 1}}]}, ["allOf.0.if"]),
    ({"type": "string", "$ref": "#/nowhere"}, ["$ref"]),
    (
        {"anyOf": [{"type": "string", "minLength": 2}, {"type": "array", "items": {}}]},
        ["anyOf.0.minLength", "anyOf.1.items"],
    ),
    ({"enum": ["a"], "pattern": "a"}, ["pattern"]),
    ({"minLength": 1, "format": "uuid", "description": "x", "default": "y"}, []),
]


@pytest.mark.parametrize(("schema", "names"), UNHEEDED)
def test_what_is_not_carried_out_of_a_text_is_named_and_refused_of_a_strict_tool(schema, names):
    tools = [ToolSpec(name="first"), tool_of(schema)]
    place = "tools[1].parameters.properties.text."
    gaps = constraint_of(tools, ReplyOptions()).gaps
    assert [gap.path for gap in gaps] == [place + name for name in names]
    strict = [ToolSpec(name="first"), tool_of(schema, strict=True)]
    if not names:
        assert constraint_of(strict, ReplyOptions()).gaps == ()
        return
    with pytest.raises(RequestInvalid, match="not supported") as raised:
        constraint_of(strict, ReplyOptions())
    assert raised.value.param == place + names[0]


def test_a_reference_to_itself_ends():
    gaps = constraint_of([tool_of({"$ref": "#/$defs/Own"})], ReplyOptions()).gaps
    assert [gap.path for gap in gaps] == ["tools[0].parameters.$defs.Own.$ref"]


def test_references_that_multiply_are_given_up_and_named():
    defs = {f"R{n}": {"anyOf": [{"$ref": f"#/$defs/R{n + 1}"}] * 4} for n in range(12)}
    defs["R12"] = {"type": "string", "minLength": 1}
    schema = {"properties": {"a": {"$ref": "#/$defs/R0"}}, "$defs": defs}
    gaps = constraint_of([ToolSpec(name="go", parameters=schema)], ReplyOptions()).gaps
    assert [(gap.path, gap.keyword) for gap in gaps] == [("tools[0].parameters.properties.a", "")]


def test_what_is_not_carried_out_of_json_parameters_and_of_the_root_is_named():
    parameters = {
        "type": "object",
        "properties": {
            "ids": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/Id"}},
            "to": {"type": "object", "properties": {"at": {"type": "string", "format": "iri"}}},
            "a<b": {"type": "integer"},
        },
        "$defs": {"Id": {"type": "integer", "not": {"const": 3}}},
        "anyOf": [{"required": ["ids"]}],
        "minProperties": 1,
    }
    gaps = constraint_of([ToolSpec(name="go", parameters=parameters)], ReplyOptions()).gaps
    place = "tools[0].parameters"
    assert [gap.path for gap in gaps] == [
        f"{place}.anyOf",
        f"{place}.minProperties",
        f"{place}.properties.ids.uniqueItems",
        f"{place}.properties.to.properties.at.format",
        f"{place}.properties.a<b",
        f"{place}.$defs.Id.not",
    ]


def test_a_named_tool_keeps_its_place_in_the_request():
    tools = [ToolSpec(name="first"), tool_of({"format": "iri"})]
    choice = ToolChoice(mode="named", name="go")
    gaps = constraint_of(tools, ReplyOptions(tool_choice=choice)).gaps
    assert [gap.path for gap in gaps] == ["tools[1].parameters.properties.text.format"]


def test_what_is_not_carried_out_of_an_answer_is_named():
    schema = {"type": "object", "properties": {"a": {"not": {"const": 1}}, "b": {"format": "iri"}}}
    form = AnswerFormat(kind="json_schema", schema=schema, param="f")
    assert [gap.path for gap in format_constraint(form).gaps] == [
        "f.properties.a.not",
        "f.properties.b.format",
    ]


@given(st.ip_addresses(v=6) | st.ip_addresses(v=6, network="::ffff:0:0/96"))
def test_every_address_of_version_6_has_the_format(address):
    pattern = re.compile(FORMATS["ipv6"])
    assert pattern.fullmatch(str(address))
    assert pattern.fullmatch(address.exploded)


@given(st.text("0123456789abcF:.", max_size=40))
def test_what_has_the_format_is_an_address_of_version_6(text):
    if re.fullmatch(FORMATS["ipv6"], text):
        ipaddress.IPv6Address(text)
