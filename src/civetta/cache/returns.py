"""`ReturnTimes`: how long conversations stay away, learned from traffic.

A last state of an active conversation is not given up for a newcomer. How long a conversation that
says nothing counts as active depends on who the users are: where nearly nobody comes back after
twenty seconds, a protection of minutes keeps everybody else out of the cache.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LIMITS_S = (0.0, *(float(2**n) for n in range(13)))
"""Idle times at which the chance of a return is asked, up to 4,096 s."""
RARE = 0.05
"""A conversation counts as left when fewer than so many of its kind came back from then on."""
PRIOR_RETURNS, PRIOR_PERIODS = 2, 4
"""Before anything was seen half come back; some 40 that do not are needed to say otherwise."""
REMEMBERED = 2000
"""Periods after which all counts are halved: traffic changes."""


class ReturnTimes:
    """Idle periods of conversations' last states, by their length and how they ended."""

    def __init__(self) -> None:
        self._returned = [0.0] * len(LIMITS_S)
        self._lost = [0.0] * len(LIMITS_S)

    def returned(self, idle_s: float) -> None:
        """A conversation came back after so long."""
        self._count(self._returned, idle_s)

    def lost(self, idle_s: float) -> None:
        """A state was given up after so long, and nobody had come back to it."""
        self._count(self._lost, idle_s)

    def active_s(self, idle_s: Iterable[float], *, at_most_s: float) -> float:
        """The idle time from which on a return is rare; `idle_s` are those that are idle now.

        Those count as periods that have not ended: they reached their length, no more is known.
        """
        idle = sorted(idle_s)
        for n, limit_s in enumerate(LIMITS_S):
            returns = sum(self._returned[n:])
            reached = returns + sum(self._lost[n:]) + len(idle) - bisect_right(idle, limit_s)
            if (returns + PRIOR_RETURNS) / (reached + PRIOR_PERIODS) < RARE:
                return min(limit_s, at_most_s)
        return at_most_s

    def _count(self, counts: list[float], idle_s: float) -> None:
        counts[bisect_right(LIMITS_S, max(idle_s, 0.0)) - 1] += 1
        if sum(self._returned) + sum(self._lost) > REMEMBERED:
            for each in (self._returned, self._lost):
                each[:] = [count / 2 for count in each]
