"""Drafts: from the text, and from a head that agrees with the target exactly."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from civetta.decode.draft import DraftTask, LookupDrafter, MtpDrafter, lookup_grade, mtp_grade
from civetta.decode.history import TokenHistory
from civetta.decode.lookup import LONGEST_MATCH, TextIndex
from civetta.decode.sampler import SampleRow, sample_row
from civetta.types import SamplingParams

VOCAB = 200


def naive(text, most):
    """The longest match by trying every place; the newest of equals."""
    best, place = 0, -1
    for end in range(len(text) - 1):
        match = 0
        while match < min(end + 1, LONGEST_MATCH) and text[end - match] == text[-1 - match]:
            match += 1
        if match and match >= best:
            best, place = match, end
    if not best:
        return (), 0
    follows = list(text)
    for i in range(most):
        follows.append(follows[place + 1 + i])
    return tuple(follows[len(text) :]), best


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(1, 7), st.integers(1, 5))
def test_lookup_finds_the_longest_newest_match(text, most, part):
    index = TextIndex()
    for start in range(0, len(text), part):
        index.append(text[start : start + part])
    assert len(index) == len(text)
    assert index.continuation(most) == naive(text, most)


def test_lookup_in_a_long_text_that_repeats():
    text = [int(i) for i in np.random.default_rng(1).integers(0, 9, 3000)]
    index = TextIndex()
    index.append([*text, *text[:500]])
    assert index.continuation(7) == (tuple(text[500:507]), LONGEST_MATCH)
    assert index.continuation(0) == ((), 0)


class Head:
    """Answers with logits that depend on the tokens so far, as the target does."""

    def __init__(self, logits_of):
        self.logits_of = logits_of
        self.sizes = []

    def begin(self, sessions, next_ids):
        return self._step([[*s.ids, i] for s, i in zip(sessions, next_ids, strict=True)])

    def extend(self, chain, ids):
        texts = [[*text, i] for text, i in zip(chain.texts, ids, strict=True)]
        return self._step(texts)

    def _step(self, texts):
        self.sizes.append(len(texts))
        rows = torch.from_numpy(np.stack([self.logits_of(text) for text in texts]))
        chain = SimpleNamespace(texts=texts)
        chain.keep = lambda places: SimpleNamespace(texts=[texts[i] for i in places])
        return rows, chain


def logits_of(text):
    rows = np.random.default_rng(sum(text) + 7 * len(text)).normal(0, 3, VOCAB)
    return rows.astype(np.float32)


def task(prompt, params, most):
    history = TokenHistory(prompt, repeat_last_n=params.repeat_last_n)
    index = TextIndex()
    index.append(prompt)
    session = SimpleNamespace(ids=list(prompt[:-1]))
    return DraftTask(
        session=session, next_id=prompt[-1], params=params, history=history, text=index, most=most
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7, seed=4, top_k=20, top_p=0.9),
        SamplingParams(temperature=1.0, seed=5, top_k=20, min_p=0.01, frequency_penalty=2.0),
        SamplingParams(temperature=0.8, seed=5, top_k=9, repeat_penalty=1.7, presence_penalty=1.0),
    ],
)
def test_a_head_that_is_the_target_drafts_its_very_tokens(params):
    """The same noise and penalties: sampled drafts are as right as greedy ones."""
    prompt = [5, 9, 9, 31, 5]
    one = task(prompt, params, 7)
    (draft,) = MtpDrafter(Head(logits_of)).propose([one], lambda place, so_far: True)
    history, text = TokenHistory(prompt, repeat_last_n=params.repeat_last_n), list(prompt)
    for token_id in draft.ids:
        row = SampleRow(params=params, position=len(history), history=history)
        assert sample_row(logits_of(text), row).token_id == token_id
        history.append(token_id)
        text.append(token_id)
    assert len(draft.ids) == len(draft.grades) == 7
    assert len(one.history) == len(prompt)
    one.history.check()


def test_replies_drop_out_one_by_one():
    params = SamplingParams(temperature=0)
    tasks = [task([1, 2], params, most) for most in (3, 0, 7, 5)]
    head = Head(logits_of)
    drafts = MtpDrafter(head).propose(
        tasks, lambda place, so_far: place != 3 or len(so_far.ids) < 1
    )
    assert [len(draft.ids) for draft in drafts] == [3, 0, 7, 1]
    assert head.sizes == [3, 2, 2, 1, 1, 1, 1]
    assert drafts[0].ids == drafts[2].ids[:3]


def test_drafts_are_announced_before_the_next_step():
    """So that rows of the n-gram table are read while the head draws more."""
    params, log = SamplingParams(temperature=0), []

    class Watched(Head):
        def extend(self, chain, ids):
            log.append("step")
            return super().extend(chain, ids)

    tasks = [task([1, 2], params, 3), task([1, 7], params, 1)]
    drafter = MtpDrafter(Watched(logits_of), lambda session, ids: log.append((session, ids)))
    first, second = (draft.ids for draft in drafter.propose(tasks, lambda place, so_far: True))
    a, b = (one.session for one in tasks)
    assert log == [
        (a, [2, first[0]]),
        (b, [7, second[0]]),
        "step",
        (a, [2, *first[:2]]),
        "step",
        (a, [2, *first]),
    ]


def test_nothing_wanted_nothing_computed():
    head = Head(logits_of)
    params = SamplingParams(temperature=0)
    drafts = MtpDrafter(head).propose([task([1], params, 5)], lambda place, so_far: False)
    assert drafts[0].ids == []
    assert head.sizes == []


def test_lookup_drafts_carry_the_grade_of_their_match():
    params = SamplingParams(temperature=0)
    one = task([1, 2, 3, 4, 5, 1, 2, 3], params, 4)
    (draft,) = LookupDrafter().propose([one], lambda place, so_far: len(so_far.ids) < 3)
    assert draft.ids == [4, 5, 1]
    assert draft.grades == [lookup_grade(3)] * 3


def test_grades_ascend():
    assert [mtp_grade(p) for p in (0.0, 0.3, 0.6, 0.99)] == [0, 2, 4, 8]
    assert [lookup_grade(n) for n in (1, 2, 4, 32)] == [9, 10, 11, 15]
