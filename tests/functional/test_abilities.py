"""What a served model must be able to do, through the openai SDK; held-out items, greedy.

Few items each, so that the suite takes a minute on two cores; training/evaluate_engine.py has the
large counts. Nothing here depends on civetta-nano's own wording, so that other weights can pass.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from training.data.heldout import EvalItem, heldout

if TYPE_CHECKING:
    from asked import Asked

SEED = 11


def items(ability: str, count: int, **more: object) -> list[EvalItem]:
    return heldout(ability, count, seed=SEED, **more)  # type: ignore[arg-type]


def with_eight_tools(count: int) -> list[EvalItem]:
    return [item for item in items("tools", 30) if len(item.tools or ()) == 8][:count]


@pytest.mark.parametrize("number", range(3))
def test_it_adds_and_subtracts(asked: Asked, number: int) -> None:
    item = items("arithmetic", 3)[number]
    assert item.grade(asked.reply(item)), item.messages


def test_it_writes_the_json_object_asked_for(asked: Asked) -> None:
    (item,) = items("json", 1)
    assert item.grade(asked.reply(item)), item.messages


def test_it_copies_a_passage_of_forty_tokens(asked: Asked) -> None:
    (item,) = items("copy", 1)
    assert item.grade(asked.reply(item)), item.messages


def test_it_calls_the_right_tool(asked: Asked) -> None:
    (item,) = items("tools", 1, tokens=700)
    assert item.grade(asked.reply(item)), item.messages


def test_it_calls_the_right_one_of_eight_tools(asked: Asked) -> None:
    (item,) = with_eight_tools(1)
    assert item.grade(asked.reply(item)), item.messages


@pytest.mark.parametrize("tokens", [1024, 2500])
def test_it_finds_a_marked_fact(asked: Asked, tokens: int) -> None:
    """Both lengths are beyond civetta-nano's sparse budget of 256 tokens."""
    (item,) = items("retrieval", 1, tokens=tokens)
    assert item.grade(asked.reply(item)), item.expected


@pytest.mark.parametrize(
    ("question", "word"),
    [("What is the capital of France?", "Paris"), ("What is a cat?", "animal")],
)
def test_it_knows_common_facts(asked: Asked, question: str, word: str) -> None:
    done = asked.send([{"role": "user", "content": question}], max_tokens=60)
    assert word in done.choices[0].message.content


def test_it_tells_a_story_about_the_names_given(asked: Asked) -> None:
    ask = [{"role": "user", "content": "Tell me a story about Emma and Oliver."}]
    done = asked.send(ask, max_tokens=400)
    text = done.choices[0].message.content
    assert done.choices[0].finish_reason == "stop"
    assert {"Emma", "Oliver"} <= set(text.replace(".", " ").replace(",", " ").split())
    assert text.count(".") >= 4


def test_it_thinks_before_the_answer_when_told_to(asked: Asked) -> None:
    item = items("arithmetic", 1, thinking=True)[0]
    reply = asked.reply(item)
    assert reply.reasoning.strip()
    assert "<think>" not in reply.content
    assert item.grade(reply)


def test_it_does_not_think_when_told_not_to(asked: Asked) -> None:
    reply = asked.reply(items("arithmetic", 1)[0])
    assert reply.reasoning == ""
    assert "</think>" not in reply.content


def test_streamed_tokens_add_up_to_the_whole_reply(asked: Asked) -> None:
    (item,) = items("json", 1)
    whole = asked.reply(item).content
    stream = asked.send(item.messages, stream=True, max_tokens=item.max_tokens)
    parts = [c.choices[0].delta.content or "" for c in stream if c.choices]
    assert len(parts) > 3
    assert json.loads("".join(parts)) == json.loads(whole)
