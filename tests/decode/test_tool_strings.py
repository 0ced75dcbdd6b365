"""`pattern`, lengths and `format` of parameters that are bare text."""

from __future__ import annotations

import pytest

from civetta.chat.message import ToolSpec
from civetta.chat.tool_grammar import LooseParameter, call_tail_grammar
from civetta.chat.tools import BlockReader, render_call
from civetta.engine.client import ReplyOptions
from civetta.engine.constraining import constraint_of
from civetta.errors import RequestInvalid
from civetta.types import Constraint, Grammar
from decode.walking import guide_of, say


def tool_of(schema, **more):
    properties = {"text": {"type": "string", **schema}, "n": {"type": "integer"}}
    return ToolSpec(name="go", parameters={"type": "object", "properties": properties}, **more)


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
]


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [(s, v, True) for s, good, _ in CASES for v in good]
    + [(s, v, False) for s, _, bad in CASES for v in bad],
)
@pytest.mark.parametrize("behind", [False, True])
def test_only_texts_of_the_schema_can_be_said(schema, value, fits, behind):
    assert says(schema, value, behind=behind) == fits


def test_null_stays_sayable_where_a_text_has_bounds():
    tool = tool_of({"type": ["string", "null"], "minLength": 9})
    text = call_tail_grammar([tool])
    guide = guide_of(Constraint(grammar=Grammar(kind="lark", text=text), starts="call"))
    assert say(guide, "<tool_call>" + render_call("go", {"text": None})[len("<tool_call>") :])


def test_what_ends_a_value_stays_out_of_a_bounded_text_too():
    assert not says({"minLength": 1}, "x</parameter>\n<parameter=n>")


@pytest.mark.parametrize(
    "schema", [{"pattern": "(?=a)b"}, {"pattern": r"(a)\1"}, {"pattern": "^a|b$"}]
)
def test_a_pattern_that_cannot_be_carried_out_is_refused_of_a_strict_tool_alone(schema):
    found = constraint_of([tool_of(schema)], ReplyOptions())
    loose = [LooseParameter("go", "text")]
    assert found.grammar.text == call_tail_grammar([tool_of(schema)], loose=loose)
    with pytest.raises(RequestInvalid, match="cannot be carried out") as raised:
        constraint_of([tool_of(schema, strict=True)], ReplyOptions())
    assert raised.value.code == "invalid_tools"
    assert raised.value.param == "tools[0].parameters.properties.text"


def test_a_format_that_is_not_known_is_refused_of_a_strict_tool_alone():
    assert says({"format": "ipv6"}, "anything")
    with pytest.raises(RequestInvalid, match="ipv6"):
        constraint_of([tool_of({"format": "ipv6"}, strict=True)], ReplyOptions())
