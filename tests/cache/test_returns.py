from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from civetta.cache.returns import REMEMBERED, ReturnTimes

TIMES = st.lists(st.floats(0, 10_000), max_size=60)


def test_nothing_seen_leaves_the_bound():
    assert ReturnTimes().active_s([], at_most_s=120) == 120
    assert ReturnTimes().active_s([500.0] * 30, at_most_s=120) == 120


def test_many_that_never_come_back_shorten_it():
    times = ReturnTimes()
    for _ in range(50):
        times.lost(100.0)
        times.returned(1.5)
    assert times.active_s([], at_most_s=120) == 2.0


def test_those_that_are_idle_now_count():
    times = ReturnTimes()
    times.returned(3.0)
    assert times.active_s([60.0] * 50, at_most_s=120) == 4.0
    assert times.active_s([3.0] * 50, at_most_s=120) == 120


def test_late_returns_lengthen_it():
    times = ReturnTimes()
    for _ in range(300):
        times.lost(2000.0)
    for _ in range(20):
        times.returned(600.0)
    assert times.active_s([], at_most_s=1800) == 1024.0


def test_old_traffic_is_forgotten():
    times = ReturnTimes()
    for _ in range(1000):
        times.lost(1000.0)
    for _ in range(4 * REMEMBERED):
        times.returned(600.0)
    assert times.active_s([], at_most_s=1800) == 1800


@given(TIMES, TIMES, TIMES, st.floats(1, 2000))
def test_every_return_counts_in_favour(returned, lost, idle, at_most_s):
    """More returns, all else equal, never make conversations count as left sooner."""
    few, many = ReturnTimes(), ReturnTimes()
    for idle_s in lost:
        few.lost(idle_s)
        many.lost(idle_s)
    for idle_s in returned:
        few.lost(idle_s)
        many.returned(idle_s)
    shorter, longer = (t.active_s(idle, at_most_s=at_most_s) for t in (few, many))
    assert 0 <= shorter <= longer <= at_most_s
