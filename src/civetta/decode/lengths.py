"""How many tokens to draft: what drafts are worth, what they cost, and the best of it.

Worth is learnt from verdicts, by depth (before drafting) and by grade (draft.py, after). Cost is
the time of launches and draft steps on this machine, calibrated at the start and corrected at
every round, so that one that went wrong is outgrown. Lengths decide speed alone: no reply depends
on them.

No torch and no clock here; durations are arguments, in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean
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
READINGS_FADE = 0.99
"""What is left of what a size's readings count for, and of the calibration, after another launch."""
READINGS = 32
"""Newest durations that are kept of a size."""
FEWEST = 4
"""Readings before a size counts: with fewer an outlier could not be told."""
REFIT_EVERY = 32
"""Launches from one fit to the next."""
CALIBRATION_COUNTS = 1.0
LEAST_CALIBRATION = 0.05
"""Readings that a calibrated size counts for, at first and in the end."""


class RoundCost:
    """Seconds of a launch of so many sessions and rows: a + b sessions + c rows, then corrected.

    A common factor follows slow changes (longer contexts, a busy machine), one factor a size what
    is peculiar to it. Each moves by a fraction of the surprise, and no single surprise counts for
    more than a factor of two. A size's factor fades with every launch, its own ones too, into the
    common one: a bad reading would else keep a size from being tried, and so from being read again.

    a, b and c are the calibration's at first. Every REFIT_EVERY launches they are fitted again to
    it and to the newest durations by size: a machine that was busy during the calibration would
    else have dear rows for ever, for the sizes that are not tried are those that are not read.
    """

    __slots__ = ("_base", "_calibrated", "_calibration", "_drift", "_launches", "_own", "_readings")

    def __init__(self, calibration: Sequence[Measured]) -> None:
        self._base = self._calibrated = _fit(calibration)
        self._calibration = (*calibration,) if len(calibration) > 2 else self._usual()
        self._drift = 1.0
        self._launches = 0
        self._own: dict[tuple[int, int], tuple[float, int]] = {}  # factor, and when it was true
        self._readings: dict[tuple[int, int], _Readings] = {}

    def seconds(self, sessions: int, rows: int) -> float:
        """What such a launch takes."""
        return self._plain(sessions, rows) * self._drift * self._factor((sessions, rows))

    def observe(self, measured: Measured) -> None:
        """Correct by what a launch took."""
        size = (measured.sessions, measured.rows)
        surprise = measured.seconds / self.seconds(*size)
        surprise = min(max(surprise, 0.5), 2.0)
        if measured.seconds > 0:  # a clock too coarse to see a launch tells nothing of its size
            kept = self._readings.setdefault(size, _Readings())
            kept.add(measured.seconds / self._drift, self._launches)
        self._drift = min(max(self._drift * surprise**0.03, 1e-3), 1e3)
        self._launches += 1
        own = self._factor(size) * surprise**0.1
        self._own[size] = (min(max(own, 0.25), 4.0), self._launches)
        if self._launches % REFIT_EVERY == 0:
            self._refit()

    def _refit(self) -> None:
        """Fit to what was read of late, and to the calibration, the less the longer it is ago."""
        read = self._read()
        if not read:
            return
        weight = max(CALIBRATION_COUNTS * READINGS_FADE**self._launches, LEAST_CALIBRATION)
        scale = self._scale(read)
        known = [
            Measured(sessions=m.sessions, rows=m.rows, seconds=m.seconds * scale)
            for m in self._calibration
        ]
        weights = [weight] * len(known)
        for (sessions, rows), (seconds, counts) in read.items():
            known.append(Measured(sessions=sessions, rows=rows, seconds=seconds))
            weights.append(counts)
        self._base = _fit(known, weights)
        self._own = {}
        for size, (seconds, _) in read.items():
            readings = self._readings[size]
            own = min(max(seconds / self._plain(*size), 0.25), 4.0)
            share = readings.count / (readings.count + FEWEST)
            self._own[size] = (own**share, readings.newest)

    def _read(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Seconds by size and how many readings they count for; what is long ago is dropped."""
        weights = {size: kept.weight(self._launches) for size, kept in self._readings.items()}
        for size, weight in weights.items():
            if weight < LEAST_CALIBRATION:
                del self._readings[size]
        return {
            size: (kept.middle(), weights[size])
            for size, kept in self._readings.items()
            if kept.count >= FEWEST
        }

    def _scale(self, read: dict[tuple[int, int], tuple[float, float]]) -> float:
        """What makes the calibration as slow as the readings: it counts for its shape alone.

        A machine that has become slower has not become so for the sizes alone that are read now.
        """
        a, b, c = self._calibrated
        total = sum(weight for _, weight in read.values())
        logs = sum(
            weight * math.log(seconds / (a + b * sessions + c * rows))
            for (sessions, rows), (seconds, weight) in read.items()
        )
        return math.exp(logs / total)

    def _usual(self) -> tuple[Measured, ...]:
        """A calibration that says what `_fit` takes for usual."""
        return tuple(
            Measured(sessions=sessions, rows=rows, seconds=self._plain(sessions, rows))
            for sessions, rows in ((1, 1), (1, 8), (2, 8))
        )

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


class _Readings:
    """The newest durations of a size, each over the common factor of its time."""

    __slots__ = ("_seconds", "newest")

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=READINGS)
        self.newest = 0  # the launch of the last one

    @property
    def count(self) -> int:
        return len(self._seconds)

    def add(self, seconds: float, launch: int) -> None:
        self._seconds.append(seconds)
        self.newest = launch

    def weight(self, launch: int) -> float:
        """How many readings they count for at a launch."""
        return float(self.count * READINGS_FADE ** (launch - self.newest))

    def middle(self) -> float:
        """Mean of the middle half: a few outliers, however far out, do not move it."""
        ordered = sorted(self._seconds)
        cut = len(ordered) // 4
        return fmean(ordered[cut : len(ordered) - cut])


def _fit(
    known: Sequence[Measured], weights: Sequence[float] | None = None
) -> tuple[float, float, float]:
    """Least squares with no negative part; a usual shape where less than three were measured.

    With `weights` errors count in proportion to the seconds, as they are made.
    """
    if len(known) < 3:
        fastest = min((m.seconds for m in known), default=1e-3)
        return 0.8 * fastest, 0.1 * fastest, 0.1 * fastest
    size_N3 = np.array([[1.0, m.sessions, m.rows] for m in known])
    seconds_N = np.array([m.seconds for m in known])
    if weights is not None:
        root_N = np.sqrt(weights) / np.maximum(seconds_N, 1e-9)
        size_N3, seconds_N = size_N3 * root_N[:, None], seconds_N * root_N
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
