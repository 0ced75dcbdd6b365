"""`Decoding`: the next token of every reply under way, in one launch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from civetta.engine.launch import Part, in_launches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from civetta.engine.attempt import Attempt
    from civetta.engine.job import Job
    from civetta.engine.launch import Launcher
    from civetta.engine.replies import Replies
    from civetta.engine.tally import Tally


class Decoding:
    """Computes the newest token of each reply and chooses the one after it."""

    def __init__(
        self,
        launcher: Launcher,
        replies: Replies,
        tally: Tally,
        *,
        attempt: Attempt,
        clock: Callable[[], float],
    ) -> None:
        self._launcher, self._replies, self._tally = launcher, replies, tally
        self._attempt, self._clock = attempt, clock

    def run(self, jobs: Sequence[Job]) -> None:
        """One round: each job gets one token."""
        began_s = self._clock()
        parts: list[Part] = []
        for job in jobs:
            self._attempt([job], partial(self._plan, job, parts))
        # A later reservation may have sent an earlier job back to the queue.
        for group in in_launches([part for part in parts if part.job.session is not None]):
            self._attempt([part.job for part in group], partial(self._launch, group))
        self._tally.decode_s += self._clock() - began_s

    def _plan(self, job: Job, parts: list[Part]) -> None:
        if self._launcher.reserve(job, 1):
            parts.append(Part(job=job, ids=job.request.generated_ids[-1:], rows="last"))

    def _launch(self, group: Sequence[Part]) -> None:
        for part, rows_RV in zip(group, self._launcher.run(group), strict=True):
            self._attempt([part.job], partial(self._accept, part.job, rows_RV))

    def _accept(self, job: Job, rows_RV: NDArray[np.float32]) -> None:
        if self._replies.accept(job, self._replies.sample(job, rows_RV[-1])):
            self._launcher.expect_newest(job)
