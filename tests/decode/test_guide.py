from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from civetta.chat.reply import ReplyParser, assemble
from civetta.decode.guide import Phase
from civetta.errors import RequestInvalid
from decode.walking import (
    allowed_ids,
    constraint,
    draw,
    guide_of,
    guides,
    may_end,
    say,
    say_ids,
    text_of,
    tokenizer,
    vocab_size,
)

WORD = constraint("regex", "[a-z]{3,5}")
CALL = constraint("lark", 'start: "\\n" /[a-z]+/ "</tool_call>"', starts="call", param="tools")
OBJECT = constraint("json_schema", json.dumps({"type": "object"}))


def test_no_bounds_no_guide():
    assert guides().of(thinking=True, thinking_budget=None, constraint=None) is None


def test_an_answer_without_thought_is_bound_from_its_first_token():
    guide = guide_of(WORD)
    assert not may_end(guide)
    assert say(guide, "the")
    assert may_end(guide)
    assert say(guide, "re")
    assert set(allowed_ids(guide.rows()[0])) == tokenizer().eog_ids


def test_case_34_thought_is_free_and_the_grammar_begins_behind_it():
    guide = guide_of(OBJECT, thinking=True)
    assert say(guide, 'I think {"a": [ <tool_call> and so on\n')
    assert guide.phase is Phase.THOUGHT
    assert not may_end(guide)  # the answer is still owed
    assert say(guide, "</think>")
    assert not say(guide, "{")  # a blank line first, as the template writes it
    assert say(guide, '\n\n{"a": 1}')
    assert may_end(guide)


@pytest.mark.parametrize("behind", ["", "x", "\n\n", ">"])
def test_a_thought_spelled_closed_by_ordinary_tokens_ends_there_exactly(behind):
    ids = tokenizer().encode("so</think>" + behind, parse_special=False)
    guide = guide_of(OBJECT, thinking=True)
    for token_id in ids:
        if guide.phase is not Phase.THOUGHT:
            break
        mask = guide.rows()[0]
        if mask is not None and not mask.allows(token_id):
            assert b">" in tokenizer().token_bytes(token_id)[:-1]  # would reach over the marker
            return
        guide.advance(token_id)
    assert guide.phase is Phase.FORCED


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_spent_thinking_budget_closes_the_thought_as_the_template_does(budget):
    guide = guide_of(thinking=True, budget=budget)
    assert say(guide, "".join("a " for _ in range(20))) == (budget > 20)
    guide = guide_of(thinking=True, budget=budget)
    ids, rng = [], np.random.default_rng(3)
    letters = tokenizer().encode("abcdefgh")
    while guide.phase is not Phase.FREE:
        mask = guide.rows()[0]
        token_id = int(rng.choice(letters)) if mask is None else allowed_ids(mask)[0]
        assert mask is None or len(allowed_ids(mask)) == 1
        ids.append(token_id)
        guide.advance(token_id)
    close = tokenizer().encode("\n</think>\n\n")
    assert ids[budget:] == close
    assert guide.rows() == [None]
    reply = assemble([*(p := ReplyParser(thinking=True)).push(text_of(ids) + "yes"), *p.finish()])
    assert len(tokenizer().encode(reply.reasoning)) <= budget
    assert reply.content == "yes"


def test_a_budget_does_not_cut_a_character():
    guide = guide_of(thinking=True, budget=1)
    parts = [tokenizer().encode("\x00")[0]]  # any one token
    assert say_ids(guide, parts)
    assert guide.phase is Phase.FORCED
    guide = guide_of(thinking=True, budget=1)
    byte_ids = [_byte_token(byte) for byte in "🙃".encode()]
    assert say_ids(guide, byte_ids)
    assert guide.phase is Phase.FORCED


def test_a_budget_ends_within_bytes_that_are_no_text():
    guide = guide_of(thinking=True, budget=2)
    broken = [_byte_token(0xF0)] * 6
    assert say_ids(guide, broken)
    assert not say_ids(guide, broken[:1])


def test_a_budget_that_is_not_spent_changes_nothing():
    guide = guide_of(thinking=True, budget=50)
    assert say(guide, "short</think>\n\nand then free <tool_call> text")
    assert guide.rows() == [None]


def test_calls_are_bound_and_text_between_them_is_free():
    guide = guide_of(CALL, thinking=True)
    assert say(guide, "hm <tool_call>\n5</think>\n\nText first.\n\n<tool_call>")
    assert guide.phase is Phase.CALL
    assert not say(guide, "5")
    assert say(guide, "\nabc</tool_call>")
    assert guide.phase is Phase.FREE
    assert say(guide, "\n<tool_call>\nx</tool_call>")
    assert may_end(guide)


