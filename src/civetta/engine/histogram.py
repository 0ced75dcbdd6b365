"""`Histogram`: how often a duration fell into each of fixed ranges; one writer, any reader."""

from __future__ import annotations

from bisect import bisect_left

from civetta.engine.protocol import HistogramStats

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)
WHOLE_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class Histogram:
    """Counts seconds by upper bound; `bounds_s` ascend, what is above the last has a place too."""

    __slots__ = ("_bounds_s", "_counts", "_sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration; a bound itself belongs to the range below it."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def stats(self) -> HistogramStats:
        """The counts now."""
        return HistogramStats(
            bounds_s=self._bounds_s, counts=tuple(self._counts), sum_s=self._sum_s
        )
