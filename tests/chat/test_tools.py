from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from civetta.chat.message import ToolSpec
from civetta.chat.tools import BlockReader, ParsedCall, parse_block, render_call

EDIT = ToolSpec(
    name="edit",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "note": {"type": "string"},
            "ids": {"type": "array"},
            "count": {"type": "integer"},
            "first name": {"type": "string"},
            "loose": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
)
TOOLS = (EDIT, ToolSpec(name="other"))


def calls(text: str) -> list[tuple[str, dict[str, object]]]:
    return [(call.name, call.arguments) for call in parse_block(text, TOOLS)]


def in_chunks(chunks: list[str]) -> tuple[list[ParsedCall], bool, str]:
    reader = BlockReader(TOOLS)
    found: list[ParsedCall] = []
    rest = ""
    for chunk in chunks:
        if reader.closed:
            rest += chunk
        else:
            found += reader.push(chunk)
    if not reader.closed:
        found += reader.finish()
    return found, reader.closed, reader.rest + rest


def body(text: str) -> str:
    return f"\n<function=edit>\n{text}</function>\n</tool_call>"


def param(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


VALUE_SCRAPS = st.sampled_from(
    ["a", "\n", " ", "\r", "<", ">", "</", "<parameter", "</parameter>", "</function>", "<b>",
     "</tool_call>", "<function=", "é", "5", "null", '"', "{", "true"]
)  # fmt: skip


def unambiguous(value: str) -> bool:
    """No closing tag in the value, as the template writes it, is followed by what may follow it."""
    text = f"{value}\n</parameter>"
    for tag, followers in (
        ("</parameter>", ("<parameter", "</function>", "</tool_call>", "<function=")),
        ("</function>", ("</tool_call>", "<function=")),
    ):
        for part in text.split(tag)[1:]:
            # a tag at the very end of the value meets the real closing tag, which is no follower
            if part.lstrip().startswith(followers):
                return False
    return True


@given(st.dictionaries(
    st.sampled_from(["path", "note", "first name"]),
    st.lists(VALUE_SCRAPS, max_size=6).map("".join).filter(unambiguous),
))  # fmt: skip
def test_string_arguments_round_trip(arguments):
    rendered = render_call("edit", arguments).removeprefix("<tool_call>")
    assert calls(rendered) == [("edit", arguments)]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "count": st.integers(),
            "ids": st.lists(st.none() | st.booleans() | st.text(max_size=3), max_size=3),
            "loose": st.none(),
        },
    )
)
def test_typed_arguments_round_trip(arguments):
    # a JSON text with these tags inside is as ambiguous as a string with them; texts here are short
    rendered = render_call("edit", arguments).removeprefix("<tool_call>")
    assert calls(rendered) == [("edit", arguments)]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        (param("path", "a.py"), {"path": "a.py"}),
        (param("path", ""), {"path": ""}),
        ("<parameter=path></parameter>", {"path": ""}),
        ("<parameter=path>a.py</parameter>", {"path": "a.py"}),
        (param("path", "\n x \n"), {"path": "\n x \n"}),
        (param("count", "3") + param("ids", "[1, 2]"), {"count": 3, "ids": [1, 2]}),
        (param("path", "1") + param("path", "2"), {"path": "2"}),
        (param("new", "5"), {"new": 5}),
        # what models get wrong
        ("<parameter=\nids>\n[1]\n</parameter>\n", {"ids": [1]}),
        ("<parameter=ids: [1]\n</parameter>\n", {"ids": [1]}),
        ("<parameter=ids: [1]>\n</parameter>\n", {"ids": [1]}),
        ("<parameter=note=\nhello\n</parameter>\n", {"note": "hello"}),
        ("<parameter=note=>\nhello\n</parameter>\n", {"note": "hello"}),
        ("<parameter=note\nhello\n</parameter>\n", {"note": "hello"}),
        ('<parameter="note">\nhello\n</parameter>\n', {"note": "hello"}),
        ("<parameter=what is this\nhello\n</parameter>\n", {}),
        ("<parameter=>\nhello\n</parameter>\n", {}),
        ("<parameter=what: x\n1\n</parameter>\n" + param("count", "3"), {"count": 3}),
        ("<parameter=path>\na\n<parameter=note>\nb\n</parameter>\n", {"path": "a", "note": "b"}),
        ("<parameter=path>\n<parameter=note>\nb\n</parameter>\n", {"path": "", "note": "b"}),
        ("<parameter=path>\na\n", {"path": "a"}),  # </parameter> missing before </function>
        ("stray " + param("path", "a"), {"path": "a"}),
        (param("path", "a") + "<parameter name=note>\nb\n</parameter>\n", {"path": "a"}),
        # tags as text
        (param("note", "x </parameter> y"), {"note": "x </parameter> y"}),
        (param("note", "a\n</function>\nb"), {"note": "a\n</function>\nb"}),
        (param("note", "a\n</tool_call>\nb"), {"note": "a\n</tool_call>\nb"}),
        (param("note", "\n<parameter=other>\n1"), {"note": "\n<parameter=other>\n1"}),
        (param("note", "see <parameter=path> here"), {"note": "see <parameter=path> here"}),
    ],
)
def test_parameters(text, arguments):
    assert calls(body(text)) == [("edit", arguments)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n</tool_call>", []),
        ("</tool_call>", []),
        ("just words</tool_call>", []),
        ("<function=a></function></tool_call>", [("a", {})]),
        ("<function=a></function><function=b></function></tool_call>", [("a", {}), ("b", {})]),
        ("<function=a>\n<function=b>\n</function></tool_call>", [("a", {}), ("b", {})]),
        ("<function=a>\n</tool_call>", [("a", {})]),
        ("<function=\na>\n</function>", [("a", {})]),
        ("<function=a\n<parameter=k>\n1\n</parameter>\n</function>", [("a", {"k": 1})]),
        ('<function="a"></function>', [("a", {})]),
        (
            "<function=>\n<parameter=k>\n1\n</parameter>\n</function><function=b></function>",
            [("b", {})],
        ),
        ("<function=edit>\n<parameter=path>\nx\n</function>", [("edit", {"path": "x"})]),
        ("<function=edit>\n<parameter=path>\nx\n</tool_call>", [("edit", {"path": "x"})]),
        ("<function=edit>\n<parameter=path>\nx\n</function>\n</tool_c", [("edit", {"path": "x"})]),
        # interrupted
        ("<function=edit>\n<parameter=path>\nx\n</parameter>\n", []),
        ("<function=edit>\n<parameter=path>\nx", []),
        ("<function=edit>\n<parameter=path>\nx\n</parameter>", []),
        ("<function=edi", []),
        ("<function=a></function>\n<function=edit>\n<parameter=pa", [("a", {})]),
    ],
)
def test_blocks(text, expected):
    assert calls(text) == expected


