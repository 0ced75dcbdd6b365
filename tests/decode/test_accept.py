from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from civetta.decode.accept import accept
from civetta.decode.history import TokenHistory
from civetta.decode.sampler import SampleRow, sample_row
from civetta.errors import LogitsInvalid
from civetta.types import SamplingParams

VOCAB = 12
PARAMS = st.sampled_from(
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, frequency_penalty=1.5, repeat_penalty=1.5, repeat_last_n=3),
        SamplingParams(temperature=1.3, top_k=6, seed=9, presence_penalty=1, logprobs=2),
    ]
)


def logits_of(text):
    """Logits that depend on everything before: what a model is, without one."""
    seed = 0
    for token in text:
        seed = (seed * 31 + token + 1) % 2**32
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


def one_by_one(prompt, params, count, end_ids):
    history, found = TokenHistory(prompt, repeat_last_n=params.repeat_last_n), []
    text = list(prompt)
    for _ in range(count):
        row = SampleRow(params=params, position=len(history), history=history)
        found.append(sample_row(logits_of(text), row))
        if found[-1].token_id in end_ids:
            break
        text.append(found[-1].token_id)
        history.append(found[-1].token_id)
    return found


@given(
    PARAMS,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    st.lists(st.booleans(), max_size=7),
    st.sets(st.integers(0, VOCAB - 1), max_size=2),
)
def test_tokens_are_those_without_drafts(params, prompt, right, end_ids):
    truth = one_by_one(prompt, params, len(right) + 1, end_ids)
    draft = [(t.token_id + (not ok)) % VOCAB for t, ok in zip(truth, right, strict=False)]
    draft += [0] * (len(right) - len(draft))  # behind an end token nothing counts
    rows = np.stack([logits_of([*prompt, *draft[:i]]) for i in range(len(draft) + 1)])
    history = TokenHistory(prompt, repeat_last_n=params.repeat_last_n)
    row = SampleRow(params=params, position=len(prompt), history=history)
    verdict = accept(draft, rows, row, end_ids)
    count = len(verdict.tokens)
    assert list(verdict.tokens) == truth[:count]
    stood = [t.token_id == d for t, d in zip(truth, draft, strict=False)]
    first_wrong = stood.index(False) if False in stood else len(stood)
    assert verdict.accepted == first_wrong
    ended = verdict.tokens[-1].token_id in end_ids
    assert count == first_wrong + (not (ended and first_wrong and count == first_wrong))
    assert verdict.surplus == len(draft) + 1 - count >= 0
    assert len(history) == len(prompt)
    history.check()


def test_a_bad_row_counts_only_if_it_is_needed():
    rows = np.zeros((3, VOCAB), np.float32)
    rows[0, 4] = rows[1, 5] = 1
    rows[2, 0] = np.nan
    history = TokenHistory([1], repeat_last_n=0)
    row = SampleRow(params=SamplingParams(temperature=0), position=1, history=history)
    assert accept([4, 7], rows, row).accepted == 1
    with pytest.raises(LogitsInvalid):
        accept([4, 5], rows, row)
    assert len(history) == 1
