"""Requests with the same cold prefix: one computes it, the others wait for its state.

A waiting request parks behind one that is ahead of it (running, or before it in the queue) and
will compute at least SHARE_TOKENS tokens that the waiting one needs too and cannot restore. The
leader's launch then ends where the two prompts part, its state is kept there, and the follower
is admitted and restores it. A leader that ends, goes back or has passed the place sets its
followers free; nobody parks behind the same request twice, so nobody waits for ever.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from civetta.cache.protocol import KeepKind
from civetta.engine.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from civetta.cache.protocol import ContinuationCache, ImageMark
    from civetta.engine.job import Job

SHARE_TOKENS = 256
"""Waiting is worth while from so many tokens on: a few pages, a fraction of one prefill batch."""

_AHEAD = (RequestState.QUEUED, RequestState.RESTORING, RequestState.PREFILLING)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix; compares slices, which run at memory speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def first_difference(a: Sequence[ImageMark], b: Sequence[ImageMark]) -> int | None:
    """Where two prompts' images part: the first token of one that the other has not."""
    for mine, theirs in zip_longest(a, b):
        if mine != theirs:
            return min(mark.position for mark in (mine, theirs) if mark is not None)
    return None


class SharedPrefixes:
    """Decides who parks, and tells leaders where to keep their state."""

    def __init__(self, cache: ContinuationCache, *, clock: Callable[[], float]) -> None:
        self._cache, self._clock = cache, clock

    def admissible(self, waiting: Sequence[Job], running: Sequence[Job]) -> list[Job]:
        """Those of the queue, in its order, that wait for nobody's prefix."""
        ahead = [job for job in running if job.request.state in _AHEAD]
        free = []
        for job in waiting:
            if not self._parked(job, ahead):
                free.append(job)
                ahead.append(job)
        return free

    def _parked(self, job: Job, ahead: Sequence[Job]) -> bool:
        parking = job.parking
        if parking.leader is not None:
            if (
                parking.leader in ahead
                and parking.leader.request.prefilled_tokens < parking.position
            ):
                return True
            parking.leader = None
            parking.wait_s += self._clock() - parking.since_s
        return any(other.key not in parking.met and self._park(job, other) for other in ahead)

    def _park(self, job: Job, other: Job) -> bool:
        """Look at one request ahead, once; whether to wait for it."""
        parking = job.parking
        parking.met.add(other.key)
        if not job.request.uses_cache:
            return False
        ids = job.request.spec.prompt_ids
        shared = min(common_prefix(ids, other.request.spec.prompt_ids), len(ids) - 1)
        parting = first_difference(job.images, other.images)
        shared = shared if parting is None else min(shared, parting)
        if shared < SHARE_TOKENS or other.request.prefilled_tokens >= shared:
            return False
        if shared - self._cache.find(ids, job.images).cached_tokens < SHARE_TOKENS:
            return False
        parking.leader, parking.position, parking.since_s = other, shared, self._clock()
        other.keep_at.setdefault(shared, KeepKind.SHARED)
        return True