def test_after_the_last_call_only_the_end_may_follow():
    once = constraint("lark", CALL.grammar.text, starts="call", calls_max=1)
    guide = guide_of(once)
    assert say(guide, "<tool_call>\nabc</tool_call>")
    assert set(allowed_ids(guide.rows()[0])) == tokenizer().eog_ids


def test_a_thought_that_the_reply_opens_itself_is_free():
    guide = guide_of(CALL)
    assert say(guide, " \n<think>\n<tool_call>\n5</think>")
    assert guide.phase is Phase.FREE
    assert say(guide, "<tool_call>\nabc")
    assert not say(guide, "5")


@pytest.mark.parametrize("bound", [WORD, OBJECT], ids=["regex", "object"])
@pytest.mark.parametrize("thinking", [True, False])
def test_random_replies_are_texts_of_the_grammar(bound, thinking):
    rng = np.random.default_rng(5)
    short = set(tokenizer().encode('{}":, 1aeiou\n</think>'))
    ended = 0
    for _ in range(12):
        guide = guide_of(bound, thinking=thinking, budget=4 if thinking else None)
        ids, whole = draw(guide, rng, most=120, prefer=lambda ids: [i for i in ids if i in short])
        ended += whole
        parser = ReplyParser(thinking=thinking)
        reply = assemble([*parser.push(text_of(ids)), *parser.finish()])
        if whole and bound is WORD:
            assert re.fullmatch(WORD.grammar.text, reply.content)
        elif whole:
            assert isinstance(json.loads(reply.content), dict)
    assert ended


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("bound", "thinking", "budget"),
    [(WORD, False, None), (OBJECT, True, 3), (CALL, True, None), (None, True, 5)],
)
def test_looking_ahead_changes_nothing_and_sees_what_comes(seed, bound, thinking, budget):
    """Rows along any drafts equal the rows met one by one, and the guide stays where it was."""
    rng = np.random.default_rng(seed)
    likely = tokenizer().encode('a</think>\n\n{"b": <tool_call>\nabc</tool_call>}')
    ids, _ = draw(
        guide_of(bound, thinking=thinking, budget=budget),
        rng,
        most=60,
        prefer=lambda ids: [i for i in ids if i in likely],
    )
    guide = guide_of(bound, thinking=thinking, budget=budget)
    plain = guide_of(bound, thinking=thinking, budget=budget)
    with ThreadPoolExecutor(1) as beside:
        for place in range(0, len(ids), 3):
            drafts = list(ids[place : place + int(rng.integers(0, 8))])
            wrong = drafts and rng.random() < 0.4
            if wrong:
                drafts[-1] = int(rng.integers(vocab_size()))
            fitting = guide.fitting(drafts)
            if rng.random() < 0.5:
                guide.begin_rows(drafts, beside)
            rows = guide.rows(drafts)
            assert fitting in (len(rows) - 1, len(rows))  # an end token fits and has no row behind
            seen = []
            for token_id in [*drafts[: len(rows) - 1], None]:
                seen.append(allowed_ids(plain.rows()[0]))
                if token_id is not None:
                    plain.advance(token_id)
            assert [allowed_ids(row) for row in rows] == seen
            plain = guide_of(bound, thinking=thinking, budget=budget)
            for token_id in ids[: place + 3]:
                plain.advance(token_id)
            for token_id in ids[place : place + 3]:
                guide.advance(token_id)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}', "minimum"),
        ("json_schema", '{"$ref": "#"}', "no text"),
        ("json_schema", "[]", "schema"),
        ("json_schema", '{"type": "object", "not": {}}', "not"),
        ("regex", "(a", "regex"),
        ("lark", "begin: 1", "cannot"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(kind, text, says):
    with pytest.raises(RequestInvalid, match=says) as caught:
        guide_of(constraint(kind, text, param="here"))
    assert caught.value.param == "here"
    assert caught.value.code == "invalid_schema"
    assert "\n" not in caught.value.message


def test_no_tokenizer_no_grammar():
    from civetta.decode.guides import Guides

    with pytest.raises(RequestInvalid, match="tokenizer"):
        Guides(None, 10).of(thinking=False, thinking_budget=None, constraint=WORD)


def _byte_token(byte: int) -> int:
    return next(i for i in range(600) if tokenizer().token_bytes(i) == bytes([byte]))
