"""What drafting may cost: an account in rounds without drafts, so that a loss is bounded.

A round with drafts is booked at what it really saved or lost beside plain rounds, as they were
measured. Every round pays a small share in. Nothing is drafted while the account is in debt: a head
that is of no use loses the start and that share, whatever its estimates promise.

No clock here; durations are arguments, in seconds. Only speed depends on it.
"""

from __future__ import annotations

from collections import deque
from statistics import median

START_ROUNDS = 6.0
"""What may be lost before anything is known."""
SHARE = 0.01
"""Paid in by every round: the part of the time that trials may lose for ever."""
MOST_ROUNDS = 48.0
WORST_ROUND = 3.0
"""A single round loses so many at most: a machine that stopped for a moment says nothing."""
PLAIN_KEPT = 5
REFRESH = 64
"""Rounds with drafts before one without is due, to know what those take now."""


class Purse:
    """Rounds in hand, and what plain rounds take by the number of replies in them."""

    __slots__ = ("_drafted", "_plain", "rounds")

    def __init__(self) -> None:
        self.rounds = START_ROUNDS
        self._plain: dict[int, deque[float]] = {}
        self._drafted = 0

    @property
    def open(self) -> bool:
        """Whether drafts may be made in the next round."""
        return self.rounds > 0 and self._drafted < REFRESH

    def plain(self, replies: int, seconds: float) -> None:
        """Book a round without drafts."""
        self._drafted = 0
        self._plain.setdefault(replies, deque(maxlen=PLAIN_KEPT)).append(seconds)
        self._pay(SHARE)

    def drafted(self, replies: int, tokens: int, seconds: float, *, expected_s: float) -> None:
        """Book a round with drafts. `expected_s`: what a plain one takes where none was measured."""
        self._drafted += 1
        seen = self._plain.get(replies)
        plain_s = (median(seen) if seen else 0.0) or expected_s
        saved = tokens / replies - seconds / plain_s
        self._pay(SHARE + max(saved, -WORST_ROUND))

    def _pay(self, rounds: float) -> None:
        self.rounds = min(self.rounds + rounds, MOST_ROUNDS)
