"""Choosing from a shortlist: what the whole row gives, or the whole row is fetched."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from civetta.decode import shortlist
from civetta.decode.history import TokenHistory
from civetta.decode.mask import TokenMask
from civetta.decode.sampler import SampleRow, sample_row
from civetta.decode.shortlist import Asked, ListedRow, Shortlist, sample
from civetta.errors import LogitsInvalid
from civetta.kernels.philox import gumbel
from civetta.kernels.shortlist.reference import shortlists
from civetta.types import SamplingParams

POSITION = 7


class Row:
    """A listed row that counts how often it is fetched."""

    def __init__(self, logits_V, params, keep=shortlist.KEEP):
        self.logits_V, self.fetched = np.asarray(logits_V, np.float32), 0
        asked = Asked(params=params, position=POSITION)
        hot = torch.tensor([asked.temperature], dtype=torch.float64)
        seed = params.seed - (2**64 if params.seed >= 2**63 else 0)
        drawn = torch.tensor([[asked.noisy, seed, POSITION]])
        found = shortlists(torch.from_numpy(self.logits_V)[None], hot, drawn, keep)[0].numpy()
        self.listed = ListedRow(
            shortlist=Shortlist.of(found, len(self.logits_V), asked), fetch=self._fetch
        )

    def _fetch(self):
        self.fetched += 1
        return self.logits_V


def row_of(params, *, mask=None, prompt=(), generated=()):
    history = TokenHistory(prompt, repeat_last_n=params.repeat_last_n)
    for token in generated:
        history.append(token)
    return SampleRow(params=params, position=POSITION, history=history, mask=mask)


def agreed(logits, row, keep=shortlist.KEEP):
    """The token that both ways choose, and whether the row had to be fetched."""
    listed = Row(logits, row.params, keep)
    want, got = sample_row(listed.logits_V, row), sample(listed.listed, row)
    assert got.token_id == want.token_id
    if want.logprob is not None:
        assert got.logprob.token_id == want.logprob.token_id
        assert math.isclose(got.logprob.logprob, want.logprob.logprob, abs_tol=1e-11)
        assert [i for i, _ in got.logprob.top] == [i for i, _ in want.logprob.top]
        tops = zip(got.logprob.top, want.logprob.top, strict=True)
        assert all(math.isclose(a, b, abs_tol=1e-11) for (_, a), (_, b) in tops)
    return got.token_id, listed.fetched


VOCAB = 60
tied = st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 2.0])
logit_rows = st.lists(tied, min_size=VOCAB, max_size=VOCAB) | st.lists(
    st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB
)
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@st.composite
def masks(draw):
    allowed_V = np.array(draw(st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB)))
    allowed_V[draw(st.integers(0, VOCAB - 1))] = True
    form = draw(st.sampled_from(["list", "bits", "banned"]))
    if form == "bits":
        return TokenMask(allowed_V=allowed_V)
    if form == "list":
        return TokenMask(allowed_N=np.flatnonzero(allowed_V))
    return TokenMask(banned_N=np.flatnonzero(~allowed_V))


@st.composite
def params_of(draw):
    return SamplingParams(
        temperature=draw(st.just(0.0) | st.floats(0.05, 2)),
        top_k=draw(st.just(0) | st.integers(1, 30)),
        top_p=draw(st.just(1.0) | st.floats(0, 1)),
        min_p=draw(st.just(0.0) | st.floats(0, 1)),
        min_keep=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**64 - 1)),
        repeat_penalty=draw(st.sampled_from([1.0, 1.2, 0.8])),
        repeat_last_n=draw(st.sampled_from([0, 4, -1])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7, -0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5, -0.5])),
        logit_bias=draw(st.sampled_from([(), ((3, 5.0),)])),
        logprobs=draw(st.sampled_from([None, 0, 5])),
    )


@settings(max_examples=400)
@given(
    logits=logit_rows,
    params=params_of(),
    mask=st.none() | masks(),
    prompt=tokens,
    generated=tokens,
    keep=st.sampled_from([4, 16, VOCAB - 1, VOCAB, VOCAB + 9]),
)
def test_a_shortlist_never_changes_a_token(logits, params, mask, prompt, generated, keep):
    row = row_of(params, mask=mask, prompt=prompt, generated=generated)
    agreed(logits, row, keep)


def like_a_model(seed, vocab=5000):
    """Logits whose best tokens stand out, as a model's do."""
    return np.random.default_rng(seed).standard_normal(vocab) ** 3