PIECES = st.sampled_from(
    ["\n", " ", "x", "5", "<", ">", "<function=", "edit", "other", "</function>", "<parameter=",
     "path", "count", "</parameter>", "</tool_call>", "<tool_call>", "<parameter=path>\n",
     "<function=edit>\n", "\n</parameter>\n", "</", "<parameter=ids: [1]", "note=", "</tool"]
)  # fmt: skip


@settings(max_examples=1000)
@given(st.lists(PIECES, max_size=14).map("".join), st.data())
def test_any_chunking_gives_the_same_result(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = in_chunks([text])
    assert in_chunks(chunks) == whole
    assert in_chunks(list(text)) == whole
    for call in whole[0]:
        assert json.loads(json.dumps(call.arguments)) == call.arguments


def test_rest_is_what_follows_the_block():
    reader = BlockReader(TOOLS)
    assert [call.name for call in reader.push("<function=a></function></tool_call>\nmore")] == ["a"]
    assert reader.closed
    assert reader.rest == "\nmore"


def test_render_is_the_models_syntax():
    assert render_call("f", {"s": "a\nb", "n": 1.5, "d": {"é": [None, True]}, "e": ""}) == (
        "<tool_call>\n<function=f>\n<parameter=s>\na\nb\n</parameter>\n<parameter=n>\n1.5\n"
        '</parameter>\n<parameter=d>\n{"é": [null, true]}\n</parameter>\n<parameter=e>\n\n'
        "</parameter>\n</function>\n</tool_call>"
    )


def test_additional_properties_have_a_schema_too():
    tool = ToolSpec(name="map", parameters={"additionalProperties": {"type": "string"}})
    text = "<function=map>\n<parameter=k>\n5\n</parameter>\n</function>\n</tool_call>"
    assert parse_block(text, [tool]) == [ParsedCall(name="map", arguments={"k": "5"})]


def test_properties_that_are_no_schema_are_ignored():
    tool = ToolSpec(name="odd", parameters={"properties": [1]})
    text = "<function=odd>\n<parameter=k>\n5\n</parameter>\n</function>"
    assert parse_block(text, [tool]) == [ParsedCall(name="odd", arguments={"k": 5})]
