"""The training data: the split, the encoding, the batches, the graders, the tokenizer."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from math import hypot

import numpy as np
import pytest
from training.data import arithmetic, lexicon, scenes, stories, tool_pool
from training.data.abilities import ABILITIES
from training.data.curriculum import Plan, Shape, plan
from training.data.draw import Draw, seeded
from training.data.encode import FOLDER, encode, encode_text, marks
from training.data.graders import Call, Reply, parse_reply
from training.data.heldout import EvalItem, heldout, heldout_text
from training.data.mixture import build_batch, stream
from training.data.render import render_messages, render_text
from training.data.sample import Chat, Document
from training.tokenizer import train as tokenizer_training

from civetta.chat.builtin import render_call
from civetta.chat.message import (
    Conversation,
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    ToolSpec,
)
from civetta.chat.template import ChatTemplate, TemplateOptions
from civetta.chat.tokenizer import Tokenizer

SMALL = Plan(shapes=(Shape(seq_len=512, rows=4), Shape(seq_len=1024, rows=2)))


def draws(count: int, **kwargs: object) -> list[Draw]:
    return [Draw(rng=seeded("test", index), **kwargs) for index in range(count)]  # type: ignore[arg-type]


def chats(ability: str, count: int, **kwargs: object) -> list[Chat]:
    made = (ABILITIES[ability](draw) for draw in draws(count, **kwargs))
    return [item for item in made if isinstance(item, Chat)]


# --- encoding


@pytest.mark.parametrize("ability", ABILITIES)
@pytest.mark.parametrize("thinking", [False, True])
def test_training_text_is_prompt_and_reply_as_served(ability: str, thinking: bool) -> None:
    for chat in chats(ability, 12, single=True, thinking=thinking):
        prompt = render_messages(
            chat.messages[:-1], chat.tools, enable_thinking=thinking, generation=True
        )
        full = render_text(chat)
        assert full.startswith(prompt)
        prompt_ids, full_ids = encode_text(prompt), encode_text(full)
        assert full_ids[: len(prompt_ids)] == prompt_ids
        sample = encode(chat)
        learned = sample.ids[sample.weight == 1.0].tolist()
        reply_ids = full_ids[len(prompt_ids) :]
        assert learned == reply_ids[: reply_ids.index(marks().turn_end) + 1]
        assert sample.ids[-1] == marks().end_of_text


@pytest.mark.parametrize("ability", ABILITIES)
def test_every_reply_of_a_long_conversation_carries_loss(ability: str) -> None:
    for chat in chats(ability, 25, room=1024):
        sample = encode(chat, context_weight=0.25)
        replies = sum(message["role"] == "assistant" for message in chat.messages)
        learned = sample.ids[sample.weight == 1.0]
        assert int(np.sum(learned == marks().turn_end)) == replies
        given = sample.weight[(sample.weight != 1.0) & (sample.weight != 0.0)]
        assert np.all(given == 0.25)
        assert sample.weight[0] == 0.0


def conversation_of(chat: Chat) -> Conversation:
    """The same conversation in the server's own types."""
    messages = []
    for index, message in enumerate(chat.messages):
        content = message["content"]
        parts: list[TextPart | ImagePart] = []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "image":
                parts.append(ImagePart(digest="0"))
            else:
                parts.append(TextPart(text=part["text"]))
        calls = tuple(
            ToolCall(
                id=f"call_{index}_{number}",
                name=call["function"]["name"],
                arguments=json.dumps(call["function"]["arguments"]),
            )
            for number, call in enumerate(message.get("tool_calls", ()))
        )
        messages.append(
            Message(
                role=message["role"],
                parts=tuple(parts),
                reasoning=message.get("reasoning_content"),
                tool_calls=calls,
            )
        )
    tools = tuple(ToolSpec(**tool["function"]) for tool in chat.tools or ())
    return Conversation(messages=tuple(messages), tools=tools)


