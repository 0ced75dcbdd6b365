from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from civetta.decode.draft import N_GRADES
from civetta.decode.lengths import (
    GAIN_NEEDED,
    GRADE_START,
    MOST_DRAFTS,
    Acceptance,
    Measured,
    Prospect,
    RoundCost,
    plan_lengths,
)


def round_seconds(lengths, prospects, launch, steps):
    """Drafting and launch of a round with these lengths, from nothing but the lengths."""
    drawn = [n for n, p in zip(lengths, prospects, strict=True) if n and not p.free]
    seconds = launch.seconds(len(lengths), len(lengths) + sum(lengths))
    return seconds + (steps.seconds(max(drawn), sum(drawn)) if drawn else 0.0)


def cost(a, b, c):
    """A machine whose launches take a + b sessions + c rows."""
    sizes = [(1, 1), (1, 4), (1, 8), (2, 2), (2, 8)]
    return RoundCost([Measured(sessions=s, rows=r, seconds=a + b * s + c * r) for s, r in sizes])


def test_every_grade_has_a_start():
    assert len(GRADE_START) == N_GRADES
    assert all(0 < p < 1 for p in GRADE_START)


def test_calibration_is_met():
    found = cost(3.0, 0.5, 0.25)
    assert found.seconds(4, 20) == pytest.approx(3 + 2 + 5)
    assert RoundCost([]).seconds(1, 1) > 0
    assert RoundCost([Measured(sessions=1, rows=1, seconds=4.0)]).seconds(1, 1) == pytest.approx(
        4.0
    )


def test_no_part_of_the_cost_is_negative():
    """Noise that says that rows are cheaper than nothing."""
    odd = [Measured(sessions=1, rows=r, seconds=s) for r, s in ((1, 5.0), (4, 4.0), (8, 3.0))]
    found = RoundCost(odd)
    assert found.seconds(1, 8) >= found.seconds(1, 1) > 0


def test_cost_follows_the_machine():
    found = cost(1.0, 0.0, 0.1)
    for _ in range(200):
        found.observe(Measured(sessions=1, rows=1, seconds=3.3))
    assert found.seconds(1, 1) == pytest.approx(3.3, rel=0.02)
    assert found.seconds(1, 8) > 1.8  # others follow in part
    found.observe(Measured(sessions=1, rows=1, seconds=1000.0))
    assert found.seconds(1, 1) < 3.3 * 1.15  # one hiccup is no new machine


def test_bad_readings_of_one_size_are_forgotten():
    """A busy spell met launches of eight rows alone; later ones are planned as if it had not been."""
    found = cost(1.0, 0.0, 0.1)
    for _ in range(30):
        found.observe(Measured(sessions=1, rows=8, seconds=6.0))
    assert found.seconds(1, 8) > 3 * 1.8 / 1.5
    assert found.seconds(1, 8) / found.seconds(1, 1) > 2 * 1.8 / 1.1
    for _ in range(1500):
        found.observe(Measured(sessions=1, rows=1, seconds=1.1))
    assert found.seconds(1, 8) == pytest.approx(1.8, rel=0.1)
    assert found.seconds(1, 1) == pytest.approx(1.1, rel=0.03)


def test_acceptance_learns_by_depth_and_grade():
    all_, rng = Acceptance(), np.random.default_rng(0)
    mine = Acceptance(all_)
    for _ in range(400):
        stands = rng.random(7) < np.array([0.9, 0.5, 0.9, 0.9, 0.9, 0.9, 0.9])
        accepted = 7 if stands.all() else int(np.argmin(stands))
        mine.record([8, 2, 8, 8, 8, 8, 8], accepted, by_depth=True)
    assert mine.depth(0) == pytest.approx(0.9, abs=0.12)
    assert mine.depth(1) == pytest.approx(0.5, abs=0.2)
    assert mine.grade(2) < 0.75 < mine.grade(8)
    other = Acceptance(all_)
    assert other.depth(1) == pytest.approx(
        all_.depth(1)
    )  # a new request begins with what others saw
    assert other.depth(1) < other.depth(0)


def test_drafts_behind_a_refused_one_say_nothing():
    seen = Acceptance()
    before = seen.depth(3)
    for _ in range(20):
        seen.record([1, 1, 1, 1], 0, by_depth=True)
    assert seen.depth(3) == before
    assert seen.depth(0) < 0.2


def test_looked_up_drafts_say_nothing_about_the_head():
    seen = Acceptance()
    before = seen.depth(0)
    seen.record([9, 9], 0, by_depth=False)
    assert seen.depth(0) == before


