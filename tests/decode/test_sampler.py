from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from civetta.decode import sampler
from civetta.decode.history import TokenHistory
from civetta.decode.mask import TokenMask
from civetta.decode.sampler import (
    SampleRow,
    apply_penalties,
    best_ids,
    candidates,
    draw,
    log_probability,
    sample_row,
    sample_rows,
)
from civetta.errors import LogitsInvalid
from civetta.kernels.philox import gumbel
from civetta.types import SamplingParams
from decode import oracle

OPEN = SamplingParams()  # temperature 1, no filter, no penalty


def row(params=OPEN, *, position=9, prompt=(), generated=()):
    history = TokenHistory(prompt, repeat_last_n=params.repeat_last_n)
    for token in generated:
        history.append(token)
    return SampleRow(params=params, position=position, history=history)


def f32(values):
    return np.array(values, dtype=np.float32)


# Few distinct values on purpose: ties are where orders go wrong.
tied = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=24)
spread = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=24)
logit_lists = tied | spread


@st.composite
def params_of(draw_value):
    return SamplingParams(
        temperature=draw_value(st.floats(0.05, 2)),
        top_k=draw_value(st.integers(0, 26)),
        top_p=draw_value(st.floats(0, 1)),
        min_p=draw_value(st.floats(0, 1)),
        min_keep=draw_value(st.integers(1, 8)),
        seed=draw_value(st.integers(0, 2**64 - 1)),
    )


# ---- filters against the oracle ------------------------------------------------------------


@given(logit_lists, params_of())
@settings(max_examples=300)
def test_survivors_equal_the_oracle(logits, params):
    expected = oracle.survivors([float(x) for x in f32(logits)], params)
    assume(expected is not None)
    kept = candidates(f32(logits), params)
    assert set(kept.ids_N.tolist()) == expected
    assert len(kept.ids_N) >= min(params.min_keep, len(logits))


@given(logit_lists, params_of())
def test_the_best_token_always_survives(logits, params):
    assert int(np.argmax(f32(logits))) in candidates(f32(logits), params).ids_N


@given(tied, st.integers(0, 30))
def test_best_ids_order(logits, n):
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:n]
    assert best_ids(f32(logits), n).tolist() == order


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(top_k=2), {0, 1}),  # all equal: the lower ids stay
        (SamplingParams(top_p=0.5), {0, 1, 2, 3, 4}),
        (SamplingParams(top_p=0.3), {0, 1, 2}),  # reached exactly: the next one goes
        (SamplingParams(top_p=0.31), {0, 1, 2, 3}),
        (SamplingParams(top_p=0.0), {0}),  # zero keeps the best one
        (SamplingParams(top_p=0.0, min_keep=3), {0, 1, 2}),
        (SamplingParams(top_k=1, min_keep=4), {0, 1, 2, 3}),
        (SamplingParams(min_p=1.0), set(range(10))),  # equals of the best pass
        (SamplingParams(top_k=4, top_p=0.5), {0, 1}),  # half of what top-k left
    ],
)
def test_ties_are_cut_by_id(params, expected):
    assert set(candidates(f32([1.5] * 10), params).ids_N.tolist()) == expected


def test_min_p_alone_honours_min_keep():
    logits = f32([0.0, 9.0, 1.0, 1.0])
    assert candidates(logits, SamplingParams(min_p=0.5)).ids_N.tolist() == [1]
    kept = candidates(logits, SamplingParams(min_p=0.5, min_keep=3)).ids_N
    assert kept.tolist() == [1, 2, 3]


def test_temperature_comes_before_top_p():
    logits = f32([2.0, 1.0, 0.0, -1.0])
    cold = candidates(logits, SamplingParams(temperature=0.25, top_p=0.9)).ids_N
    hot = candidates(logits, SamplingParams(temperature=2.0, top_p=0.9)).ids_N
    assert cold.tolist() == [0]
    assert hot.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("first_sort", [1, 7, 100])
