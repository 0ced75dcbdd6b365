"""Mean, range and standard deviation of repeated figures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """`sd` is the sample standard deviation, 0 for a single figure."""

    mean: float
    median: float
    low: float
    high: float
    sd: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """Of one figure or more."""
        return cls(
            mean=statistics.fmean(figures),
            median=statistics.median(figures),
            low=min(figures),
            high=max(figures),
            sd=statistics.stdev(figures) if len(figures) > 1 else 0.0,
        )
