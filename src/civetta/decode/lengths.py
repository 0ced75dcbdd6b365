"""How many tokens to draft: what drafts are worth, what they cost, and the best of it.

Worth is learnt from verdicts, by depth (before drafting) and by grade (draft.py, after). Cost is
the time of launches and draft steps on this machine, calibrated at the start and corrected at
every round. Lengths decide speed alone: no reply depends on them.

No torch and no clock here; durations are arguments, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_DRAFTS = 7
"""Drafts of one reply and round at most: a sequence can go back by 8 rows."""

DEPTH_START = 0.6
GRADE_START = (
    *(0.06, 0.16, 0.3, 0.45, 0.6, 0.75, 0.86, 0.94, 0.98),  # the head's own probability
    *(0.15, 0.3, 0.45, 0.6, 0.75, 0.88, 0.95),  # tokens alike before a looked-up draft
)
"""What is believed before anything was seen."""


class Acceptance:
    """How often drafts stood: per depth and per grade, newest verdicts weighing most.

    A request's own counts begin with what all requests before it showed (`parent`). The first
    refused draft of a round is a failure; those behind it say nothing. What depths beyond it showed
    fades all the same: a bad start would else keep them from being tried, and so from being known.
    """

    __slots__ = ("_depth", "_grade", "_keep", "_parent", "_trust")

    def __init__(self, parent: Acceptance | None = None) -> None:
        self._parent = parent
        self._keep = 0.99 if parent is None else 0.95
        self._trust = 4.0  # how many verdicts the prior is worth
        self._depth = [[0.0, 0.0] for _ in range(MOST_DRAFTS)]  # refused, accepted
        self._grade = [[0.0, 0.0] for _ in GRADE_START]

    def depth(self, depth: int) -> float:
        """Probability that draft `depth` (from 0) stands when those before it do."""
        prior = DEPTH_START if self._parent is None else self._parent.depth(depth)
        return self._estimate(self._depth[depth], prior)

    def grade(self, grade: int) -> float:
        """Probability that a draft of this grade stands when those before it do."""
        prior = GRADE_START[grade] if self._parent is None else self._parent.grade(grade)
        return self._estimate(self._grade[grade], prior)

    def record(self, grades: Sequence[int], accepted: int, *, by_depth: bool) -> None:
        """Learn from a verdict. `by_depth`: the head's drafts; looked-up ones have grades alone."""
        judged = grades[: accepted + 1]
        for depth, grade in enumerate(judged):
            stood = int(depth < accepted)
            self._count(self._grade[grade], stood)
            if by_depth:
                self._count(self._depth[depth], stood)
        if by_depth:
            for seen_2 in self._depth[len(judged) :]:
                seen_2[:] = [self._keep * seen for seen in seen_2]
        if self._parent is not None:
            self._parent.record(grades, accepted, by_depth=by_depth)

    def _estimate(self, seen_2: list[float], prior: float) -> float:
        refused, accepted = seen_2
        return (accepted + self._trust * prior) / (refused + accepted + self._trust)

    def _count(self, seen_2: list[float], stood: int) -> None:
        seen_2[0] *= self._keep
        seen_2[1] *= self._keep
        seen_2[stood] += 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measurement: `sessions` and `rows` of a launch, or steps and step rows of drafting."""

    sessions: int
    rows: int
    seconds: float


FADE = 0.997
"""What is left of a size's factor (of its logarithm) after another launch."""