@pytest.mark.parametrize("top_p", [0.0, 0.2, 0.9, 0.999999])
def test_top_p_sorts_no_more_than_it_needs_and_changes_nothing(monkeypatch, first_sort, top_p):
    logits = np.random.default_rng(3).normal(0, 3, 5000).astype(np.float32)
    params = SamplingParams(top_p=top_p, min_keep=3)
    whole = candidates(logits, params).ids_N
    monkeypatch.setattr(sampler, "FIRST_SORT", first_sort)
    assert np.array_equal(candidates(logits, params).ids_N, whole)
    expected = oracle.survivors(logits.tolist(), params) if top_p < 0.5 else None
    assert expected is None or set(whole.tolist()) == expected


# ---- temperature -----------------------------------------------------------------------------


def test_zero_temperature_is_argmax_with_ties_to_the_lower_id():
    params = SamplingParams(temperature=0, top_k=5, top_p=0.1, min_keep=3)
    assert sample_row(f32([0.0, 7.0, 7.0, 7.0]), row(params)).token_id == 1


def test_zero_temperature_keeps_penalties():
    params = SamplingParams(temperature=0, presence_penalty=1.5)
    assert sample_row(f32([5.0, 4.0]), row(params, generated=[0])).token_id == 1
    assert sample_row(f32([5.0, 4.0]), row(params, prompt=[0])).token_id == 0


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9])
def test_tiny_temperature_is_greedy_and_finite(temperature):
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        kept = candidates(f32([1.0, 3.0, 2.0]), params)
    assert draw(kept, seed=1, position=2) == 1
    unfiltered = candidates(f32([1.0, 3.0, 2.0]), SamplingParams(temperature=temperature))
    assert draw(unfiltered, seed=1, position=2) == 1


# ---- penalties -------------------------------------------------------------------------------

tokens = st.lists(st.integers(0, 7), max_size=20)


@given(
    st.lists(st.floats(-10, 10, width=32), min_size=8, max_size=8),
    tokens,
    tokens,
    st.builds(
        SamplingParams,
        repeat_penalty=st.floats(0.5, 2),
        repeat_last_n=st.integers(-1, 30),
        frequency_penalty=st.floats(-2, 2),
        presence_penalty=st.floats(-2, 2),
    ),
)
@settings(max_examples=200)
def test_penalties_equal_the_oracle(logits, prompt, generated, params):
    history = row(params, prompt=prompt, generated=generated).history
    got = apply_penalties(f32(logits), params, history)
    assert got.tolist() == oracle.penalize(f32(logits), prompt, generated, params)


def test_window_zero_disables_repetition_alone():
    params = SamplingParams(repeat_penalty=2.0, repeat_last_n=0, frequency_penalty=0.5)
    history = row(params, prompt=[0, 1], generated=[1, 1]).history
    assert apply_penalties(f32([4.0, 4.0, 4.0]), params, history).tolist() == [4.0, 3.0, 4.0]


def test_logits_are_never_written():
    logits = f32([4.0, 4.0, 4.0])
    params = SamplingParams(repeat_penalty=2.0, frequency_penalty=0.5, logprobs=2)
    sample_row(logits, row(params, generated=[1, 2]))
    assert logits.tolist() == [4.0, 4.0, 4.0]


# ---- the draw --------------------------------------------------------------------------------


@given(logit_lists, params_of(), st.integers(0, 2**20))
def test_a_draw_is_the_gumbel_argmax_over_the_survivors(logits, params, position):
    values = f32(logits)
    kept = candidates(values, params).ids_N.tolist()
    noise = gumbel(
        seed=params.seed, position=position, ids_N=np.arange(len(logits), dtype=np.int64)
    )
    peak = float(values.max())
    best = max(kept, key=lambda i: ((float(values[i]) - peak) / params.temperature + noise[i], -i))
    assert sample_row(values, row(params, position=position)).token_id == best


def test_result_depends_on_logits_seed_and_position_alone():
    logits = np.random.default_rng(0).normal(0, 1, (6, 500)).astype(np.float32)
    rows = [row(SamplingParams(seed=i, top_k=50), position=i + 3) for i in range(6)]
    together = [s.token_id for s in sample_rows(logits, rows)]
    alone = [sample_row(logits[i].copy(), rows[i]).token_id for i in (5, 3, 1, 0, 2, 4)]
    assert [alone[3], alone[2], alone[4], alone[1], alone[5], alone[0]] == together
    assert [s.token_id for s in sample_rows(logits[::-1], rows[::-1])] == together[::-1]