@pytest.mark.parametrize("ability", ABILITIES)
def test_the_server_renders_and_tokenizes_the_same(ability: str) -> None:
    template, tokenizer = ChatTemplate(), Tokenizer.from_folder(FOLDER)
    for chat in chats(ability, 15, room=1024):
        options = TemplateOptions(
            enable_thinking=chat.enable_thinking,
            reasoning_effort=chat.effort or "auto",
            add_generation_prompt=False,
        )
        rendered = template.render(conversation_of(chat), options)
        text = render_text(chat)
        assert rendered.text == text
        assert not rendered.literal_starts
        assert list(tokenizer.encode(text)) == encode_text(text)


def test_image_placeholders_stand_where_the_slots_say() -> None:
    seen = set()
    for chat in chats("vision", 30):
        sample = encode(chat, context_weight=0.5)
        ((start, pixels),) = sample.images
        count = (pixels.shape[0] // 32) * (pixels.shape[1] // 32)
        seen.add(count)
        run = slice(start, start + count)
        assert np.all(sample.ids[run] == marks().image)
        assert int(np.sum(sample.ids == marks().image)) == count
        assert np.all(sample.weight[run] == 0.0)
        assert pixels.dtype == np.uint8
    assert seen == {16, 64}


def test_a_document_ends_with_end_of_text_and_learns_it() -> None:
    sample = encode(Document(ability="stories", key="", text="A cat sat."))
    assert sample.ids[-1] == marks().end_of_text
    assert sample.weight.tolist() == [0.0, *[1.0] * (len(sample.ids) - 1)]


# --- generators


@pytest.mark.parametrize("tokens", [256, 1000, 4000, 12000])
def test_retrieval_prompts_have_the_length_asked_for(tokens: int) -> None:
    depths = []
    for item in heldout("retrieval", 4, tokens=tokens):
        length = len(encode_text(item.prompt))
        assert abs(length - tokens) < 110
        place = item.prompt.index(str(item.expected))
        depths.append(place / len(item.prompt))
        assert item.prompt.count(str(item.expected)) == 1
    assert max(depths) - min(depths) > 0.05


def test_traces_reach_the_answer() -> None:
    for draw in draws(400):
        problem = arithmetic.problem(draw)
        trace = arithmetic.trace(problem)
        numbers = re.findall(r"-?\d+", trace)
        assert numbers[-1] == str(problem.result)
        for a, sign, b, result in re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", trace):
            # Sums of three end with a carry or borrow; only their last two numbers are seen here.
            if f"{a} {sign} {b} {sign}" not in trace and f"- {a} -" not in trace:
                expected = int(a) + int(b) if sign == "+" else int(a) - int(b)
                assert f"+ {a} + {b}" in trace or expected == int(result)


def test_copies_for_the_evaluation_have_about_forty_tokens() -> None:
    for item in heldout("copy", 60):
        assert 32 <= len(encode_text(str(item.expected))) <= 42
        assert str(item.expected) in item.prompt


def test_shapes_do_not_touch_and_show_their_colour() -> None:
    for index, draw in enumerate(draws(40)):
        scene = scenes.scene(draw, 1 + index % 6, 128)
        assert len(scene.shapes) == 1 + index % 6
        assert all(one.x <= other.x for one, other in pairwise(scene.shapes))
        pixels = scenes.render(draw, scene).astype(int)
        for number, shape in enumerate(scene.shapes):
            for other in scene.shapes[:number]:
                gap = hypot(shape.x - other.x, shape.y - other.y) - shape.radius - other.radius
                assert gap > 2
            shown = pixels[round(shape.y), round(shape.x)]
            assert np.max(np.abs(shown - scenes.COLOURS[shape.colour])) <= 30


@pytest.mark.parametrize("ability", ["tools", "toolbox"])
def test_called_tools_are_declared_and_their_arguments_fit_the_schema(ability: str) -> None:
    types = {"string": str, "integer": int, "number": float, "boolean": bool}
    most = 0
    for chat in chats(ability, 80, room=1600):
        assert chat.tools is not None
        functions = {tool["function"]["name"]: tool["function"] for tool in chat.tools}
        assert len(functions) == len(chat.tools)
        most = max(most, len(functions))
        for message in chat.messages:
            for call in message.get("tool_calls", ()):
                schema = functions[call["function"]["name"]]["parameters"]
                arguments = call["function"]["arguments"]
                assert set(schema["required"]) <= set(arguments)
                for name, value in arguments.items():
                    field = schema["properties"][name]
                    assert type(value) is types[field["type"]]
                    assert value in field.get("enum", [value])
    assert most == 8


def test_arguments_can_be_copied_from_the_request() -> None:
    for item in heldout("tools", 60):
        request = item.messages[-1]["content"]
        for call in item.expected:
            for _, value in call.arguments:
                assert value in request


def test_every_plot_and_slot_of_the_story_grammar_can_be_told() -> None:
    rules = stories.grammar()
    assert len(rules.plots) >= 10
    assert set(rules.parts) == {"opening", "setting", "ending"}
    filled = stories.slots(draws(1)[0])
    beats = [*rules.parts.values(), *(beat for plot in rules.plots for beat in plot)]
    for line in (line for beat in beats for line in beat):
        told = line.format_map(filled)
        assert told
        assert "{" not in told


def test_a_story_about_two_people_names_both() -> None:
    pairs = 0
    for chat in (*chats("stories", 300), *chats("stories", 300, single=True)):
        request, story = (str(message["content"]) for message in chat.messages[-2:])
        asked = re.search(r"about (\w+) and (\w+)[.?]$", request)
        if asked:
            pairs += 1
            assert set(asked.groups()) <= set(re.findall(r"\w+", story))
    assert pairs > 60


def test_an_asked_name_counts_whatever_mark_ends_the_request() -> None:
    items = heldout("stories", 200, seed=7)
    ends = {item.messages[-1]["content"][-1] for item in items if len(item.expected) == 2}
    assert ends == {".", "?"}


def test_neighbouring_tools_share_one_word() -> None:
    for draw in draws(100):
        one = tool_pool.composed(draw)
        other = tool_pool.neighbour(draw, one)
        words = [tool.family.requests[0].split(" ") for tool in (one, other)]
        assert sum(a == b for a, b in zip(*words, strict=True)) == 1
    reminder = next(x for x in tool_pool.families() if "create_reminder" in x.names)
    beside = [tool_pool.neighbour(draw, tool_pool.declare(draw, reminder)) for draw in draws(60)]
    assert {x.family.requests[0].split(" ")[0] for x in beside} == {"add", "create", "set"}


def test_word_lists_have_no_doubles() -> None:
    assert len(set(lexicon.words())) == len(lexicon.words())
    assert len(set(lexicon.first_names())) == len(lexicon.first_names())
    words = [row[0] for row in lexicon.rows("definitions")]
    assert len(set(words)) == len(words)
    assert len(words) > 300


# --- held-out items and graders


def gold(item: EvalItem) -> str:
    """The raw reply that a perfect model would give."""
    expected = item.expected
    if item.ability in ("tools", "toolbox"):
        body = "\n".join(render_call(call.name, dict(call.arguments)) for call in expected)
    elif item.ability == "json":
        body = json.dumps(expected)
    elif item.ability == "stories":
        body = f"{' '.join(expected)} sat. They ran. They ate. They slept. The end."
    elif item.ability == "chat":
        body = expected[0]
    else:
        body = str(expected)
    thought = "I think.\n</think>\n\n" if item.enable_thinking else ""
    return f"{thought}{body}<|im_end|>"


@pytest.mark.parametrize("ability", ABILITIES)
@pytest.mark.parametrize("thinking", [False, True])
def test_graders_take_the_right_answer_only(ability: str, thinking: bool) -> None:
    items = heldout(ability, 8, thinking=thinking)
    for item in items:
        assert item.enable_thinking is thinking
        assert item.grade_text(gold(item))
        assert not item.grade_text("")
        for other in items:
            if other.expected != item.expected and other.expected:
                assert not item.grade_text(gold(other)) or ability == "stories"
        if thinking:
            assert not item.grade_text(gold(item).replace("</think>", ""))


def test_held_out_items_are_reproducible_and_differ() -> None:
    for ability in ABILITIES:
        one, other = heldout(ability, 5), heldout(ability, 5)
        assert [item.prompt for item in one] == [item.prompt for item in other]
    assert len({item.prompt for item in heldout("json", 30)}) == 30
    assert heldout("copy", 2, seed=1)[0].prompt != heldout("copy", 2)[0].prompt
    assert heldout_text(3) == heldout_text(3)
    assert len(set(heldout_text(20))) == 20


def test_a_reply_is_taken_apart() -> None:
    text = (
        "I call it.\n</think>\n\nWait.\n\n<tool_call>\n<function=add>\n<parameter=a>\n3\n"
        "</parameter>\n<parameter=note>\ntwo\nlines\n</parameter>\n</function>\n</tool_call><|im_end|>\nrest"
    )
    reply = parse_reply(text, thinking=True)
    assert reply.reasoning == "I call it."
    assert reply.content == "Wait."
    assert reply.calls == (Call.of("add", {"note": "two\nlines", "a": 3}),)
    assert parse_reply("never closed", thinking=True).content == ""


@pytest.mark.parametrize(
    ("ability", "expected", "content", "right"),
    [
        ("arithmetic", "42", "17 + 25 = 42.", True),
        ("arithmetic", "42", "142", False),
        ("arithmetic", "-8", "8", False),
        ("retrieval", "4821", "The code is 4821.", True),
        ("retrieval", "4821", "48213", False),
        ("vision", "red", "The circle is red.", True),
        ("vision", "red", "red or blue", False),
        ("vision", "3", "4", False),
        ("json", {"a": 1}, '{"a": 1}', True),
        ("json", {"a": 1}, '{"a": "1"}', False),
        ("json", {"a": True}, '{"a": 1}', False),
        ("json", {"a": 1}, '{"a": 1} done', False),
        ("copy", "One two.", "One two", False),
        ("definitions", "A cat is small.", "a cat is small", True),
    ],
)
def test_graders_on_near_misses(ability: str, expected: object, content: str, right: bool) -> None:
    item = EvalItem(
        ability=ability,
        index=0,
        messages=[],
        tools=None,
        enable_thinking=False,
        images=(),
        expected=expected,
        max_tokens=8,
    )
    assert item.grade(Reply(content=content)) is right


# --- batches


def same_batches(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return one == other


def test_a_batch_is_a_function_of_plan_seed_and_number() -> None:
    one, other = build_batch(SMALL, 3, 7), build_batch(SMALL, 3, 7)
    for name in ("ids_BT", "weight_BT", "segment_BT", "tokens"):
        assert same_batches(getattr(one, name), getattr(other, name))
    assert [slot.start for slot in one.images] == [slot.start for slot in other.images]
    assert not np.array_equal(one.ids_BT, build_batch(SMALL, 4, 7).ids_BT[: len(one.ids_BT)])


def test_rows_are_whole_samples_then_padding() -> None:
    for batch in stream(SMALL, stop=4):
        assert batch.ids_BT.dtype == np.int32
        assert batch.ids_BT.shape in {(4, 512), (2, 1024)}
        end = marks().end_of_text
        for ids, weight, segment in zip(
            batch.ids_BT, batch.weight_BT, batch.segment_BT, strict=True
        ):
            used = int(np.sum(segment >= 0))
            assert used > 0.7 * len(ids)
            assert np.all(segment[used:] == -1)
            assert np.all(ids[used:] == end)
            assert np.all(weight[used:] == 0.0)
            starts = np.flatnonzero(np.diff(segment[:used], prepend=-1))
            assert np.all(weight[starts] == 0.0)
            assert np.all(np.diff(segment[:used]) >= 0)
            lasts = [*(starts[1:] - 1), used - 1]
            assert np.flatnonzero(ids[:used] == end).tolist() == lasts
        assert sum(batch.tokens.values()) == int(np.sum(batch.segment_BT >= 0))
        for slot in batch.images:
            count = slot.pixels.shape[0] * slot.pixels.shape[1] // 1024
            run = batch.ids_BT[slot.row, slot.start : slot.start + count]
            assert np.all(run == marks().image)


def test_workers_give_the_same_batches_in_the_same_order() -> None:
    alone = list(stream(SMALL, seed=5, start=2, stop=6))
    shared = list(stream(SMALL, seed=5, start=2, stop=6, workers=2))
    assert [batch.index for batch in shared] == [2, 3, 4, 5]
    for one, other in zip(alone, shared, strict=True):
        assert np.array_equal(one.ids_BT, other.ids_BT)
        assert np.array_equal(one.weight_BT, other.weight_BT)


LATE = {"counting", "picking", "toolbox"}
SPECIAL = {"count": {"counting"}, "pick": LATE, "names": LATE}
"""Abilities that only late stages train."""


@pytest.mark.parametrize(
    "phase", ["start", "main", "long", "both", "count", "pick", "names", "draft"]
)
def test_plans_know_every_ability_and_share_everything(phase: str) -> None:
    made = plan(phase)
    usual = set(ABILITIES) - set.union(*SPECIAL.values())
    special = set()
    for shape in made.shapes:
        shares = made.shares_at(shape.seq_len)
        assert usual <= set(shares)
        special |= set(shares) - usual
        assert abs(sum(shares.values()) - 1) < 1e-9
        assert shape.tokens == 65536
    assert special == SPECIAL.get(phase, set())


def test_tokens_follow_the_shares() -> None:
    made = Plan(shapes=(Shape(seq_len=1024, rows=48),))
    batch = build_batch(made, 0, 0)
    total = sum(batch.tokens.values())
    for name, share in made.shares_at(1024).items():
        assert abs(batch.tokens[name] / total - share) < 0.05


# --- the tokenizer


def test_the_saved_tokenizer_has_the_form_of_the_real_one() -> None:
    saved = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    assert saved["normalizer"] == {"type": "NFC"}
    assert [part["type"] for part in saved["pre_tokenizer"]["pretokenizers"]] == [
        "Split",
        "ByteLevel",
    ]
    assert saved["pre_tokenizer"]["pretokenizers"][0]["pattern"] == {
        "Regex": tokenizer_training.PATTERN
    }
    size = tokenizer_training.VOCABULARY
    specials = tokenizer_training.CONTROL + tokenizer_training.MARKUP
    ids = [marks().tokenizer.token_to_id(token) for token in specials]
    assert ids == list(range(size - len(specials), size))
    assert marks().tokenizer.get_vocab_size() == size


@pytest.mark.parametrize(
    "text",
    ["What is 17+25?", "  two  spaces\n\n\tand a tab ", "Grüße, 東京! ☃ a\u0300", "<think>\n"],
)
def test_text_survives_the_tokenizer(text: str) -> None:
    composed = text.replace("a\u0300", "\u00e0")
    ids = encode_text(text)
    assert marks().tokenizer.decode(ids, skip_special_tokens=False) == composed


def test_digits_are_single_tokens() -> None:
    assert [marks().tokenizer.decode([i]) for i in encode_text("12345")] == list("12345")


def test_the_same_training_gives_the_same_tokenizer() -> None:
    one = tokenizer_training.train(scale=0.03, vocabulary=700)
    other = tokenizer_training.train(scale=0.03, vocabulary=700)
    assert one.to_str() == other.to_str()
