from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from civetta.chat.message import (
    Conversation,
    Message,
    TextPart,
    ToolCall,
    ToolSpec,
    text_message,
)
from civetta.chat.reply import (
    ContentDelta,
    ReasoningDelta,
    Reply,
    ReplyParser,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    assemble,
)
from civetta.chat.template import ChatTemplate, TemplateOptions
from civetta.chat.tools import render_call

TOOLS = (
    ToolSpec(
        name="add",
        parameters={"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
    ),
)
CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def read(text: str, *, thinking=True, tools=TOOLS, chunks=None, **more) -> Reply:
    parser = ReplyParser(thinking=thinking, tools=tools, new_id=lambda i: f"id{i}", **more)
    deltas = [delta for chunk in chunks or [text] for delta in parser.push(chunk)]
    return assemble(deltas + parser.finish())


def call(index: int, **arguments: object) -> ToolCall:
    return ToolCall(id=f"id{index}", name="add", arguments=arguments)


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, CALL[:40], CALL[40:], "\n", "\n\n",
     " ", "word", "é🙂", "<", "</", "<tool", "</thi", "think>", "{}", "<function=add>\n",
     "</function>", "<parameter=s>", "</parameter>", "\r\n"]
)  # fmt: skip
TEXT = st.lists(PIECES, max_size=12).map("".join)


@settings(max_examples=1000)
@given(TEXT, st.booleans(), st.booleans(), st.booleans(), st.data())
def test_any_chunking_gives_the_same_reply(text, thinking, with_tools, parallel, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    tools = TOOLS if with_tools else ()
    more = {"thinking": thinking, "tools": tools, "parallel": parallel}
    whole = read(text, **more)
    assert read(text, chunks=chunks, **more) == whole
    assert read(text, chunks=list(text) or [""], **more) == whole


@settings(max_examples=500)
@given(TEXT, st.booleans())
def test_deltas_are_well_formed(text, thinking):
    parser = ReplyParser(thinking=thinking, tools=TOOLS)
    deltas = [delta for char in text for delta in parser.push(char)] + parser.finish()
    arguments: dict[int, str] = {}
    open_call: int | None = None
    ids = set()
    for position, delta in enumerate(deltas):
        if isinstance(delta, ReasoningDelta):
            assert all(isinstance(before, ReasoningDelta) for before in deltas[:position])
        if isinstance(delta, (ReasoningDelta, ContentDelta)):
            assert delta.text
            assert open_call is None
        elif isinstance(delta, ToolCallStart):
            assert (open_call, delta.index) == (None, len(ids))
            open_call = delta.index
            ids.add(delta.id)
            arguments[delta.index] = ""
        elif isinstance(delta, ToolArgumentsDelta):
            assert delta.index == open_call
            arguments[delta.index] += delta.json_fragment
        else:
            assert isinstance(delta, ToolCallEnd)
            assert delta.index == open_call
            open_call = None
            assert isinstance(json.loads(arguments[delta.index]), dict)
    assert open_call is None
    assert len(ids) == len(arguments)
    assert parser.has_calls == bool(ids)


@given(TEXT.filter(lambda text: "</think>" not in text), st.booleans())
def test_an_unfinished_thought_is_all_reasoning(text, with_tools):
    assert read(text, tools=TOOLS if with_tools else ()) == Reply(reasoning=text)


@given(TEXT.filter(lambda text: not text.lstrip().startswith("<think>")))
def test_without_thinking_and_tools_everything_is_content(text):
    assert read(text, thinking=False, tools=()) == Reply(content=text.lstrip("\r\n"))


@given(TEXT)
def test_only_a_possible_marker_is_held_back(text):
    parser = ReplyParser(thinking=True, tools=())
    shown = ""
    for end, char in enumerate(text, 1):
        shown += "".join(d.text for d in parser.push(char) if isinstance(d, ReasoningDelta))
        if not parser.in_reasoning:
            break
        held = text[:end][len(shown) :]
        assert "\n</think>".startswith(held) or "</think>".startswith(held)


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("thought\n</think>\n\nanswer", Reply(reasoning="thought", content="answer")),
        ("thought</think>answer", Reply(reasoning="thought", content="answer")),
        ("</think>\n\n", Reply()),
        ("a\n\n</think>\n\n\n  b \n", Reply(reasoning="a\n", content="  b \n")),
        ("a</think>b</think>c", Reply(reasoning="a", content="b</think>c")),
        ("see <think> and <tool_call> here\n</think>\n\nx", Reply(
            reasoning="see <think> and <tool_call> here", content="x")),
        (f"quote {CALL} end\n</think>\n\nx", Reply(reasoning=f"quote {CALL} end", content="x")),
        ("cut </thin", Reply(reasoning="cut </thin")),
        (f"t\n</think>\n\n{CALL}", Reply(reasoning="t", tool_calls=(call(0, a=1),))),
        (f"t\n</think>\n\nLook.\n\n{CALL}\n{CALL}\n", Reply(
            reasoning="t", content="Look.", tool_calls=(call(0, a=1), call(1, a=1)))),
        (f"</think>{CALL}{CALL}", Reply(tool_calls=(call(0, a=1), call(1, a=1)))),
        (f"</think>{CALL}\n\nAnd more.", Reply(content="And more.", tool_calls=(call(0, a=1),))),
        (f"</think>Hm.\n{CALL}\nAnd more.", Reply(
            content="Hm.\nAnd more.", tool_calls=(call(0, a=1),))),
        (f"</think>{CALL}</tool_call>\n", Reply(tool_calls=(call(0, a=1),))),
        (f"</think>Done {CALL}\n<tool_call>\n<function=add>\n<parameter=a>\n2", Reply(
            content="Done", tool_calls=(call(0, a=1),))),
        ("</think>a <tool_cal", Reply(content="a <tool_cal")),
        ("</think>a <tool_call>", Reply(content="a")),
        ("</think><tool_call>\n</tool_call>", Reply()),
    ],
)  # fmt: skip
def test_replies(text, reply):
    assert read(text) == reply
    assert read(text, chunks=list(text)) == reply


