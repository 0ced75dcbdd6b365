"""`Decoding`: the next token of every reply under way, and drafted ones verified, in one launch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from civetta.engine.launch import Part, in_launches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from civetta.decode.draft import Draft
    from civetta.decode.shortlist import LogitRow
    from civetta.engine.attempt import Attempt
    from civetta.engine.job import Job
    from civetta.engine.launch import Launcher
    from civetta.engine.replies import Replies
    from civetta.engine.speculation import Speculation
    from civetta.engine.tally import Tally


class Decoding:
    """Computes the newest token of each reply, with drafts if any, and chooses what follows."""

    def __init__(
        self,
        launcher: Launcher,
        replies: Replies,
        tally: Tally,
        *,
        attempt: Attempt,
        clock: Callable[[], float],
        speculation: Speculation | None = None,
    ) -> None:
        self._speculation = speculation
        self._launcher, self._replies, self._tally = launcher, replies, tally
        self._attempt, self._clock = attempt, clock

    def run(self, jobs: Sequence[Job]) -> None:
        """One round: each job gets one token, and as many more as were drafted rightly."""
        began_s, before = self._clock(), self._tally.generated_tokens
        drafts = {} if self._speculation is None else self._speculation.propose(jobs)
        parts: list[Part] = []
        for job in jobs:
            self._attempt([job], partial(self._plan, job, drafts, parts))
        # A later reservation may have sent an earlier job back to the queue.
        for group in in_launches([part for part in parts if part.job.session is not None]):
            self._attempt([part.job for part in group], partial(self._launch, group, drafts))
        tokens, seconds = self._tally.generated_tokens - before, self._clock() - began_s
        self._tally.decoded(len(jobs), tokens, seconds)
        if self._speculation is not None:
            self._speculation.finished(
                replies=len(jobs), tokens=tokens, seconds=seconds, drafted=bool(drafts)
            )

    def _plan(self, job: Job, drafts: dict[int, Draft], parts: list[Part]) -> None:
        draft = drafts.get(job.key)
        if draft is not None and job.guide is not None:
            draft.cut(job.guide.fitting(draft.ids))
            if not draft.ids:
                del drafts[job.key]
                draft = None
        ids = [job.request.generated_ids[-1], *(draft.ids if draft else ())]
        if self._launcher.reserve(job, len(ids)):
            parts.append(Part(job=job, ids=ids, rows="all" if draft else "last"))

    def _launch(self, group: Sequence[Part], drafts: Mapping[int, Draft]) -> None:
        began_s = self._clock()
        for part in group:
            self._replies.expect(part.job, part.ids[1:])
        for part, rows in zip(group, self._launcher.run(group), strict=True):
            draft = drafts.get(part.job.key)
            self._attempt([part.job], partial(self._accept, part.job, rows, draft))
            now_s = self._clock()
            if part.job.delivered_s is not None:
                self._tally.delivered(now_s - part.job.delivered_s)
            part.job.delivered_s = now_s
        if self._speculation is not None:
            self._speculation.launched(
                sessions=len(group),
                rows=sum(part.n_rows for part in group),
                seconds=self._clock() - began_s,
            )

    def _accept(self, job: Job, rows: Sequence[LogitRow], draft: Draft | None) -> None:
        if draft is None:
            if self._replies.accept(job, self._replies.sample(job, rows[-1])):
                self._launcher.expect_newest(job)
            return
        verdict = self._replies.judge(job, draft.ids, rows)
        job.live.rewind(verdict.surplus)
        job.live.trim()
        job.request.drafted(len(draft.ids), verdict.accepted)
        self._tally.drafted(len(draft.ids), verdict.accepted)
        if self._speculation is not None:
            self._speculation.judged(job, draft, verdict.accepted)
        for sampled, ahead in zip(
            verdict.tokens, reversed(range(len(verdict.tokens))), strict=True
        ):
            job.ahead = ahead
            if not self._replies.accept(job, sampled):
                return
        self._launcher.expect_newest(job)
