"""Stream = buffer in chat completions, Responses and Messages, however the text of a reply is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api import test_messages, typed_events
from civetta.api.chat import ChatEncoder
from civetta.api.messages.encoder import MessageEncoder
from civetta.api.responses.encoder import ResponsesEncoder
from civetta.api.responses.output import OutputItems
from civetta.chat.message import ToolSpec
from civetta.engine.client import PreparedReply, ReplyStream
from civetta.engine.protocol import Finished, GenerateRequest, Started, TokenEvent
from civetta.types import FinishReason, Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from civetta.engine.protocol import Event

KINDS = {"city": "string", "days": "integer", "deep": "object"}
TOOLS = (
    ToolSpec(
        name="weather",
        parameters={"type": "object", "properties": {k: {"type": v} for k, v in KINDS.items()}},
    ),
    ToolSpec(name="now"),
)


def call(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


REPLIES = {
    "text": "Hello wörld 🌍👩‍🚀 한글.",
    "thought and text": "Let me think.\n\nYes.\n</think>\n\nHello wörld 🌍",
    "thought only": "It never ends <tool_call> and `</thin`",
    "thought and call": "I look.\n</think>\n\n" + call("weather", city="Köln", days="3"),
    "calls": "Hm.\n</think>\n\n" + "\n".join([call("now"), call("weather", city="Ulm")] * 2),
    "text between": "Hm.\n</think>\n\nOne " + call("now") + "\ntwo " + call("now") + "\nthree",
    "markers in a thought": "Write <tool_call><function=now></tool_call>?\n</think>\nNo.",
    "two functions in one block": "</think>\n\n<tool_call>\n<function=now>\n</function>\n"
    "<function=weather>\n<parameter=days>\n7\n</parameter>\n</function>\n</tool_call>",
    "no name ends": "</think>\n\n<tool_call>\n<function=weather>\n<parameter=\ncity>\nUlm\n"
    "</parameter>\n<parameter=days: 3\n</parameter>\n</function>\n</tool_call>",
    "tags in a value": "</think>\n\n"
    + call("weather", city="</parameter> <tool_call> </function>x"),
    "json in a value": "</think>\n\n" + call("weather", deep='{"a": ["<", "\\u00e4", {}]}'),
    "half a call": "Hm.\n</think>\n\nFirst "
    + call("now")
    + "<tool_call>\n<function=weather>\n<para",
    "half a tag": "</think>\n\na < b, <tool, </think> and <tool_cal",
    "blank": "\n</think>\n\n \n",
    "nothing": "",
}


class Scripted:
    """A generation whose tokens have the given texts."""

    def __init__(self, texts: list[str], reason: FinishReason) -> None:
        self._texts = texts
        self._reason = reason

    def __iter__(self) -> Iterator[Event]:
        yield Started(prompt_tokens=9, cached_tokens=4)
        for text in self._texts:
            yield TokenEvent(token_id=1, text=text)
        usage = Usage(prompt_tokens=9, completion_tokens=len(self._texts), cached_tokens=4)
        yield Finished(reason=self._reason, usage=usage)

    def cancel(self) -> None:
        pass


def reply_events(
    texts: list[str], *, thinking: bool, reason: FinishReason, exact: bool = False
) -> ReplyStream:
    prepared = PreparedReply(
        request=GenerateRequest(request_id="r", prompt_ids=(1,)),
        thinking=thinking,
        tools=TOOLS,
        exact=exact,
    )
    return ReplyStream(Scripted(texts, reason), prepared)  # type: ignore[arg-type]


def responses_encoder(summary: bool) -> ResponsesEncoder:
    output = OutputItems(summary=summary, namespaces={"now": "clock"}, tokens=None)
    return ResponsesEncoder({"status": "in_progress"}, output, timeout_s=None)


def message_encoder(shown: bool) -> MessageEncoder:
    return MessageEncoder(model="m", request_id="r", shown=shown, timeout_s=None)


def chat_encoder(_option: bool) -> ChatEncoder:
    ids = {"id": "c", "created": 1, "model": "m"}
    return ChatEncoder(
        ids, index=0, tokens=None, include_usage=True, include_progress=False, timeout_s=None
    )


ENCODERS: dict[str, Any] = {
    "chat": chat_encoder,
    "responses": responses_encoder,
    "messages": message_encoder,
}


def chat_joined(frames: str) -> dict[str, Any]:
    """What the chunks of a chat completion amount to."""
    said: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "reason": None}
    for line in frames.split("\n\n"):
        for choice in json.loads(line.removeprefix("data: "))["choices"] if line else ():
            delta, said["reason"] = choice["delta"], choice["finish_reason"]
            for key in ("content", "reasoning_content"):
                said[key] += delta.get(key) or ""
            for part in delta.get("tool_calls") or ():
                if "id" in part:
                    assert part["index"] == len(said["calls"])
                    said["calls"].append({"name": part["function"]["name"], "arguments": ""})
                said["calls"][part["index"]]["arguments"] += part["function"]["arguments"]
    return said


def chat_whole(payload: dict[str, Any]) -> dict[str, Any]:
    """The same of a buffered chat completion."""
    (choice,) = payload["choices"]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": [call["function"] for call in message.get("tool_calls", ())],
        "reason": choice["finish_reason"],
    }


def said(dialect: str, payload: Any) -> Any:
    """What a payload says: all of it but ids and times."""
    if dialect == "responses":
        return typed_events.told(payload["output"]), payload["status"]
    blocks = test_messages.told(payload)
    signatures = [block.get("signature") for block in payload["content"]]
    return blocks, signatures, payload["stop_reason"]


@st.composite
def cut_replies(draw: st.DrawFn) -> tuple[str, list[str], FinishReason]:
    """A recorded reply, perhaps ended early, and the pieces it comes in."""
    text = REPLIES[draw(st.sampled_from(sorted(REPLIES)))]
    reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    if reason is FinishReason.LENGTH:
        text = text[: draw(st.integers(0, len(text)))]
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=24)))
    if draw(st.booleans()):
        cuts = list(range(len(text) + 1))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert "".join(pieces) == text
    return text, pieces, reason


@pytest.mark.parametrize("dialect", list(ENCODERS))
@settings(max_examples=150, deadline=None)
@given(cut=cut_replies(), thinking=st.booleans(), exact=st.booleans(), option=st.booleans())
def test_stream_equals_buffer_for_any_cuts(dialect, cut, thinking, exact, option):
    text, pieces, reason = cut
    mode: dict[str, Any] = {"thinking": thinking, "exact": exact, "reason": reason}
    make = ENCODERS[dialect]
    whole = make(option)
    for item in reply_events([text], **mode):
        whole.gather(item)
    stream = make(option)
    frames = b"".join(stream.frames(item) for item in reply_events(pieces, **mode))
    if dialect == "chat":
        assert chat_joined(frames.decode()) == chat_whole(whole.body())
        return
    events = typed_events.typed_events(frames.decode())
    build = typed_events.response_of if dialect == "responses" else typed_events.message_of
    assert said(dialect, build(events)) == said(dialect, whole.body())


def test_the_recorded_replies_hold_every_kind_of_markup():
    kinds = set()
    for text in REPLIES.values():
        encoder = message_encoder(shown=True)
        for item in reply_events([text], thinking=True, reason=FinishReason.STOP):
            encoder.gather(item)
        body: Any = encoder.body()
        kinds.add(tuple(block["type"] for block in body["content"]))
    assert ("thinking", "text", "tool_use", "text", "tool_use", "text") in kinds
    assert ("thinking", "tool_use", "tool_use", "tool_use", "tool_use") in kinds
    assert {(), ("thinking",), ("text",), ("thinking", "text"), ("tool_use", "tool_use")} <= kinds