USUAL = {
    "greedy": SamplingParams(temperature=0.0),
    "presets": SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    "penalties": SamplingParams(
        temperature=0.7, top_k=20, top_p=0.95, presence_penalty=1.5, repeat_penalty=1.1
    ),
    "top-p alone": SamplingParams(temperature=0.6, top_p=0.9),
    "min-p alone": SamplingParams(temperature=0.9, min_p=0.05),
    "logprobs": SamplingParams(temperature=0.0, logprobs=20),
    "no cut": SamplingParams(temperature=1.0, presence_penalty=0.5, seed=2**64 - 5),
}


@pytest.mark.parametrize("name", USUAL)
def test_the_usual_ways_need_no_row(name):
    generated = list(range(0, 5000, 61))
    found = [
        agreed(like_a_model(seed), row_of(USUAL[name], generated=generated)) for seed in range(12)
    ]
    assert sum(fetched for _, fetched in found) == 0
    assert len({token for token, _ in found}) > 6


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, logprobs=3),  # the best are not those of the best scores
        SamplingParams(temperature=0.7, top_k=200),
        SamplingParams(temperature=5.0, top_p=0.999),
        SamplingParams(temperature=5.0, min_p=1e-5),
        SamplingParams(temperature=0.0, logit_bias=((4999, 50.0),)),
        SamplingParams(temperature=0.0, presence_penalty=-30.0),
    ],
)
def test_where_others_could_take_part_the_row_is_fetched(params):
    _, fetched = agreed(like_a_model(1), row_of(params, generated=[4000]))
    assert fetched == 1


def test_a_mask_of_unlisted_tokens_fetches_the_row():
    worst = np.argsort(like_a_model(2))[:5]
    mask = TokenMask(allowed_N=np.sort(worst))
    assert agreed(like_a_model(2), row_of(SamplingParams(temperature=0.0), mask=mask))[1] == 1


def test_an_unlisted_token_as_good_as_the_best_fetches_the_row():
    """The best one is lowered to the bar, where an unlisted token with a lower id has always been."""
    logits = np.full(60, -9.0)
    logits[:9], logits[50] = 0.5, 2.0
    mask = TokenMask(banned_N=np.arange(7))
    params = SamplingParams(temperature=0.0, presence_penalty=1.5)
    row = row_of(params, mask=mask, generated=[50])
    assert agreed(logits, row, keep=8) == (7, 1)


def test_a_sum_too_near_to_the_cut_fetches_the_row():
    logits = np.full(400, -50.0)
    logits[:3] = [1.0, 1.0, 1.0]  # top-p of a third ends on the first token, give or take a bit
    params = SamplingParams(temperature=1.0, top_p=1 / 3)
    assert agreed(logits, row_of(params))[1] == 1
    assert agreed(logits, row_of(SamplingParams(temperature=1.0, top_p=0.34)))[1] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_told_as_ever(bad):
    logits = like_a_model(3)
    logits[4321] = bad
    params = SamplingParams(temperature=0.0)
    with pytest.raises(LogitsInvalid, match="token 4321"):
        sample(Row(logits, params).listed, row_of(params))


def test_a_row_at_hand_is_sampled_as_it_is():
    logits = like_a_model(4).astype(np.float32)
    row = row_of(SamplingParams(temperature=0.8, seed=3))
    assert sample(logits, row) == sample_row(logits, row)


def test_a_list_serves_the_row_that_it_was_made_for_alone():
    params = SamplingParams(temperature=0.8, seed=3)
    row = row_of(params)
    with pytest.raises(AssertionError, match="another row"):
        sample(Row(like_a_model(5), params).listed, replace(row, position=POSITION + 1))


@pytest.mark.parametrize(("apart", "fetched"), [(0.0, 1), (1e-10, 1), (1e-5, 0)])
def test_two_best_scores_too_near_to_tell_fetch_the_row(monkeypatch, apart, fetched):
    params = SamplingParams(temperature=1.0, seed=9)
    logits = np.full(300, -40.0)
    logits[:2] = 20.0
    row = Row(logits, params)
    monkeypatch.setattr(shortlist, "gumbel", lambda ids_N, **_: np.where(ids_N == 1, apart, 0.0))
    sample(row.listed, row_of(params))
    assert row.fetched == fetched


def test_best_scores_that_penalties_lower_below_the_bar_fetch_the_row():
    params = SamplingParams(temperature=1.0, presence_penalty=30.0, seed=4)
    scores = gumbel(seed=4, position=POSITION, ids_N=np.arange(90))
    best_first = np.argsort(-scores).tolist()
    row = row_of(params, generated=best_first[:6])
    assert agreed(np.zeros(90), row, keep=6) == (best_first[6], 1)
    assert agreed(np.zeros(90), row, keep=8) == (best_first[6], 0)
