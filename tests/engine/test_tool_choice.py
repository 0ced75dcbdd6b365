"""Tools and formats through the chat client, on a model of random weights: it obeys or it fails."""

from __future__ import annotations

import json
from functools import partial

import pytest

from civetta.chat.answer_format import AnswerFormat, ToolChoice
from civetta.chat.message import Conversation, ToolSpec, text_message
from civetta.chat.template import TemplateOptions
from civetta.engine.client import ChatClient, ReplyOptions
from civetta.errors import RequestInvalid
from civetta.model.tiny import write_tiny
from civetta.types import FinishReason, SamplingOverrides
from engine.drafting import Bench

pytestmark = pytest.mark.timeout(120)
GO = ToolSpec(
    name="go",
    parameters={
        "properties": {"where": {"enum": ["up", "down"]}, "far": {"type": "boolean"}},
        "required": ["where"],
    },
)
TOOLS = (GO, ToolSpec(name="stop"), ToolSpec(name="wait"))
ASK = Conversation(messages=(text_message("user", "x"),), tools=TOOLS)
OBJECT = AnswerFormat(
    kind="json_schema",
    schema={"properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "type": "object"},
)
PLAIN = TemplateOptions(enable_thinking=False)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    bench = Bench(write_tiny(tmp_path_factory.mktemp("tiny")))
    with bench.engine(sessions=2, context=1024) as engine:
        yield ChatClient(engine)


def answer(client, seed, conversation=ASK, **options):
    asked = {"max_tokens": 260, "template": PLAIN, **options}
    sampling = SamplingOverrides(seed=seed, temperature=1.0, presence_penalty=0.0)
    return client.generate_sync(
        conversation, ReplyOptions(sampling=sampling, **asked)
    ).result_sync()


@pytest.mark.parametrize("seed", range(4))
def test_case_24_required_calls_are_made_and_fit(client, seed):
    end = answer(client, seed, tool_choice=ToolChoice(mode="required"), parallel_tool_calls=False)
    assert end.finish_reason is FinishReason.TOOL_CALLS
    (call,) = end.tool_calls
    assert end.content == ""
    assert call.name in ("go", "stop", "wait")
    if call.name == "go":
        assert call.mapping["where"] in ("up", "down")
        assert call.mapping.get("far", True) in (True, False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["go", "wait"])
def test_case_24_a_named_call_is_that_call(client, seed, name):
    end = answer(client, seed, tool_choice=ToolChoice(mode="named", name=name))
    assert [call.name for call in end.tool_calls] == [name]


def test_case_24_required_calls_come_behind_the_thought(client):
    options = {"tool_choice": ToolChoice(mode="named", name="stop"), "thinking_budget": 4}
    end = answer(client, 2, template=TemplateOptions(), **options)
    assert [call.name for call in end.tool_calls] == ["stop"]
    assert end.content == ""
    assert 0 < end.usage.reasoning_tokens <= 4 + 4 + 3


def test_case_24_none_offers_no_tools(client):
    prepare = partial(client.prepare, ASK)
    free = prepare(ReplyOptions(template=PLAIN, tool_choice=ToolChoice(mode="none")))
    assert free.request.constraint is None
    assert free.tools == ()
    assert len(free.request.prompt_ids) < len(
        prepare(ReplyOptions(template=PLAIN)).request.prompt_ids
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_format_beside_tools_is_an_answer_or_a_call(client, seed):
    end = answer(client, seed, answer_format=OBJECT, parallel_tool_calls=False)
    if end.tool_calls:
        assert end.content == ""
    else:
        assert json.loads(end.content)["a"] in (1, 2)


def test_a_lark_grammar_leaves_no_room_for_calls(client):
    form = AnswerFormat(kind="lark", text='start: "a"', param="response_format.lark")
    with pytest.raises(RequestInvalid) as caught:
        answer(client, 1, answer_format=form)
    assert caught.value.param == "response_format.lark"
    none = {"tool_choice": ToolChoice(mode="none"), "answer_format": form}
    assert answer(client, 1, **none).content == "a"


def test_choices_of_one_prompt_are_the_replies_of_their_seeds(client):
    import asyncio

    options = ReplyOptions(
        sampling=SamplingOverrides(seed=5, temperature=1.0), template=PLAIN, max_tokens=12,
        tool_choice=ToolChoice(mode="none"),
    )  # fmt: skip
    streams = asyncio.run(client.generate_choices(ASK, options, 3))
    together = [stream.result_sync().content for stream in streams]
    alone = [
        client.generate_sync(
            ASK,
            ReplyOptions(
                sampling=SamplingOverrides(seed=seed, temperature=1.0),
                template=PLAIN,
                max_tokens=12,
                tool_choice=ToolChoice(mode="none"),
            ),
        )
        .result_sync()
        .content
        for seed in (5, 6, 7)
    ]
    assert together == alone
    assert len(set(together)) == 3
