"""`Prefill`: prompt chunks of one or several requests in one launch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from civetta.engine.launch import Part, in_launches
from civetta.engine.protocol import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from civetta.engine.attempt import Attempt
    from civetta.engine.job import Job
    from civetta.engine.launch import Launcher
    from civetta.engine.replies import Replies
    from civetta.engine.tally import Tally


class Prefill:
    """Computes prompts, and the first token of those that are complete."""

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

    def run(self, chunks: Sequence[tuple[Job, int]]) -> None:
        """Compute so many of each job's next prompt tokens."""
        parts: list[Part] = []
        for job, n_tokens in chunks:
            self._attempt([job], partial(self._plan, job, n_tokens, parts))
        # A later reservation may have sent an earlier job back to the queue.
        for group in in_launches([part for part in parts if part.job.session is not None]):
            self._attempt([part.job for part in group], partial(self._launch, group))

    def _plan(self, job: Job, n_tokens: int, parts: list[Part]) -> None:
        if self._launcher.reserve(job, n_tokens):
            is_last = n_tokens == job.request.prompt_left
            parts.append(
                Part(
                    job=job,
                    ids=job.request.next_prompt_ids(n_tokens),
                    rows="last" if is_last else "none",
                )
            )

    def _launch(self, group: Sequence[Part]) -> None:
        began_s = self._clock()
        logits = self._launcher.run(group)
        self._tally.prefilled(sum(len(part.ids) for part in group), self._clock() - began_s)
        for part, rows_RV in zip(group, logits, strict=True):
            self._attempt([part.job], partial(self._computed, part, rows_RV))

    def _computed(self, part: Part, rows_RV: NDArray[np.float32]) -> None:
        job, request = part.job, part.job.request
        request.prefilled(len(part.ids), now_s=self._clock())
        if not request.generated_ids:  # a request that was put back has told this before
            job.outbox.put(
                Progress(
                    processed_tokens=request.prefilled_tokens, prompt_tokens=request.prompt_tokens
                )
            )
        if len(rows_RV):
            self._replies.accept(job, self._replies.sample(job, rows_RV[-1]))
