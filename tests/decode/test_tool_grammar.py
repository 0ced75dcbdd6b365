"""Random walks through the grammar of tool calls: whatever can be said is a call that fits."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from civetta.chat.message import ToolCall, ToolSpec
from civetta.chat.reply import ReplyParser, assemble
from civetta.chat.tool_grammar import COUNTED_PARAMETERS, call_tail_grammar, calls_grammar
from civetta.chat.tools import BlockReader, render_call
from civetta.decode.grammar_text import problem_of
from civetta.types import Constraint, Grammar
from decode.walking import draw, guide_of, may_end, say, text_of, tokenizer

EDIT = ToolSpec(
    name="edit",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "line": {"type": "integer"},
            "share": {"type": "number"},
            "ids": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            "mode": {"enum": ["in", "over", 3, None]},
            "loose": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "dry": {"type": "boolean"},
            "spot": {"$ref": "#/$defs/Spot"},
            "first name": {"type": "string"},
        },
        "required": ["path", "line"],
        "$defs": {
            "Spot": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
        },
    },
)
STOP = ToolSpec(name="stop.now")
MAP = ToolSpec(name="map", parameters={"additionalProperties": {"type": "integer"}})
TOOLS = (EDIT, STOP, MAP)


def bound(tools=TOOLS, *, many=True, whole=False, **more):
    if whole:
        return Constraint(
            grammar=Grammar(kind="lark", text=calls_grammar(tools, many=many, **more))
        )
    text = call_tail_grammar(tools, **more)
    return Constraint(grammar=Grammar(kind="lark", text=text), starts="call")


def call_guide(tools=TOOLS, **more):
    guide = guide_of(bound(tools, **more))
    assert say(guide, "<tool_call>")
    return guide


def says(text, tools=TOOLS):
    return say(call_guide(tools), text)


def read_exactly(text, tools=TOOLS):
    reader = BlockReader(tools, exact=True)
    return [*reader.push(text), *reader.finish()]


class Wishes:
    """Draws short values, and now and then follows a text that ends one."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.short = set(tokenizer().encode('\n</parameter>0123456789{}[]"x":, a'))
        self.left = []

    def __call__(self, ids):
        if not self.left and self.rng.random() < 0.3:
            ends = ("\n</parameter>\n<parameter=", "\n</parameter>\n</function>\n</tool_call>")
            self.left = tokenizer().encode(ends[int(self.rng.integers(2))])
        if self.left and self.left[0] in ids:
            return [self.left.pop(0)]
        self.left = []
        ending = [i for i in ids if i in tokenizer().eog_ids]
        return ending or [i for i in ids if i in self.short]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_drawn_is_a_call_that_fits_and_renders_to_the_same_text(seed):
    rng = np.random.default_rng(seed)
    ids, whole = draw(guide_of(bound(whole=True)), rng, most=1500, prefer=Wishes(seed))
    assert whole
    text = text_of(ids)
    parser = ReplyParser(thinking=False, tools=TOOLS, exact=True, new_id=str)
    reply = assemble([*parser.push(text), *parser.finish()])
    assert reply.content == ""
    assert reply.tool_calls
    assert "\n".join(render_call(c.name, c.mapping) for c in reply.tool_calls) == lined(text)
    for call in reply.tool_calls:
        check(call)


def lined(text: str) -> str:
    """With the ends of lines before `</parameter>` that a reply may leave out."""
    goes_on = r"</parameter>\n(?=<parameter=|</function>\n</tool_call>)"
    text = re.sub(rf"(?<=[^\n]){goes_on}", "\n</parameter>\n", text)
    return re.sub(rf"(<parameter=[^>\n]*>\n){goes_on}", r"\1\n</parameter>\n", text)


