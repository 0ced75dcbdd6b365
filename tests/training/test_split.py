"""No held-out item is trained on: every generator keeps to its side, in every form of an item."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from training.data import arithmetic, definitions, retrieval, stories, tool_pool
from training.data.abilities import ABILITIES
from training.data.curriculum import plan
from training.data.draw import Draw, seeded, split_of
from training.data.encode import encode_text, marks
from training.data.heldout import heldout
from training.data.mixture import build_batch
from training.data.sample import Chat

if TYPE_CHECKING:
    from training.data.draw import Split

SIDES: tuple[Split, ...] = ("train", "heldout")
EVALUATED = 7
"""Seed of the items of training/evaluate_engine.py."""


def draws(count: int, split: Split = "train", **kwargs: object) -> list[Draw]:
    return [Draw(rng=seeded("test", i), split=split, **kwargs) for i in range(count)]  # type: ignore[arg-type]


def chats(ability: str, count: int, split: Split = "train", **kwargs: object) -> list[Chat]:
    made = (ABILITIES[ability](draw) for draw in draws(count, split, **kwargs))
    return [item for item in made if isinstance(item, Chat)]


def test_an_arithmetic_item_and_its_mirror_are_on_one_side() -> None:
    for a in range(10, 100, 7):
        for b in range(10, 100, 9):
            for sign in "+-":
                one, other = arithmetic.Problem(a, sign, b), arithmetic.Problem(b, sign, a)
                assert split_of(one.key) == split_of(other.key)


def test_training_never_draws_a_held_out_problem() -> None:
    for draw in draws(1500):
        problem = arithmetic.problem(draw)
        assert problem.sign == "*" or split_of(problem.key) == "train"
    for draw in draws(300, "heldout", single=True):
        problem = arithmetic.problem(draw)
        assert problem.sign in "+-"
        assert min(problem.a, problem.b) >= 10
        assert split_of(problem.key) == "heldout"


def test_neighbouring_tools_keep_to_their_side() -> None:
    for side in SIDES:
        for draw in draws(200, side):
            other = tool_pool.composed(draw)
            assert split_of(f"tool {tool_pool.neighbour(draw, other).name}") == side


@pytest.mark.parametrize("unusual", [False, True])
def test_composed_tools_of_both_sides_have_no_name_in_common(unusual: bool) -> None:
    train = {tool_pool.composed(draw, unusual=unusual).name for draw in draws(800)}
    held = {tool_pool.composed(draw).name for draw in draws(200, "heldout")}
    assert len(held) > 100
    assert not train & held


def test_made_up_names_of_tools_keep_to_their_side() -> None:
    known = {name for family in tool_pool.families() for name in family.names}
    for side in SIDES:
        made = {tool_pool.unusual_tool(draw).name for draw in draws(400, side)} - known
        assert len(made) > 200
        assert {split_of(f"tool {name}") for name in made} == {side}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("ability", ["tools", "toolbox"])
def test_requests_for_tools_keep_to_their_side(ability: str, side: Split) -> None:
    """Where one call answers a request, the request is the item."""
    seen = 0
    for chat in chats(ability, 60, side, room=2048):
        for asked, called in zip(chat.messages, chat.messages[1:], strict=False):
            if asked["role"] == "user" and len(called.get("tool_calls", ())) == 1:
                assert split_of(f"use {asked['content']}") == side
                seen += 1
    assert seen >= 40


@pytest.mark.parametrize("ability", ["tools", "toolbox"])
def test_no_request_has_two_tools_to_choose_from(ability: str) -> None:
    """Purposes differ by description, or by verb and noun: "delete the taxi" is one tool's."""
    for item in heldout(ability, 60, seed=EVALUATED):
        described = [tool["function"]["description"].split(" with the given")[0].rstrip(".")
                     for tool in item.tools or ()]  # fmt: skip
        assert len({text.removesuffix(" of the user") for text in described}) == len(described)


def test_the_evaluation_declares_eight_tools() -> None:
    assert {len(item.tools or ()) for item in heldout("tools", 40, seed=EVALUATED)} == {8}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("ability", ["vision", "counting", "picking"])
def test_pictures_keep_to_their_side(ability: str, side: Split) -> None:
    for chat in chats(ability, 60, side):
        assert split_of(chat.key) == side


@pytest.mark.parametrize("side", SIDES)
def test_copies_objects_and_questions_keep_to_their_side(side: Split) -> None:
    for chat in chats("copy", 60, side, single=True):
        assert split_of(f"copy {chat.messages[-1]['content']}") == side
    for chat in chats("json", 60, side, single=True, thinking=False):
        made = json.loads(chat.messages[-1]["content"])
        assert split_of(f"json {json.dumps(made)}") == side
    for draw in draws(200, side):
        assert split_of(f"ask {definitions.turn(draw).user}") == side


def test_stories_and_facts_keep_to_their_side() -> None:
    for side in SIDES:
        for draw in draws(60, side):
            story = stories.tell(draw)
            noun = re.sub(r"^an? ", "", story.subject)
            assert split_of(f"story {story.hero} {story.friend} {noun}") == side
            for fact in retrieval.facts(draw, 3):
                assert split_of(f"{fact.owner} {fact.code}") == side


@pytest.mark.parametrize("stage", ["pick", "names"])
def test_no_batch_of_the_last_stages_has_an_item_of_the_evaluation(stage: str) -> None:
    """The evaluation's own requests and pictures against the text and pixels of whole batches."""
    asked = {name: heldout(name, 60, seed=EVALUATED) for name in ("tools", "vision")}
    contents = [str(item.messages[-1]["content"]) for item in asked["tools"]]
    requests = [tuple(encode_text(f"user\n{content}")) for content in contents]
    pictures = {item.images[0].tobytes() for item in asked["vision"]}
    known = marks()
    for number in range(3):
        batch = build_batch(plan(stage, 16384), seed=EVALUATED, index=number)
        assert pictures.isdisjoint(slot.pixels.tobytes() for slot in batch.images)
        turns = {
            tuple(turn)
            for row in batch.ids_BT
            for turn in _turns(row.tolist(), known.turn_start, known.turn_end)
        }
        assert len(turns) > 100
        assert turns.isdisjoint(requests)


def _turns(ids: list[int], start: int, end: int) -> list[list[int]]:
    """What stands between the marks of a message."""
    found, since = [], None
    for place, token in enumerate(ids):
        if token == start:
            since = place + 1
        elif token == end and since is not None:
            found.append(ids[since:place])
            since = None
    return found
