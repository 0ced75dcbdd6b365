from __future__ import annotations

import json

import pytest
from conversations import CONVERSATION
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from civetta.chat.builtin import BuiltinTemplate
from civetta.chat.builtin_text import (
    BUILTIN_TEMPLATE,
    EFFORT_SENTENCES,
    IMAGE_TEXT,
    TOOLS_HEAD,
    TOOLS_TAIL,
    VIDEO_TEXT,
)
from civetta.chat.message import (
    Conversation,
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    ToolSpec,
    VideoPart,
    text_message,
)
from civetta.chat.template import ChatTemplate, Span, TemplateOptions
from civetta.errors import CheckpointMalformed, RequestInvalid, TemplateError

BUILTIN = ChatTemplate()
JINJA = ChatTemplate(BUILTIN_TEMPLATE)
XHIGH = EFFORT_SENTENCES["xhigh"]
OFF = TemplateOptions(enable_thinking=False)
QUIET = TemplateOptions(enable_thinking=False, add_generation_prompt=False)
OPTIONS = st.one_of(
    st.builds(
        TemplateOptions,
        enable_thinking=st.sampled_from([None, True]),
        reasoning_effort=st.sampled_from(
            ["auto", "minimal", "low", "medium", "high", "xhigh", "max"]
        ),
        preserve_thinking=st.sampled_from([None, True, False]),
        add_vision_id=st.booleans(),
        add_generation_prompt=st.booleans(),
    ),
    st.builds(
        TemplateOptions,
        enable_thinking=st.sampled_from([None, False]),
        reasoning_effort=st.just("none"),
        preserve_thinking=st.sampled_from([None, True, False]),
        add_vision_id=st.booleans(),
        add_generation_prompt=st.booleans(),
    ),
)


def talk(*messages: Message, tools: tuple[ToolSpec, ...] = ()) -> Conversation:
    return Conversation(messages=messages, tools=tools)


def user(text: str = "hi") -> Message:
    return text_message("user", text)


def turn(role: str, body: str) -> str:
    return f"<|im_start|>{role}\n{body}<|im_end|>\n"


@given(CONVERSATION, OPTIONS)
def test_jinja_text_and_python_renderer_agree(conversation, options):
    assert JINJA.render(conversation, options) == BUILTIN.render(conversation, options)


@given(CONVERSATION, OPTIONS)
def test_spans_tile_the_text_and_begin_at_turns(conversation, options):
    rendered = BUILTIN.render(conversation, options)
    assert rendered.spans[0].start == 0
    assert rendered.spans[-1].end == len(rendered.text)
    for left, right in zip(rendered.spans, rendered.spans[1:], strict=False):
        assert left.end == right.start
    for span in rendered.spans:
        body = rendered.text[span.start : span.end]
        assert body.startswith(f"<|im_start|>{span.role}\n")
        assert span.role in ("system", "user", "assistant")
    if options.add_generation_prompt:
        assert rendered.opens_thinking is options.thinking
        assert rendered.spans[-1].role == "assistant"


@given(CONVERSATION, OPTIONS)
def test_control_tokens_of_users_are_known_as_literal(conversation, options):
    rendered = BUILTIN.render(conversation, options)
    for start in rendered.literal_starts:
        assert rendered.text[start : start + 2] == "<|"
    genuine = [
        place
        for place in range(len(rendered.text))
        if rendered.text.startswith("<|im_end|>", place) and place not in rendered.literal_starts
    ]
    closed = len(rendered.spans) - options.add_generation_prompt
    assert len(genuine) == closed


@given(CONVERSATION)
def test_equals_what_transformers_makes_of_the_same_template(conversation):
    ours = JINJA.render(conversation, TemplateOptions(add_vision_id=True))
    seen: list[dict[str, object]] = []
    spy = ChatTemplate()
    spy._renderer = type("Spy", (), {"render": lambda self, v: seen.append(dict(v)) or ""})()
    spy.render(conversation, TemplateOptions(add_vision_id=True))
    # transformers marks nothing, so the spied variables are stripped of marks by hand
    text = json.dumps(seen[0], ensure_ascii=True)
    for code in range(0xFDD0, 0xFDF0):
        text = text.replace(f"<\\u{code:04x}|", "<|")
    variables = json.loads(text)
    theirs, _ = render_jinja_template(
        [variables.pop("messages")],
        tools=variables.pop("tools"),
        chat_template=BUILTIN_TEMPLATE,
        **variables,
    )
    assert ours.text == theirs[0]


def test_default_asks_for_xhigh_and_opens_a_thought():
    rendered = BUILTIN.render(talk(user(" hi \n")))
    assert rendered.text == (
        turn("system", XHIGH) + turn("user", "hi") + "<|im_start|>assistant\n<think>\n"
    )
    assert rendered.opens_thinking
    middle = len(turn("system", XHIGH))
    assert rendered.spans == (
        Span(start=0, end=middle, role="system"),
        Span(start=middle, end=middle + len(turn("user", "hi")), role="user"),
        Span(start=middle + len(turn("user", "hi")), end=len(rendered.text), role="assistant"),
    )


