"""When drafts are tried where they do not pay: ever later while trials fail.

Rounds are counted, never time, so that what is tried does not hang on the machine's mood alone.
"""

from __future__ import annotations


class Backoff:
    """Rounds to wait before the next trial: none at first, doubled by each that fails.

    `shortest` and `longest` bound the wait once a trial has failed.
    """

    __slots__ = ("_longest", "_quiet", "_shortest", "wait")

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._quiet = 0
        self.wait = 0

    @property
    def due(self) -> bool:
        """Whether the wait is over."""
        return self._quiet >= self.wait

    def passed(self, rounds: int) -> None:
        """So many rounds went by without drafts, for none paid."""
        self._quiet += rounds

    def judged(self, *, stood: bool) -> None:
        """After a verdict: a trial that stood is followed up at once, one that failed is not."""
        self._quiet = 0
        self.wait = 0 if stood else min(max(2 * self.wait, self._shortest), self._longest)