class RoundCost:
    """Seconds of a launch of so many sessions and rows: a + b sessions + c rows, then corrected.

    A common factor follows slow changes (longer contexts, a busy machine), one factor a size what
    is peculiar to it. Each moves by a fraction of the surprise, and no single surprise counts for
    more than a factor of two. A size's factor fades with every launch, its own ones too, into the
    common one: a bad reading would else keep a size from being tried, and so from being read again.
    """

    __slots__ = ("_base", "_drift", "_launches", "_own")

    def __init__(self, calibration: Sequence[Measured]) -> None:
        self._base = _fit(calibration)
        self._drift = 1.0
        self._launches = 0
        self._own: dict[tuple[int, int], tuple[float, int]] = {}  # factor, and when it was true

    def seconds(self, sessions: int, rows: int) -> float:
        """What such a launch takes."""
        return self._plain(sessions, rows) * self._drift * self._factor((sessions, rows))

    def observe(self, measured: Measured) -> None:
        """Correct by what a launch took."""
        size = (measured.sessions, measured.rows)
        surprise = measured.seconds / self.seconds(*size)
        surprise = min(max(surprise, 0.5), 2.0)
        self._drift = min(max(self._drift * surprise**0.03, 1e-3), 1e3)
        self._launches += 1
        own = self._factor(size) * surprise**0.1
        self._own[size] = (min(max(own, 0.25), 4.0), self._launches)

    def _factor(self, size: tuple[int, int]) -> float:
        """What is peculiar to a size, nearer to nothing the longer it was not seen."""
        found = self._own.get(size)
        if found is None:
            return 1.0
        own, seen = found
        return float(own ** (FADE ** (self._launches - seen)))

    def _plain(self, sessions: int, rows: int) -> float:
        a, b, c = self._base
        return a + b * sessions + c * rows


def _fit(calibration: Sequence[Measured]) -> tuple[float, float, float]:
    """Least squares with no negative part; a usual shape where less than three were measured."""
    if len(calibration) < 3:
        fastest = min((m.seconds for m in calibration), default=1e-3)
        return 0.8 * fastest, 0.1 * fastest, 0.1 * fastest
    size_N3 = np.array([[1.0, m.sessions, m.rows] for m in calibration])
    seconds_N = np.array([m.seconds for m in calibration])
    used = [0, 1, 2]
    while True:
        found = np.linalg.lstsq(size_N3[:, used], seconds_N, rcond=None)[0]
        if (found >= 0).all() or len(used) == 1:
            break
        used = [place for place, value in zip(used, found, strict=True) if value > 0] or [0]
    parts = [0.0, 0.0, 0.0]
    for place, value in zip(used, found, strict=True):
        parts[place] = max(float(value), 0.0)
    return max(parts[0], 1e-7), parts[1], max(parts[2], 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A reply's drafts to come: probability that each stands with all before it, falling.

    `free`: they are there already and cost no draft step.
    """

    chances: tuple[float, ...]
    free: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlan:
    """Drafts for each reply, and the tokens a second that this promises."""

    lengths: tuple[int, ...]
    tokens_a_second: float


GAIN_NEEDED = 1.02
"""Drafting has to promise this much more than not drafting: estimates are noisy."""


def plan_lengths(prospects: Sequence[Prospect], launch: RoundCost, steps: RoundCost) -> LengthPlan:
    """The lengths with the most tokens a second for all replies together.

    Drafts are taken in order of their chance, so each prefix of the order is the best choice of
    its size; the best prefix wins. A launch with drafts is never taken to be quicker than one
    without: of many sizes, each estimated with an error of its own, one always looks quick.
    """
    count = len(prospects)
    order = sorted(
        [
            (-chance, depth, place)
            for place, p in enumerate(prospects)
            for depth, chance in enumerate(p.chances)
        ]
    )
    plain_s = launch.seconds(count, count)
    plain = count / plain_s
    best, best_rate = 0, plain * GAIN_NEEDED
    tokens, rows, deepest, drawn = float(count), count, 0, 0
    for taken, (negative_chance, depth, place) in enumerate(order, 1):
        tokens -= negative_chance
        rows += 1
        if not prospects[place].free:
            drawn += 1
            deepest = max(deepest, depth + 1)
        seconds = max(launch.seconds(count, rows), plain_s)
        if drawn:
            seconds += steps.seconds(deepest, drawn)
        if tokens > best_rate * seconds:
            best, best_rate = taken, tokens / seconds
    lengths = [0] * count
    for _, _, place in order[:best]:
        lengths[place] += 1
    return LengthPlan(lengths=tuple(lengths), tokens_a_second=best_rate if best else plain)