def check(call: ToolCall) -> None:
    given_, tool = call.mapping, next(tool for tool in TOOLS if tool.name == call.name)
    if tool is STOP:
        assert given_ == {}
    if tool is MAP:
        assert all(type(value) is int for value in given_.values())
    if tool is EDIT:
        assert {"path", "line"} <= set(given_) <= set(EDIT.parameters["properties"])
        assert isinstance(given_["path"], str)
        assert type(given_["line"]) is int
        assert type(given_.get("share", 0)) in (int, float)
        assert all(type(item) is int for item in given_.get("ids", []))
        assert given_.get("mode", 3) in ("in", "over", 3, None)
        assert type(given_.get("dry", True)) is bool
        assert type(given_.get("spot", {"x": 1})["x"]) is int


PIECES = st.sampled_from(
    ["a", "\n", " ", "<", ">", "</parameter>", "</function>", "<b>", "</tool_call>", "<tool_call>",
     "<function=", "<parameter=line>", "é", "5", '"', "{", "</think>", "\n</parameter>\n", "x" * 30]
)  # fmt: skip


@settings(max_examples=200)
@given(st.lists(PIECES, max_size=8).map("".join))
def test_markup_inside_arguments_survives_byte_for_byte(value):
    """All but the very text that ends a value can be said, and comes back as it was said."""
    rendered = render_call("edit", {"line": 1, "path": value}).removeprefix("<tool_call>")
    inner = f"\n{value}\n</parameter>\n</function>\n</tool_call>"
    ends = ("</parameter>\n<parameter=", "</parameter>\n</function>\n</tool_call>")
    first = min(inner.find(end) for end in ends if end in inner)
    sayable = first == len(inner) - len(ends[1])
    assert says(rendered) == sayable
    if sayable:
        assert [call.arguments for call in read_exactly(rendered)] == [{"line": 1, "path": value}]
        pieces = list(rendered)
        reader = BlockReader(TOOLS, exact=True)
        calls = [call for piece in pieces for call in reader.push(piece)]
        assert calls == read_exactly(rendered)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("\n<function=stop.now>\n</function>\n</tool_call>", True),
        ("\n<function=stop.now>\n<parameter=", False),
        ("\n<function=halt>", False),
        ("\n<function=edit>\n</function>", False),  # required parameters are missing
        ("\n<function=edit>\n<parameter=unknown>", False),
        ("\n<function=edit>\n<parameter=line>\nfive", False),
        ("\n<function=edit>\n<parameter=line>\n05", False),
        ("\n<function=edit>\n<parameter=line>\n5\n</parameter>\n</function>", False),
        ("\n<function=edit>\n<parameter=line>\n5\n</parameter>\n<parameter=line>", False),
        ("\n<function=edit>\n<parameter=line>\n5\n</parameter>\n<parameter=path>\n\n</parameter>\n"
         "</function>\n</tool_call>", True),
        ("\n<function=edit>\n<parameter=dry>\ntrue\n</parameter>\n<parameter=path>\np\n"
         "</parameter>\n<parameter=line>\n-5\n</parameter>\n</function>\n</tool_call>", True),
        ("\n<function=edit>\n<parameter=ids>\n[1, 2]\n</parameter>\n<parameter=", True),
        ("\n<function=edit>\n<parameter=ids>\n[1,2]", False),  # not as the template spells it
        ("\n<function=edit>\n<parameter=spot>\n{\"x\": 1}\n</parameter>", True),
        ("\n<function=edit>\n<parameter=spot>\n{\"y\"", False),
        ("\n<function=edit>\n<parameter=mode>\nover\n", True),
        ("\n<function=edit>\n<parameter=mode>\nunder", False),
        ("\n<function=edit>\n<parameter=first name>\nx", True),
        ("\n<function=edit>\n<parameter=first name>\n</parameter>\n<parameter=path>\nx", True),
        ("\n<function=map>\n</function>\n</tool_call>", True),
        ("\n<function=map>\n<parameter=k-1>\n7\n</parameter>\n<parameter=k2>\n8\n</parameter>\n"
         "</function>\n</tool_call>", True),
        ("\n<function=map>\n<parameter=k>\nseven", False),
    ],
)  # fmt: skip
def test_calls(text, fits):
    assert says(text) == fits


