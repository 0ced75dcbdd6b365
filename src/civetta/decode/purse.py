"""What drafting may cost: an account in rounds without drafts, so that a loss is bounded.

A round with drafts is booked at what it really saved or lost beside plain rounds, as they were
measured. It has a plain round's work in it and more, so it never counts as quicker than one: a
machine that was slow while plain rounds were measured would make useless drafts look good. Rounds
pay a small share in, those whose drafts all failed do not. Nothing is drafted while the account is
in debt: a head that is of no use loses the start and that share, whatever its estimates promise.

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
FAILED_COUNTS = 8
"""A round in which no draft stood counts for so many of them: where nothing is gained, what a plain
round takes matters most."""


class Purse:
    """Rounds in hand, and what plain rounds take by the number of replies in them."""

    __slots__ = ("_plain", "_since_plain", "rounds")

    def __init__(self) -> None:
        self.rounds = START_ROUNDS
        self._plain: dict[int, deque[float]] = {}
        self._since_plain = 0

    @property
    def open(self) -> bool:
        """Whether drafts may be made in the next round."""
        return self.rounds > 0 and self._since_plain < REFRESH

    def plain(self, replies: int, seconds: float) -> None:
        """Book a round without drafts."""
        self._since_plain = 0
        self._plain.setdefault(replies, deque(maxlen=PLAIN_KEPT)).append(seconds)
        self._pay(SHARE)

    def drafted(self, replies: int, tokens: int, seconds: float, *, expected_s: float) -> None:
        """Book a round with drafts. `expected_s`: what a plain one takes where none was measured."""
        seen = self._plain.get(replies)
        plain_s = (median(seen) if seen else 0.0) or expected_s
        saved = tokens / replies - max(seconds / plain_s, 1.0)
        stood = tokens > replies
        self._since_plain += 1 if stood else FAILED_COUNTS
        self._pay((SHARE if stood else 0.0) + max(saved, -WORST_ROUND))

    def _pay(self, rounds: float) -> None:
        self.rounds = min(self.rounds + rounds, MOST_ROUNDS)
