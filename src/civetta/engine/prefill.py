"""`Prefill`: prompt chunks of one or several requests in one launch.

A launch ends where a state is to be kept: a chunk with such a place inside takes two launches in
the same step. No bit of a reply depends on where launches end.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from civetta.engine.launch import Part, in_launches
from civetta.engine.protocol import Progress
from civetta.engine.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from civetta.cache.protocol import ContinuationCache
    from civetta.decode.shortlist import LogitRow
    from civetta.engine.attempt import Attempt
    from civetta.engine.image_work import ImageWork
    from civetta.engine.job import Job
    from civetta.engine.launch import Launcher
    from civetta.engine.replies import Replies
    from civetta.engine.tally import Tally


SCORED_ROWS = 64
"""Prompt tokens a step of a request that wants their log-probabilities: each is a row of logits."""


class Prefill:
    """Computes prompts, and the first token of those that are complete.

    `chunk_tokens`: prompt tokens that a reply may have to wait for between two of its own.
    `given(job, n_tokens)` is told what a job's client got of the step: what it was dealt and did
    not get, because the step ended or others were in need of its pages, is not the client's.
    """

    def __init__(
        self,
        launcher: Launcher,
        cache: ContinuationCache,
        replies: Replies,
        tally: Tally,
        images: ImageWork,
        *,
        chunk_tokens: int,
        given: Callable[[Job, int], None],
        attempt: Attempt,
        clock: Callable[[], float],
    ) -> None:
        self._launcher, self._cache = launcher, cache
        self._replies, self._tally = replies, tally
        self._images, self._attempt, self._clock = images, attempt, clock
        self._chunk_tokens, self._given = chunk_tokens, given

    def run(self, chunks: Sequence[tuple[Job, int]]) -> None:
        """Compute so many of each job's next prompt tokens, in one launch but for kept states.

        A chunk waits until the images in it are encoded; for one of those that wait, one step of
        that work is done.
        """
        left = {job.key: (job, n_tokens) for job, n_tokens in self._encoded(chunks)}
        jobs = [job for job, _ in left.values()]
        while left:
            parts: list[Part] = []
            for job, n_tokens in left.values():
                self._attempt([job], partial(self._plan, job, n_tokens, parts))
            # A later reservation may have sent an earlier job back to the queue.
            parts = [part for part in parts if part.job.session is not None]
            left = {part.job.key: left[part.job.key] for part in parts}
            for group in in_launches(parts):
                if self._keeps_waiting(jobs, left):
                    return
                for part in group:
                    self._given(part.job, len(part.ids))
                self._attempt([part.job for part in group], partial(self._launch, group))
                _subtract(group, left)

    def _keeps_waiting(self, jobs: Sequence[Job], left: Mapping[int, tuple[Job, int]]) -> bool:
        """Whether a reply that began in this step would wait too long for its next token.

        The next step deals out anew what is left then, a chunk at a time.
        """
        return sum(n_left for _, n_left in left.values()) > self._chunk_tokens and any(
            job.request.state is RequestState.DECODING for job in jobs
        )

    def expect(self, job: Job, n_tokens: int) -> None:
        """Have read what a job's next launch needs, which a step makes of `n_tokens` tokens."""
        size = _first_launch(job, n_tokens)
        self._launcher.expect(job, job.request.next_prompt_ids(size))

    def _encoded(self, chunks: Sequence[tuple[Job, int]]) -> list[tuple[Job, int]]:
        waits = [(job, n_tokens) for job, n_tokens in chunks if self._images.lacks(job, n_tokens)]
        if waits:
            job, n_tokens = waits[0]
            self._given(job, n_tokens)  # this work takes the place of its chunk
            owner = self._images.next_owner(job)
            self._attempt([owner], partial(self._images.advance, owner, n_tokens))
        waiting = {job.key for job, _ in waits}
        return [(job, n_tokens) for job, n_tokens in chunks if job.key not in waiting]

    def _plan(self, job: Job, n_tokens: int, parts: list[Part]) -> None:
        if not self._launcher.reserve(job, n_tokens):
            return
        request, here = job.request, job.live.position
        size = _first_launch(job, n_tokens)
        # What is left of this step comes next, or a step as long as this one.
        coming = min(n_tokens - size or n_tokens, request.prompt_left - size)
        coming = _up_to(job.next_stop(after=here + size), here + size, coming)
        ids = request.next_prompt_ids(size + coming)
        parts.append(
            Part(
                job=job,
                ids=ids[:size],
                next_ids=ids[size:],
                rows="all" if request.scores else "last" if size == request.prompt_left else "none",
                images=self._images.rows(job, size),
            )
        )

    def _launch(self, group: Sequence[Part]) -> None:
        began_s = self._clock()
        for part in group:
            if len(part.ids) == part.job.request.prompt_left:
                self._replies.expect(part.job)
        logits = self._launcher.run(group)
        self._tally.prefilled(sum(len(part.ids) for part in group), self._clock() - began_s)
        for part, rows in zip(group, logits, strict=True):
            self._attempt([part.job], partial(self._computed, part, rows))

    def _computed(self, part: Part, rows: Sequence[LogitRow]) -> None:
        job, request = part.job, part.job.request
        if part.rows == "all":
            self._replies.score(job, rows)
        request.prefilled(len(part.ids), now_s=self._clock())
        self._images.release(job)
        kind = job.keep_at.pop(job.live.position, None)
        if kind is not None:
            self._cache.keep(job.live, kind, job.images)
        if not request.generated_ids:  # a request that was put back has told this before
            job.outbox.put(
                Progress(
                    processed_tokens=request.prefilled_tokens, prompt_tokens=request.prompt_tokens
                )
            )
        if len(rows):
            self._tell_first(job)
        if request.prompt_left:
            return
        if request.spec.max_tokens == 0:
            self._replies.read_only(job)
        elif self._replies.accept(job, self._replies.sample(job, rows[-1])):
            self._launcher.expect_newest(job)

    def _tell_first(self, job: Job) -> None:
        job.delivered_s = now_s = self._clock()
        if not job.request.generated_ids:
            self._tally.first_token(job.request.usage(now_s=now_s))


def _subtract(group: Sequence[Part], left: dict[int, tuple[Job, int]]) -> None:
    """Take what was launched off what the step has left; what is not to go on in it goes out."""
    for part in group:
        job, n_tokens = left.pop(part.job.key)
        goes_on = (
            n_tokens > len(part.ids)
            and job.request.state is RequestState.PREFILLING
            and part.rows != "all"  # its rows cost more than its tokens: a launch a step
        )
        if goes_on:
            left[job.key] = (job, n_tokens - len(part.ids))


def _first_launch(job: Job, n_tokens: int) -> int:
    """How many of the `n_tokens` prompt tokens that a step computes come in its first launch."""
    here = job.live.position
    return _up_to(job.next_stop(after=here), here, n_tokens)


def _up_to(stop: int | None, here: int, n_tokens: int) -> int:
    """`n_tokens` from `here` on, or fewer where a launch has to end."""
    return n_tokens if stop is None else min(n_tokens, stop - here)