def test_one_call_or_several():
    call = "<tool_call>\n<function=stop.now>\n</function>\n</tool_call>"
    one = guide_of(bound(whole=True, many=False))
    assert say(one, call)
    assert may_end(one)
    assert not say(one, "\n" + call)
    several = guide_of(bound(whole=True))
    assert not may_end(several)
    assert say(several, f"{call}\n{call}")
    assert may_end(several)


def test_calls_or_an_answer_of_a_form():
    form = Grammar(kind="json_schema", text=json.dumps({"type": "object"}))
    for text in ('{"a": 1}', "<tool_call>\n<function=stop.now>\n</function>\n</tool_call>"):
        guide = guide_of(bound(whole=True, otherwise=form))
        assert say(guide, text)
        assert may_end(guide)
    assert not say(guide_of(bound(whole=True, otherwise=form)), "Hello")


def test_many_tools_with_many_parameters():
    n_parameters = COUNTED_PARAMETERS + 5
    tools = [
        ToolSpec(
            name=f"tool_{t}",
            parameters={
                "properties": {f"p{k}": {"type": "string"} for k in range(n_parameters)},
                "required": [f"p{k}" for k in range(0, n_parameters, 7)],
            },
        )
        for t in range(20)
    ]
    given_ = {f"p{k}": "v" for k in reversed(range(n_parameters))}
    rendered = render_call("tool_7", given_).removeprefix("<tool_call>")
    assert says(rendered, tools)
    assert [call.arguments for call in read_exactly(rendered, tools)] == [given_]


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "object", "properties": {}},
        {"properties": [1]},
        {"properties": {"a": True, "b": False, "c": None, "d": {}}},
        {"properties": {"": {}, " x": {}, "a>b": {"type": "string"}, "ok": {}}, "required": ["a>b"]},
        {"properties": {"a": {"type": ["string", "null"]}, "b": {"type": ["integer", "null"]}}},
        {"properties": {"a": {"const": "x"}, "b": {"enum": []}, "c": {"enum": ["\n", '"', "\\", "é"]}}},
        {"required": ["nowhere"], "properties": {"a": {"type": "string"}}},
        {"required": "a", "properties": {"a": {"type": "integer", "minimum": 3}}},
        {"additionalProperties": True},
        {"additionalProperties": False, "properties": {"a": {"type": "object"}}},
        {"patternProperties": {"^x": {"type": "integer"}}},
        {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "array"}]}}},
        {"properties": {"a": {"type": "number", "description": "d", "default": 1}}},
        {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]}}},
    ],
    ids=str,
)  # fmt: skip
def test_odd_schemas_have_a_grammar(parameters):
    tools = [ToolSpec(name="odd", parameters=parameters)]
    assert problem_of(bound(tools).grammar) is None
    ids, whole = draw(call_guide(tools), np.random.default_rng(1), prefer=Wishes(1))
    assert whole or len(ids) == 400  # between calls text is free, so that it may go on
    assert read_exactly(text_of(ids), tools)[0].name == "odd"


def test_an_end_of_line_may_be_missing_where_a_value_ends():
    text = (
        "\n<function=edit>\n<parameter=line>\n1\n</parameter>\n<parameter=first name>\n"
        "</parameter>\n<parameter=path>\nx</parameter>\n</function>\n</tool_call>"
    )
    assert says(text)
    assert [call.arguments for call in read_exactly(text)] == [
        {"line": 1, "first name": "", "path": "x"}
    ]


def test_an_interrupted_value_is_no_call():
    text = "\n<function=edit>\n<parameter=line>\n1\n</parameter>\n<parameter=path>\nx\n</function>"
    assert read_exactly(text) == []
    assert read_exactly(text + "\n</parameter>\n</function>\n</tool_ca") == []


def test_text_is_free_behind_a_call_that_ended_with_a_text():
    guide = call_guide()
    assert say(
        guide,
        "\n<function=edit>\n<parameter=line>\n1\n</parameter>\n<parameter=path>\nx\n</parameter>\n"
        "</function>\n</tool_call>",
    )
    assert say(guide, "\nwords, and another call\n<tool_call>\n<function=stop.now>")
