"""Odd bodies of /v1/responses and /v1/messages: an answer or a 400 that names something, never a 500.

/openapi.json leaves items, blocks and tools open, so requests made from it do not reach into them.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from api.serving import app_of, request
from civetta.api.messages.blocks import HOSTED as HOSTED_BLOCKS
from civetta.api.responses.items import HOSTED as HOSTED_ITEMS
from fake_engine import FakeEngine

APP = app_of(FakeEngine("Hm.\n</think>\n\nok"))
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.text(max_size=8), st.just("auto")
)
PARTS = ("text", "input_text", "output_text", "input_image", "summary_text", "image", "refusal")
ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "custom_tool_call",
    "function_call_output",
    "item_reference",
)
BLOCKS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result", "document")


def objects(kinds: tuple[str, ...], inner: st.SearchStrategy[Any], *names: str) -> Any:
    """Objects of some type with some of the fields, each of any kind."""
    values = st.one_of(SCALARS, inner)
    return st.fixed_dictionaries(
        {"type": st.sampled_from(kinds)}, optional=dict.fromkeys(names, values)
    )


PART = objects(PARTS, st.just([]), "text", "image_url", "detail", "refusal", "file_id", "odd")
ITEM = objects(
    (*ITEMS, sorted(HOSTED_ITEMS)[0], "unheard-of"),
    st.one_of(st.lists(PART, max_size=2), st.just({}), st.just("{}"), st.just("user")),
    *("role", "content", "summary", "call_id", "name", "arguments", "output", "input", "id"),
)
SOURCE = objects(("base64", "url", "file"), st.just({}), "data", "url", "media_type")
BLOCK = objects(
    (*BLOCKS, sorted(HOSTED_BLOCKS)[0]),
    st.one_of(st.lists(objects(BLOCKS, SOURCE, "text", "source"), max_size=2), SOURCE, st.just({})),
    *("text", "source", "thinking", "signature", "data", "id", "name", "input", "tool_use_id"),
    *("content", "is_error", "cache_control"),
)
TOOL = objects(
    ("function", "namespace", "custom", "web_search"),
    st.one_of(st.just({"type": "object"}), st.just([{"name": "f"}])),
    *("name", "description", "parameters", "input_schema", "tools", "strict"),
)
CHOICE = st.one_of(
    SCALARS,
    st.just("none"),
    objects(
        ("function", "tool", "any", "auto", "none", "allowed_tools"),
        st.just([{"type": "function", "name": "f"}]),
        *("name", "mode", "tools", "disable_parallel_tool_use"),
    ),
)
TURN = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": st.one_of(st.text(max_size=8), st.lists(BLOCK, max_size=3)),
    }
)


def holds(path: str, body: dict[str, Any]) -> None:
    """The reply is an answer, or a 400 with a sentence."""
    reply = request(APP, "POST", path, body={k: v for k, v in body.items() if v is not None})
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["message"]


@settings(max_examples=80, deadline=None)
@given(
    items=st.lists(ITEM, max_size=4),
    tools=st.none() | st.lists(TOOL, max_size=2),
    choice=CHOICE,
    count=st.booleans(),
)
def test_responses(items, tools, choice, count):
    path = "/v1/responses/input_tokens" if count else "/v1/responses"
    holds(path, {"input": items, "tools": tools, "tool_choice": choice})


@settings(max_examples=80, deadline=None)
@given(
    turns=st.lists(TURN, max_size=4),
    system=st.none() | st.text(max_size=8) | st.lists(BLOCK, max_size=2),
    tools=st.none() | st.lists(TOOL, max_size=2),
    choice=CHOICE,
    count=st.booleans(),
)
def test_messages(turns, system, tools, choice, count):
    path = "/v1/messages/count_tokens" if count else "/v1/messages"
    body = {"messages": turns, "system": system, "tools": tools, "tool_choice": choice}
    holds(path, {**body, "max_tokens": 40})