def best_by_force(prospects, launch, steps):
    plain = len(prospects) / launch.seconds(len(prospects), len(prospects))
    best = plain
    for lengths in itertools.product(*(range(len(p.chances) + 1) for p in prospects)):
        if any(lengths):
            tokens = sum(1 + sum(p.chances[:n]) for n, p in zip(lengths, prospects, strict=True))
            best = max(best, tokens / round_seconds(lengths, prospects, launch, steps))
    return plain, best


chance_lists = st.lists(st.floats(0.05, 1.0), max_size=4).map(
    lambda ps: tuple(float(x) for x in np.cumprod(ps))
)


@settings(max_examples=60, deadline=None)
@given(st.lists(chance_lists, min_size=1, max_size=3), st.floats(0.0, 1.0), st.floats(0.001, 0.5))
def test_free_drafts_get_the_best_lengths(chances, b, c):
    """Without draft steps the greedy order is optimal: nothing that force finds is better."""
    launch, steps = cost(1.0, b, c), cost(1e9, 0, 0)
    prospects = [Prospect(chances=one, free=True) for one in chances]
    plan = plan_lengths(prospects, launch, steps)
    plain, best = best_by_force(prospects, launch, steps)
    assert plan.tokens_a_second >= best / GAIN_NEEDED - 1e-9
    assert plan.tokens_a_second >= plain - 1e-12


@settings(max_examples=60, deadline=None)
@given(st.lists(chance_lists, min_size=1, max_size=3), st.floats(0.001, 0.5), st.floats(0.001, 0.5))
def test_a_plan_keeps_what_it_promises(chances, c, s):
    launch, steps = cost(1.0, 0.1, c), cost(0.01, s, 0.01)
    prospects = [Prospect(chances=one) for one in chances]
    plan = plan_lengths(prospects, launch, steps)
    tokens = sum(1 + sum(p.chances[:n]) for n, p in zip(plan.lengths, prospects, strict=True))
    seconds = round_seconds(plan.lengths, prospects, launch, steps)
    assert plan.tokens_a_second == pytest.approx(tokens / seconds)
    assert all(
        n <= len(p.chances) <= MOST_DRAFTS for n, p in zip(plan.lengths, prospects, strict=True)
    )


def test_dear_rows_mean_no_drafts_and_cheap_ones_many():
    prospects = [Prospect(chances=tuple(0.8 ** (d + 1) for d in range(7)))] * 2
    steps = cost(0.01, 0.01, 0.01)
    assert plan_lengths(prospects, cost(0.0001, 0.0, 1.0), steps).lengths == (0, 0)
    assert min(plan_lengths(prospects, cost(1.0, 0.0, 0.001), steps).lengths) >= 5


def test_a_size_that_was_measured_in_a_slow_moment_makes_no_drafts_pay():
    """Plain launches seem three times as slow as others; drafts that never stand gain nothing by it."""
    launch, steps = cost(1.0, 0.1, 0.01), cost(0.001, 0.001, 0.001)
    for _ in range(40):
        launch.observe(Measured(sessions=2, rows=2, seconds=6.0))
    assert launch.seconds(2, 2) > 1.5 * launch.seconds(2, 3)
    hopeless = [Prospect(chances=tuple(0.01 ** (d + 1) for d in range(7)))] * 2
    assert plan_lengths(hopeless, launch, steps).lengths == (0, 0)
    likely = [Prospect(chances=tuple(0.9 ** (d + 1) for d in range(7)))] * 2
    assert min(plan_lengths(likely, launch, steps).lengths) > 1


def test_lengths_are_ragged():
    """A reply that is easy to guess gets more rows than one that is not."""
    sure = Prospect(chances=tuple(0.97 ** (d + 1) for d in range(7)))
    unsure = Prospect(chances=tuple(0.2 ** (d + 1) for d in range(7)))
    plan = plan_lengths([unsure, sure], cost(1.0, 0.1, 0.2), cost(0.001, 0.02, 0.02))
    assert plan.lengths[0] <= 1
    assert plan.lengths[1] >= 4


def test_a_bad_start_of_a_depth_is_forgotten_while_shallower_drafts_stand():
    accepted = Acceptance()
    for _ in range(20):
        accepted.record([8, 8, 8], 1, by_depth=True)
    assert accepted.depth(1) < 0.2
    for _ in range(500):
        accepted.record([8], 1, by_depth=True)
    assert accepted.depth(0) > 0.95
    assert accepted.depth(1) > 0.55
