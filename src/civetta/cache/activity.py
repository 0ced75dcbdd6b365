"""`Activity`: which conversations count as active, whose last states newcomers do not displace."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from civetta.cache.policy import eviction_order, is_last_copy
from civetta.cache.returns import ReturnTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.cache.policy import KeepPolicy, Kept


class Activity:
    """Learns from returns, apart for conversations that came back before and for new ones."""

    def __init__(self, policy: KeepPolicy) -> None:
        self._policy = policy
        self._new, self._reused = ReturnTimes(), ReturnTimes()

    def returned(self, hits: int, idle_s: float) -> None:
        """Somebody came back to a conversation's last state, for the time `hits` + 1."""
        self._of(hits).returned(idle_s)

    def lost(self, hits: int, idle_s: float) -> None:
        """A conversation's last state was given up."""
        self._of(hits).lost(idle_s)

    def policy(self, states: Sequence[Kept]) -> KeepPolicy:
        """The policy with what traffic says of how long conversations stay away."""
        ends = [kept for kept in states if kept.lineages == 0]
        return replace(
            self._policy,
            new_active_s=self._new.active_s(
                (kept.idle_s for kept in ends if not kept.hits),
                at_most_s=self._policy.new_active_s,
            ),
            reused_active_s=self._reused.active_s(
                (kept.idle_s for kept in ends if kept.hits),
                at_most_s=self._policy.reused_active_s,
            ),
        )

    def left(self, states: Sequence[Kept], *, absent_s: float, needed_bytes: int) -> list[int]:
        """States to hold no longer, now that a conversation came back in vain after `absent_s`.

        As many as give `needed_bytes`, beside what may go anyway. Conversations that spoke not
        much earlier keep theirs: they are as likely to come back, and taking turns nobody would be
        served.
        """
        by_entry = {kept.entry: kept for kept in states}
        policy = self.policy(states)
        found: list[int] = []
        for entry in eviction_order(states, policy, forced=True):
            if needed_bytes <= 0:
                break
            kept = by_entry[entry]
            if is_last_copy(kept, policy):
                if kept.idle_s <= policy.outlived * absent_s:
                    continue
                found.append(entry)
            needed_bytes -= kept.freed_bytes
        return found

    def _of(self, hits: int) -> ReturnTimes:
        return self._reused if hits else self._new
