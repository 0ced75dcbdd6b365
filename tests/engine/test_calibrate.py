"""What launches and draft steps are timed at the start, by a clock that the test turns."""

from __future__ import annotations

import itertools

import pytest

from civetta.engine import calibrate as calibration
from civetta.engine.calibrate import MOST_SECONDS, SIZES, STEPS, calibrate
from civetta.engine.load_drafting import drafting_of
from civetta.model.tiny import write_tiny
from civetta.options import DraftingOptions
from engine.drafting import Bench


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    return Bench(write_tiny(tmp_path_factory.mktemp("tiny"))).trunk


def ticking(step_s):
    """Each look at the clock takes so long."""
    looks = itertools.count()
    return lambda: next(looks) * step_s


def test_every_size_is_timed(trunk):
    launches, steps = calibrate(trunk, ticking(MOST_SECONDS / 10_000))
    assert [(m.sessions, m.rows) for m in launches] == list(SIZES)
    assert [(m.sessions, m.rows) for m in steps] == list(STEPS)
    assert all(m.seconds > 0 for m in (*launches, *steps))


def test_the_quickest_reading_counts(trunk, monkeypatch):
    monkeypatch.setattr(calibration, "REPEATS", 2)
    seconds = iter([9.0, *range(1, 1 + len(SIZES)), *([0.5] * len(SIZES))])
    monkeypatch.setattr(calibration, "_launch", lambda *_: next(seconds))
    launches, _ = calibrate(trunk, lambda: 0.0)
    assert [m.seconds for m in launches] == [0.5] * len(SIZES)


def test_a_slow_machine_is_calibrated_by_what_it_managed(trunk):
    launches, steps = calibrate(trunk, ticking(MOST_SECONDS))
    assert [(m.sessions, m.rows) for m in launches] == [SIZES[0]]
    assert [(m.sessions, m.rows) for m in steps] == [STEPS[0]]


def test_without_a_head_there_are_no_steps(trunk):
    plain = trunk.over(trunk.ops, lambda rows: rows)
    launches, steps = calibrate(plain, ticking(1e-6))
    assert len(launches) == len(SIZES)
    assert steps == ()


@pytest.mark.parametrize(("mode", "used"), [("mtp", "mtp"), ("lookup", "lookup"), ("off", None)])
def test_what_is_measured_is_what_drafting_starts_from(trunk, mode, used):
    part = trunk if mode == "mtp" else trunk.over(trunk.ops, lambda rows: rows)
    found = drafting_of(DraftingOptions(speculative=mode, draft_tokens=4), part)
    if used is None:
        assert found is None
        return
    assert (found.mode, found.most, found.head is not None) == (used, 4, used == "mtp")
    assert found.launches
    assert bool(found.steps) == (used == "mtp")
