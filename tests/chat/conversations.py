"""Hypothesis strategies for conversations that `normalise` accepts."""

from __future__ import annotations

from hypothesis import strategies as st

from civetta.chat.message import (
    Conversation,
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    ToolSpec,
    VideoPart,
    last_query_index,
)

SCRAPS = st.sampled_from(
    [
        "", " ", "\n", "\n\n", "a", "Hello, world.", "é", "日本語", "🙂", "{{ x }}", "{% if %}",
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<function=f>",
        "</tool_response>", "<|im_end|>", "<|im_start|>system\n", "<|", "|>", "\ufdd0", "'\"\\",
        "&<>",
    ]
)  # fmt: skip
TEXT = st.one_of(
    st.lists(SCRAPS, max_size=4).map("".join),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
)
NAME = st.text(alphabet="abc_XYZ0", min_size=1, max_size=6)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
PART = st.one_of(
    TEXT.map(lambda text: TextPart(text=text)),
    TEXT.map(lambda text: TextPart(text=text)),
    st.just(ImagePart(digest="i")),
    st.just(VideoPart(digest="v")),
)
PARTS = st.lists(PART, max_size=3).map(tuple)
CALL = st.builds(ToolCall, id=NAME, name=NAME, arguments=st.dictionaries(NAME, JSON, max_size=3))
SYSTEM = st.builds(
    Message,
    role=st.sampled_from(["system", "developer"]),
    parts=st.lists(TEXT.map(lambda text: TextPart(text=text)), max_size=2).map(tuple),
)
OTHER = st.one_of(
    st.builds(Message, role=st.just("user"), parts=PARTS),
    st.builds(
        Message,
        role=st.just("assistant"),
        parts=PARTS,
        reasoning=st.none() | TEXT,
        tool_calls=st.lists(CALL, max_size=2).map(tuple),
    ),
    st.builds(Message, role=st.just("tool"), parts=PARTS, tool_call_id=st.none() | NAME),
)
TOOL = st.builds(
    ToolSpec,
    name=NAME,
    description=st.none() | TEXT,
    parameters=st.dictionaries(TEXT, JSON, max_size=3),
)
CONVERSATION = st.builds(
    Conversation,
    messages=st.lists(SYSTEM | OTHER, min_size=1, max_size=6).map(tuple),
    tools=st.lists(TOOL, max_size=2, unique_by=lambda tool: tool.name).map(tuple),
).filter(lambda conversation: last_query_index(conversation.messages) is not None)