def test_two_functions_in_one_block_are_two_calls():
    text = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n" + (
        "<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    assert read(text, thinking=False).tool_calls == (call(0, a=1), call(1, a=2))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 1000])
def test_close_and_next_open_in_one_chunk(size):
    text = f"{CALL}{CALL}"
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    assert read(text, thinking=False, chunks=chunks) == Reply(
        tool_calls=(call(0, a=1), call(1, a=1))
    )


def test_without_tools_markers_are_text():
    assert read(f"t</think>{CALL}", tools=()) == Reply(reasoning="t", content=CALL)


def test_not_parallel_keeps_the_first_call():
    reply = read(f"{CALL}{CALL} after", thinking=False, parallel=False)
    assert reply == Reply(content=" after", tool_calls=(call(0, a=1),))


def test_a_reply_that_opens_its_own_thought():
    assert read("\n<think>\nhm\n</think>\n\nyes", thinking=False) == Reply(
        reasoning="hm", content="yes"
    )
    assert read("so <think>", thinking=False) == Reply(content="so <think>")


def test_in_reasoning_follows_the_text():
    parser = ReplyParser(thinking=True)
    parser.push("hm </thi")
    assert parser.in_reasoning
    parser.push("nk>")
    assert not parser.in_reasoning


def test_ids_are_unique_by_default():
    parsers = [ReplyParser(thinking=False, tools=TOOLS) for _ in range(2)]
    ids = {
        delta.id for p in parsers for delta in p.push(CALL * 2) if isinstance(delta, ToolCallStart)
    }
    assert len(ids) == 4


WORD = st.text(alphabet="ab é\n", max_size=8).map(str.strip)


@given(WORD, WORD, st.lists(st.fixed_dictionaries({"a": st.integers(), "s": WORD}), max_size=2))
def test_a_replayed_reply_renders_to_the_text_it_was_read_from(thought, content, arguments):
    rendered = "\n".join(render_call("add", each) for each in arguments)
    gap = "\n\n" if content and rendered else ""
    text = f"{thought}\n</think>\n\n{content}{gap}{rendered}"
    reply = read(text)
    message = Message(
        role="assistant",
        parts=(TextPart(text=reply.content),),
        reasoning=reply.reasoning,
        tool_calls=reply.tool_calls,
    )
    opened = ChatTemplate().render(Conversation(messages=(text_message("user", "q"),))).text
    options = TemplateOptions(add_generation_prompt=False)
    messages = (text_message("user", "q"), message)
    again = ChatTemplate().render(Conversation(messages=messages), options).text
    assert again == f"{opened}{text}<|im_end|>\n"
