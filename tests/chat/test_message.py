from __future__ import annotations

import pytest
from conversations import CONVERSATION
from hypothesis import given

from civetta.chat.message import (
    Conversation,
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    ToolSpec,
    VideoPart,
    last_query_index,
    normalise,
    parse_json_object,
    text_message,
)
from civetta.errors import RequestInvalid

USER = text_message("user", "hi")


def refused(messages=(USER,), tools=()):
    with pytest.raises(RequestInvalid) as caught:
        normalise(Conversation(messages=tuple(messages), tools=tuple(tools)))
    return caught.value.code, caught.value.param


@given(CONVERSATION)
def test_normalise_is_idempotent_and_leaves_one_leading_system_message(conversation):
    once = normalise(conversation)
    assert normalise(once) == once
    roles = [message.role for message in once.messages]
    assert "developer" not in roles
    assert "system" not in roles[1:]
    others = [m for m in conversation.messages if m.role not in ("system", "developer")]
    assert list(once.messages)[-len(others) :] == others


def test_system_and_developer_messages_fold_in_order():
    conversation = Conversation(
        messages=(
            text_message("system", " one \n"),
            USER,
            text_message("developer", "two"),
            text_message("system", "  "),
            text_message("assistant", "yes"),
            Message(role="system", parts=(TextPart(text="thr"), TextPart(text="ee"))),
        )
    )
    folded = normalise(conversation).messages
    assert folded[0] == text_message("system", "one\n\ntwo\n\nthree")
    assert [m.role for m in folded] == ["system", "user", "assistant"]


def test_blank_system_messages_vanish():
    assert normalise(Conversation(messages=(text_message("system", " \n"), USER))).messages == (
        USER,
    )


def test_tool_arguments_are_parsed_in_order():
    call = ToolCall(id="1", name="f", arguments='{"b": [1, null], "a": "é"}')
    blank = ToolCall(id="2", name="g", arguments="")
    assistant = Message(role="assistant", tool_calls=(call, blank))
    calls = normalise(Conversation(messages=(USER, assistant))).messages[1].tool_calls
    assert list(calls[0].mapping.items()) == [("b", [1, None]), ("a", "é")]
    assert calls[1].mapping == {}


@pytest.mark.parametrize("text", ["{", "[1]", "3", "null", '{"a": NaN}', "{'a': 1}", "[" * 100_000])
def test_bad_tool_arguments_name_the_field(text):
    call = ToolCall(id="1", name="f", arguments=text)
    code, param = refused([USER, Message(role="assistant", tool_calls=(call,))])
    assert (code, param) == ("invalid_messages", "messages[1].tool_calls[0].arguments")


def test_parse_json_object_keeps_values():
    assert parse_json_object(' {"a": 1} ', "x") == {"a": 1}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [text_message("system", "only")],
        [text_message("assistant", "a"), Message(role="tool", parts=(TextPart(text="t"),))],
        [text_message("user", "\n<tool_response>\nx\n</tool_response> ")],
    ],
)
def test_without_user_query_it_is_a_clean_refusal(messages):
    assert refused(messages) == ("invalid_messages", "messages")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Message(role="system", parts=(ImagePart(digest="d"),)), "content"),
        (Message(role="developer", parts=(VideoPart(digest="d"),)), "content"),
        (Message(role="robot", parts=()), "role"),
        (Message(role="user", tool_calls=(ToolCall(id="1", name="f"),)), "tool_calls"),
        (Message(role="tool", reasoning="r"), "reasoning"),
    ],
)
def test_misplaced_things_are_refused_by_name(message, field):
    assert refused([USER, message]) == ("invalid_messages", f"messages[1].{field}")


@pytest.mark.parametrize("name", ["", "a b", "a<b", "a>b", 'a"b', "a\\b", "é", "a\n", "x" * 65])
def test_bad_tool_names_are_refused(name):
    assert refused(tools=[ToolSpec(name=name)]) == ("invalid_tools", "tools[0].name")


def test_repeated_tools_and_odd_parameters_are_refused():
    twice = [ToolSpec(name="f"), ToolSpec(name="f")]
    assert refused(tools=twice) == ("invalid_tools", "tools[1].name")
    listed = ToolSpec(name="f", parameters=[])
    assert refused(tools=[listed]) == ("invalid_tools", "tools[0].parameters")


def test_last_query_skips_tool_responses_and_sees_images():
    response = text_message("user", "<tool_response>\n1\n</tool_response>")
    image = Message(role="user", parts=(ImagePart(digest="d"),))
    framed = Message(
        role="user",
        parts=(
            TextPart(text="<tool_response>"),
            ImagePart(digest="d"),
            TextPart(text="</tool_response>"),
        ),
    )
    assert last_query_index([USER, response]) == 0
    assert last_query_index([USER, response, image]) == 2
    assert last_query_index([USER, framed]) == 0
    assert last_query_index([response]) is None


def test_parts_are_read_apart():
    message = Message(
        role="user", parts=(TextPart(text="a"), ImagePart(digest="d"), TextPart(text="b"))
    )
    assert message.text == "ab"
    assert message.media == (ImagePart(digest="d"),)
    assert Conversation(messages=(message, USER)).media == message.media