def test_seed_and_position_change_the_token():
    logits = np.zeros(1000, dtype=np.float32)
    draws = {sample_row(logits, row(SamplingParams(seed=s))).token_id for s in range(50)}
    moved = {sample_row(logits, row(position=p)).token_id for p in range(50)}
    assert len(draws) > 40
    assert len(moved) > 40


def test_a_filter_that_keeps_the_winner_keeps_the_token():
    """The noise of a token does not move when others are filtered: drafting relies on it."""
    logits = np.random.default_rng(1).normal(0, 1, 300).astype(np.float32)
    for seed in range(40):
        free = sample_row(logits, row(SamplingParams(seed=seed))).token_id
        cut = SamplingParams(seed=seed, top_k=250)
        if free in candidates(logits, cut).ids_N:
            assert sample_row(logits, row(cut)).token_id == free


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=6),
        SamplingParams(temperature=1.7, top_p=0.9, min_p=0.05),
    ],
)
def test_distribution_chi_square(params):
    """20,000 draws over positions and seeds against the exact softmax of the survivors."""
    logits = f32([1.0, 0.3, -0.5, 2.0, 0.0, -1.2, 1.4, 0.9, -2.5, 0.1])
    kept = candidates(logits, params)
    weights = np.exp(kept.scaled_N)
    expected = dict(zip(kept.ids_N.tolist(), (weights / weights.sum()).tolist(), strict=True))
    n = 20_000
    seen = dict.fromkeys(expected, 0)
    for i in range(n):
        seen[draw(kept, seed=i % 7, position=i // 7)] += 1
    chi_square = sum((seen[t] - n * p) ** 2 / (n * p) for t, p in expected.items())
    degrees = len(expected) - 1
    # 99.9 % point of chi-square (Wilson-Hilferty); seeds are fixed, so this never flickers.
    bound = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    assert chi_square < bound


def test_neighbouring_positions_and_seeds_are_independent():
    """Pairs of successive draws fill the 4 x 4 table evenly."""
    logits = np.zeros(4, dtype=np.float32)
    kept = candidates(logits, OPEN)
    n = 16_000
    by_position = [draw(kept, seed=123, position=p) for p in range(n)]
    by_seed = [draw(kept, seed=s, position=77) for s in range(n)]
    for series in (by_position, by_seed):
        table = np.zeros((4, 4))
        for a, b in itertools.pairwise(series):
            table[a, b] += 1
        expected = (n - 1) / 16
        assert ((table - expected) ** 2 / expected).sum() < 37.7  # 99.9 % at 15 degrees


# ---- logprobs --------------------------------------------------------------------------------


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20), st.integers(0, 20))
def test_logprobs_equal_the_oracle(logits, n_top):
    expected = oracle.log_softmax([float(x) for x in f32(logits)])
    got = log_probability(f32(logits), 0, n_top)
    assert got.logprob == pytest.approx(expected[0], abs=1e-9)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:n_top]
    assert [i for i, _ in got.top] == order
    assert [v for _, v in got.top] == pytest.approx([expected[i] for i in order], abs=1e-9)


def test_logprobs_are_raw_and_optional():
    logits = f32([1.0, 2.0, 3.0])
    params = SamplingParams(temperature=0.1, top_k=1, presence_penalty=2.0, logprobs=3)
    sampled = sample_row(logits, row(params, generated=[2]))
    assert sampled.logprob is not None
    assert sampled.logprob.token_id == sampled.token_id
    assert math.fsum(math.exp(v) for _, v in sampled.logprob.top) == pytest.approx(1.0)
    assert [i for i, _ in sampled.logprob.top] == [2, 1, 0]
    assert sample_row(logits, row()).logprob is None
    none_asked = sample_row(logits, row(SamplingParams(temperature=0, logprobs=0)))
    assert none_asked.logprob is not None
    assert none_asked.logprob.top == ()