def test_thinking_off_closes_the_thought_and_adds_no_system_turn():
    for options in (OFF, TemplateOptions(reasoning_effort="none")):
        rendered = BUILTIN.render(talk(user()), options)
        assert (
            rendered.text == turn("user", "hi") + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        assert not rendered.opens_thinking


@pytest.mark.parametrize(
    ("effort", "level"),
    [("auto", "xhigh"), ("minimal", "low"), ("low", "low"), ("medium", "medium"),
     ("high", "xhigh"), ("xhigh", "xhigh"), ("max", "xhigh")],
)  # fmt: skip
def test_efforts_map_to_the_three_levels(effort, level):
    options = TemplateOptions(reasoning_effort=effort, add_generation_prompt=False)
    sentence = EFFORT_SENTENCES[level]
    expected = (turn("system", sentence) if sentence else "") + turn("user", "hi")
    assert BUILTIN.render(talk(user()), options).text == expected


@pytest.mark.parametrize(
    ("thinking", "effort"), [(False, "low"), (False, "max"), (True, "none"), (None, "turbo")]
)
def test_conflicting_controls_are_refused(thinking, effort):
    with pytest.raises(RequestInvalid) as caught:
        TemplateOptions(enable_thinking=thinking, reasoning_effort=effort)
    assert (caught.value.code, caught.value.param) == ("invalid_reasoning", "reasoning_effort")


def test_what_is_left_to_the_template_is_undefined():
    probe = ChatTemplate(
        "{{ enable_thinking is defined }} {{ reasoning_effort is defined }}"
        " {{ preserve_thinking is defined }} {{ bos_token }}",
        named_tokens={"bos_token": "<b>"},
    )
    assert probe.render(talk(user())).text == "False False False <b>"
    told = TemplateOptions(enable_thinking=True, reasoning_effort="max", preserve_thinking=False)
    assert probe.render(talk(user()), told).text == "True True True <b>"


def test_system_block_with_tools_keeps_key_order_and_non_ascii():
    tool = ToolSpec(
        name="find",
        description="Größe <b>",
        parameters={"type": "object", "properties": {"z": {}, "a": {}}},
    )
    bare = ToolSpec(name="now", strict=True)
    text = BUILTIN.render(talk(text_message("system", "Be kind."), user(), tools=(tool, bare))).text
    line = (
        '{"type": "function", "function": {"name": "find", "description": "Größe <b>",'
        ' "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}}'
    )
    second = '{"type": "function", "function": {"name": "now", "parameters": {}}}'
    body = f"{XHIGH}\n\n{TOOLS_HEAD}\n{line}\n{second}{TOOLS_TAIL}\n\nBe kind."
    assert text.startswith(turn("system", body))


def test_history_keeps_thoughts_by_default_and_drops_old_ones_when_told():
    messages = (
        user("one"),
        text_message("assistant", " first ", reasoning=" why \n"),
        user("two"),
        text_message("assistant", "second", reasoning="because"),
    )
    kept = turn("assistant", "<think>\nwhy\n</think>\n\nfirst")
    last = turn("assistant", "<think>\nbecause\n</think>\n\nsecond")
    text = BUILTIN.render(talk(*messages), QUIET).text
    assert text == turn("user", "one") + kept + turn("user", "two") + last
    forget = TemplateOptions(
        enable_thinking=False, add_generation_prompt=False, preserve_thinking=False
    )
    text = BUILTIN.render(talk(*messages), forget).text
    assert text == turn("user", "one") + turn("assistant", "first") + turn("user", "two") + last


def test_a_turn_without_reasoning_has_an_empty_thought():
    text = BUILTIN.render(talk(user(), text_message("assistant", "yes"), user("and?")), QUIET).text
    assert turn("assistant", "<think>\n\n</think>\n\nyes") in text


def test_tool_cycle_is_rendered_in_the_models_syntax():
    calls = (
        ToolCall(
            id="1", name="add", arguments={"a": 1, "label": "x\ny", "deep": {"k": ["é", None]}}
        ),
        ToolCall(id="2", name="noop", arguments={}),
    )
    results = [
        Message(role="tool", parts=(TextPart(text=" 3 "),), tool_call_id="1"),
        Message(role="tool", parts=(TextPart(text="ok"),), tool_call_id="2"),
    ]
    first = (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=label>\nx\ny\n"
        '</parameter>\n<parameter=deep>\n{"k": ["é", null]}\n</parameter>\n'
        "</function>\n</tool_call>"
    )
    second = "<tool_call>\n<function=noop>\n</function>\n</tool_call>"
    answered = (
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nok\n"
        "</tool_response><|im_end|>\n"
    )
    for content, gap in (("Let me see.", "\n\n"), ("", "")):
        assistant = Message(role="assistant", parts=(TextPart(text=content),), tool_calls=calls)
        text = BUILTIN.render(talk(user(), assistant, *results), QUIET).text
        body = f"<think>\n\n</think>\n\n{content}{gap}{first}\n{second}"
        assert text == turn("user", "hi") + turn("assistant", body) + answered


def test_reasoning_is_replayed_beside_calls_without_content():
    call = ToolCall(id="1", name="f", arguments="{}")
    assistant = Message(role="assistant", reasoning="need f", tool_calls=(call,))
    text = BUILTIN.render(talk(user(), assistant), QUIET).text
    assert "<think>\nneed f\n</think>\n\n<tool_call>\n<function=f>\n</function>" in text


def test_media_are_placeholders_numbered_on_request():
    seen = Message(
        role="user",
        parts=(
            TextPart(text="see "),
            ImagePart(digest="1"),
            VideoPart(digest="2"),
            TextPart(text="?"),
        ),
    )
    again = Message(role="user", parts=(ImagePart(digest="3"),))
    text = BUILTIN.render(talk(seen, again), QUIET).text
    assert text == turn("user", f"see {IMAGE_TEXT}{VIDEO_TEXT}?") + turn("user", IMAGE_TEXT)
    numbered = TemplateOptions(
        enable_thinking=False, add_generation_prompt=False, add_vision_id=True
    )
    text = BUILTIN.render(talk(seen, again), numbered).text
    assert f"see Picture 1: {IMAGE_TEXT}Video 1: {VIDEO_TEXT}?" in text
    assert turn("user", f"Picture 2: {IMAGE_TEXT}") in text


BROKEN = [
    {"messages": []},
    {"messages": [{"role": "system", "content": "x"}]},
    {"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]},
    {"messages": [{"role": "user", "content": "x"}, {"role": "developer", "content": "y"}]},
    {
        "messages": [
            {"role": "system", "content": [{"type": "image"}]},
            {"role": "user", "content": "x"},
        ]
    },
    {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
    {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "high"},
]


@pytest.mark.parametrize("variables", BROKEN)
def test_both_renderers_refuse_the_same_shapes(variables):
    with pytest.raises(TemplateError) as python:
        BuiltinTemplate().render(variables)
    with pytest.raises(TemplateError) as jinja:
        JINJA._renderer.render(variables)
    assert python.value.message in jinja.value.message


def test_no_control_token_of_a_user_survives_joins():
    tricky = talk(
        Message(role="user", parts=(TextPart(text="<"), TextPart(text="|im_end|>"))),
        Message(
            role="assistant",
            tool_calls=(
                ToolCall(id="1", name="<|im_end|", arguments={"<|im_start|": "<|im_end|>"}),
            ),
        ),
        user(),
    )
    rendered = BUILTIN.render(tricky, QUIET)
    assert [span.role for span in rendered.spans] == ["user", "assistant", "user"]
    assert len(rendered.literal_starts) == 4


def test_lone_surrogates_are_refused():
    with pytest.raises(TemplateError, match="surrogate"):
        BUILTIN.render(talk(user("a\ud800b")))


def test_deep_nesting_is_refused_not_a_crash():
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"a": deep}
    for template in (BUILTIN, JINJA):
        with pytest.raises(TemplateError, match="deep"):
            template.render(talk(user(), tools=(ToolSpec(name="f", parameters=deep),)))


def test_templates_are_found_in_files(tmp_path):
    assert ChatTemplate.from_folder(tmp_path).is_builtin
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "list"}]}))
    assert ChatTemplate.from_folder(tmp_path).render(talk(user())).text == "list"
    config.write_text(json.dumps({"chat_template": "config"}))
    assert ChatTemplate.from_folder(tmp_path).source == "config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert ChatTemplate.from_folder(tmp_path).source == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja {{ messages[0].content }}")
    rendered = ChatTemplate.from_folder(tmp_path).render(talk(user()))
    assert rendered.text == "jinja hi"
    assert rendered.spans == (Span(start=0, end=8, role=""),)
    assert ChatTemplate.from_gguf({}).is_builtin
    assert ChatTemplate.from_gguf({"tokenizer.chat_template": "g"}).source == "g"


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]1",
        '{"chat_template": 3}',
        "[" * 50_000,
        '{"chat_template": [{"name": "default", "template": 3}]}',
    ],
)
def test_broken_template_files_are_refused(tmp_path, content):
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(CheckpointMalformed, match="chat_template"):
        ChatTemplate.from_folder(tmp_path)
    with pytest.raises(CheckpointMalformed, match="no text"):
        ChatTemplate.from_gguf({"tokenizer.chat_template": 3})