# ---- bad logits ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(bad):
    with pytest.raises(LogitsInvalid, match=r"1 logits of 4 .* for token 2\)"):
        sample_row(f32([0.0, 1.0, bad, 2.0]), row(SamplingParams(temperature=0)))


def test_one_row_a_set_of_logits():
    with pytest.raises(AssertionError):
        sample_rows(np.zeros((2, 4), dtype=np.float32), [row()])


def test_extreme_finite_logits():
    big = float(np.finfo(np.float32).max)
    sampled = sample_row(f32([-big, big, 0.0]), row(SamplingParams(logprobs=3, top_p=0.9)))
    assert sampled.token_id == 1
    assert sampled.logprob is not None
    assert sampled.logprob.logprob == 0.0


def test_biases_are_part_of_the_logits_but_not_of_log_probabilities():
    logits_V = np.array([1.0, 3.0, 2.0, 0.0], np.float32)
    history = TokenHistory([0], repeat_last_n=64)
    plain = SamplingParams(temperature=0, logprobs=1)
    biased = replace(plain, logit_bias=((3, 3.5), (1, -100.0)))
    row = SampleRow(params=biased, position=1, history=history)
    sampled = sample_row(logits_V, row)
    assert sampled.token_id == 3
    unbiased = sample_row(logits_V, replace(row, params=plain)).logprob
    assert sampled.logprob.top == unbiased.top == ((1, unbiased.logprob),)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_bias_equals_logits_that_were_so(temperature):
    rng = np.random.default_rng(4)
    history = TokenHistory([1, 2, 3], repeat_last_n=8)
    for seed in range(40):
        logits_V = rng.normal(0, 2, 30).astype(np.float32)
        params = SamplingParams(
            temperature=temperature, seed=seed, top_k=9, top_p=0.9, repeat_penalty=1.5
        )
        shifted_V = logits_V.copy()
        shifted_V[[4, 7]] += np.float32([2.5, -1.25])
        biased = replace(params, logit_bias=((4, 2.5), (7, -1.25)))
        found = sample_row(logits_V, SampleRow(params=biased, position=3, history=history))
        wanted = sample_row(shifted_V, SampleRow(params=params, position=3, history=history))
        assert found.token_id == wanted.token_id


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_mask_leaves_only_what_it_allows(temperature):
    rng = np.random.default_rng(9)
    history = TokenHistory([1, 2, 3], repeat_last_n=8)
    for seed in range(60):
        logits_V = rng.normal(0, 3, 40).astype(np.float32)
        allowed_V = rng.random(40) < 0.2
        allowed_V[seed % 40] = True
        params = SamplingParams(
            temperature=temperature, seed=seed, top_k=seed % 7, top_p=0.8, min_p=0.1, min_keep=4,
            repeat_penalty=1.4,
        )  # fmt: skip
        masks = [
            TokenMask(allowed_V=allowed_V),
            TokenMask(banned_N=np.flatnonzero(~allowed_V)),
            TokenMask(allowed_N=np.flatnonzero(allowed_V)),
            TokenMask.of(allowed_V),
        ]
        rows = [SampleRow(params=params, position=3, history=history, mask=m) for m in masks]
        (found,) = {sample_row(logits_V, row).token_id for row in rows}
        assert allowed_V[found]
        for mask in masks:
            assert [mask.allows(i) for i in range(40)] == allowed_V.tolist()
            assert np.array_equal(np.isfinite(mask.apply(logits_V)), allowed_V)
        one = TokenMask(allowed_N=np.array([seed % 40]))
        assert sample_row(logits_V, replace(rows[0], mask=one)).token_id == seed % 40
        low_V = np.where(allowed_V, logits_V, np.float32(-1e6))
        plain = replace(params, repeat_penalty=1.0, min_keep=1)
        row = SampleRow(params=plain, position=3, history=history)
        assert (
            sample_row(logits_V, replace(row, mask=masks[0])).token_id
            == sample_row(low_V, row).token_id
        )
