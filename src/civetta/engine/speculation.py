"""`Speculation`: drafts for a round of decoding, as long as they pay.

For every round: look the newest tokens up in each reply's own text, choose lengths for all replies
together (decode/lengths.py), let the head draft, drop what turned out unlikely. After the round:
learn from what stood and from what it took. When no length pays there are no drafts but a trial of
one: ever later for a reply whose trials failed, and ever later for all replies while nobody's stand
(decode/trials.py). What all that may lose is bounded by an account of measured time
(decode/purse.py).

Nothing here can fail a request: a fault ends drafting, not the reply.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from civetta.decode.draft import (
    Draft,
    Drafter,
    DraftTask,
    LookupDrafter,
    MtpDrafter,
    lookup_grade,
)
from civetta.decode.lengths import (
    MOST_DRAFTS,
    Acceptance,
    LengthPlan,
    Measured,
    Prospect,
    RoundCost,
    plan_lengths,
)
from civetta.decode.lookup import TextIndex
from civetta.decode.purse import Purse
from civetta.decode.trials import Backoff
from civetta.errors import EngineBusy
from civetta.log import log_event
from civetta.model.mtp import can_draft

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from civetta.engine.job import Job
    from civetta.errors import CivettaError
    from civetta.model.mtp import MtpHead
    from civetta.state.session import Session

_log = logging.getLogger(__name__)

SHORTEST_RETRY = 16
LONGEST_RETRY = 2048
"""Rounds without drafts before a reply gets a trial again: doubles while trials fail."""
SHORTEST_GAP = 2
LONGEST_GAP = 64
"""Rounds without drafts before anybody gets one again: doubles while nobody's drafts stand."""
LONGEST_REST = 7
"""Rounds that are not even planned: while nothing pays, little has changed from one to the next."""
TRIAL_ROUNDS = 1.0
"""In hand for a trial; twice that for trials of all replies that are due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How to draft. `head` for mode "mtp"; `most` drafts a reply and round.

    `fixed` always drafts `most`, for measurements and tests. `launches` and `steps` are the
    calibration of this machine (calibrate.py).
    """

    mode: Literal["mtp", "lookup"]
    most: int
    head: MtpHead | None = None
    fixed: bool = False
    launches: tuple[Measured, ...] = ()
    steps: tuple[Measured, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Reply:
    """What is known of one reply: its tokens, how its drafts fared, and when to try again."""

    text: TextIndex
    accepted: Acceptance
    trials: Backoff


class _Kind:
    """What rounds of one kind taught: those of text alone, or those with images in a reply.

    Neither teaches the other: what images make a model say is foreseen otherwise than text
    (`accepted`, of replies), what rounds take follows the contexts they are at, and a trial behind
    a picture costs text neither its account, nor its rest, nor its wait for the next (`trials`).
    """

    __slots__ = ("accepted", "launch", "purse", "rest", "resting", "steps", "trials")

    def __init__(self, drafting: Drafting) -> None:
        self.launch, self.steps = RoundCost(drafting.launches), RoundCost(drafting.steps)
        self.accepted, self.purse = Acceptance(), Purse()
        self.trials = Backoff(shortest=SHORTEST_GAP, longest=LONGEST_GAP)
        self.resting, self.rest = 0, 0  # rounds still to go unplanned, of how many


@dataclass(slots=True, kw_only=True)
class _Round:
    """One round in the making: tasks, what each may bring, and the plan."""

    jobs: list[Job]
    tasks: list[DraftTask]
    replies: list[_Reply]
    prospects: list[Prospect]
    plan: LengthPlan


class Speculation:
    """Proposes drafts and learns. Used by the step thread alone.

    `guard` runs an action and returns its fault instead of raising it. `announce(session, ids)` is
    told what a session's next launch will begin with, so that it is read ahead.
    """

    def __init__(
        self,
        drafting: Drafting,
        *,
        clock: Callable[[], float],
        guard: Callable[[Callable[[], None]], CivettaError | None],
        announce: Callable[[Session, Sequence[int]], None] | None = None,
    ) -> None:
        assert 1 <= drafting.most <= MOST_DRAFTS, "more drafts than a sequence can take back"
        assert (drafting.head is not None) == (drafting.mode == "mtp")
        self._drafting, self._clock, self._guard = drafting, clock, guard
        self._lookup: Drafter = LookupDrafter()
        self._mtp: Drafter | None = None
        if drafting.head is not None:
            self._mtp = MtpDrafter(drafting.head, announce)
        self._kinds = {images: _Kind(drafting) for images in (False, True)}
        self._kind = self._kinds[False]  # of the round under way
        self._replies: dict[int, _Reply] = {}
        self._broken = False

    def propose(self, jobs: Sequence[Job]) -> dict[int, Draft]:
        """Drafts by job key, for the jobs that get any. Pages for them are reserved. Never raises."""
        drafts: dict[int, Draft] = {}
        self._kind = self._kinds[any(job.request.spec.images for job in jobs)]
        if self._broken or self._rests(jobs):
            return drafts
        if self._guard(lambda: self._propose(jobs, drafts)) is not None:
            self._broken = True
            log_event(_log, logging.ERROR, "drafting_stopped", mode=self._drafting.mode)
            return {}
        for job in jobs:
            if job.key in drafts and not drafts[job.key].ids:
                job.live.trim()  # of the pages for drafts that were not drawn
        return {key: draft for key, draft in drafts.items() if draft.ids}

    def finished(self, *, replies: int, tokens: int, seconds: float, drafted: bool) -> None:
        """Learn what a whole round took, with drafts in it or without."""
        if drafted:
            expected_s = self._kind.launch.seconds(replies, replies)
            self._kind.purse.drafted(replies, tokens, seconds, expected_s=expected_s)
            self._kind.trials.judged(stood=tokens > replies)
        else:
            self._kind.purse.plain(replies, seconds)

    def launched(self, *, sessions: int, rows: int, seconds: float) -> None:
        """Learn what a round's launch and choice of tokens took."""
        self._kind.launch.observe(Measured(sessions=sessions, rows=rows, seconds=seconds))

    def judged(self, job: Job, draft: Draft, accepted: int) -> None:
        """Learn how many of a reply's drafts stood."""
        reply = self._replies.get(job.key)
        if reply is not None:
            reply.accepted.record(draft.grades, accepted, by_depth=not draft.looked_up)
            reply.trials.judged(stood=accepted > 0)

    # ---- a round -------------------------------------------------------------------------------

    def _propose(self, jobs: Sequence[Job], drafts: dict[int, Draft]) -> None:
        round_ = self._plan([job for job in jobs if not job.alone])
        if round_ is None:
            return
        for drafter, free in ((self._lookup, True), (self._mtp, False)):
            places = [i for i, p in enumerate(round_.prospects) if p.free == free and p.chances]
            if drafter is None or not places:
                continue
            began_s = self._clock()
            found = drafter.propose(
                [round_.tasks[i] for i in places],
                partial(self._goes_on, round_, places),
            )
            if not free:
                self._stepped(found, self._clock() - began_s)
            for i, draft in zip(places, found, strict=True):
                draft.looked_up = free
                self._drop_unlikely(round_, i, draft)
                drafts[round_.jobs[i].key] = draft

    def _rests(self, jobs: Sequence[Job]) -> bool:
        """Whether this round goes unplanned: nothing paid of late, or nothing may be lost."""
        if self._drafting.fixed:
            return False
        if self._kind.resting and all(job.key in self._replies for job in jobs):
            self._kind.resting -= 1
            return True
        self._kind.resting = 0
        return not self._kind.purse.open

    def _plan(self, jobs: Sequence[Job]) -> _Round | None:
        """Tasks and lengths; None when nobody may draft, or nothing pays."""
        self._forget(jobs)
        able = [(job, reply, most) for job in jobs for reply, most in [self._room(job)] if most]
        if not able:
            return None
        tasks = [_task(job, reply, most) for job, reply, most in able]
        replies = [reply for _, reply, _ in able]
        prospects = [self._prospect(t, r) for t, r in zip(tasks, replies, strict=True)]
        others = [Prospect(chances=())] * (len(jobs) - len(able))
        plan = plan_lengths([*prospects, *others], self._kind.launch, self._kind.steps)
        if self._drafting.fixed:
            plan = replace(plan, lengths=tuple(t.most for t in tasks))
        elif not any(plan.lengths):
            plan = self._tried(plan, prospects, replies)
        round_ = _Round(
            jobs=[job for job, _, _ in able],
            tasks=tasks,
            replies=replies,
            prospects=prospects,
            plan=replace(plan, lengths=self._reserved(tasks, plan.lengths)),
        )
        return round_ if self._worth_a_round(round_) else None

    def _room(self, job: Job) -> tuple[_Reply, int]:
        """A job's books, and how many drafts it has tokens for."""
        request, session = job.request, job.live
        reply = self._replies.get(job.key)
        if reply is None:
            known = self._kinds[bool(request.spec.images)].accepted
            trials = Backoff(shortest=SHORTEST_RETRY, longest=LONGEST_RETRY)
            reply = _Reply(text=TextIndex(), accepted=Acceptance(known), trials=trials)
            self._replies[job.key] = reply
        text = reply.text
        if not len(text):
            text.append(request.spec.prompt_ids)
        text.append(request.generated_ids[len(text) - request.prompt_tokens :])
        most = min(self._drafting.most, session.limit - session.position - 2)
        if request.spec.max_tokens is not None:
            most = min(most, request.spec.max_tokens - len(request.generated_ids) - 1)
        return reply, max(most, 0)

    def _reserved(self, tasks: Sequence[DraftTask], lengths: Sequence[int]) -> tuple[int, ...]:
        """The lengths, with pages for as many drafts as may be drawn; 0 where there are none."""
        kept = list(lengths)
        for place, task in enumerate(tasks):
            if kept[place]:
                try:
                    task.session.reserve(1 + task.most)
                except EngineBusy:  # drafts never take pages from anybody
                    kept[place] = 0
        return tuple(kept)

    def _worth_a_round(self, round_: _Round) -> bool:
        """Whether anything is drafted; if not, rest for longer than the last time."""
        if any(round_.plan.lengths):
            self._kind.rest = 0
            return True
        for trials in (self._kind.trials, *(reply.trials for reply in round_.replies)):
            trials.passed(1 + self._kind.rest)
        self._kind.rest = min(2 * self._kind.rest + 1, LONGEST_REST)
        self._kind.resting = self._kind.rest
        return False

    def _prospect(self, task: DraftTask, reply: _Reply) -> Prospect:
        """What drafting may bring: from the text where that promises more than the head."""
        _, match = task.text.continuation(1)
        accepted = reply.accepted
        by_text = accepted.grade(lookup_grade(match)) if match else 0.0
        has_head = self._mtp is not None and can_draft(task.session)
        by_head = accepted.depth(0) if has_head else 0.0
        if by_text and by_text >= by_head:
            return Prospect(chances=tuple(by_text ** (d + 1) for d in range(task.most)), free=True)
        chances: list[float] = []
        chance = 1.0
        for depth in range(task.most if has_head else 0):
            chance *= accepted.depth(depth)
            chances.append(chance)
        return Prospect(chances=tuple(chances))

    def _tried(
        self, plan: LengthPlan, prospects: Sequence[Prospect], replies: Sequence[_Reply]
    ) -> LengthPlan:
        """The plan, with a draft for replies whose trial is due; for one where nobody's stand."""
        due = [
            place
            for place, (prospect, reply) in enumerate(zip(prospects, replies, strict=True))
            if prospect.chances and reply.trials.due
        ]
        purse, trials = self._kind.purse, self._kind.trials
        if not due or not trials.due or purse.rounds < TRIAL_ROUNDS:
            return plan
        if purse.rounds < 2 * TRIAL_ROUNDS or trials.wait:
            # The one that failed least: new replies come first.
            due = [min(due, key=lambda i: (replies[i].trials.wait, -prospects[i].chances[0]))]
        chosen = set(due)
        return replace(plan, lengths=tuple(int(i in chosen) for i in range(len(plan.lengths))))

    def _goes_on(self, round_: _Round, places: Sequence[int], nth: int, draft: Draft) -> bool:
        """Whether one more draft of a reply is worth a step and a row, by what is known now."""
        place = places[nth]
        planned, drawn = round_.plan.lengths[place], len(draft.ids)
        if self._drafting.fixed or not planned:
            return planned > 0
        if drawn == 0:
            return True
        accepted, prospect = round_.replies[place].accepted, round_.prospects[place]
        if prospect.free:
            return drawn < planned
        chance = self._chance(accepted, draft) * accepted.depth(drawn)
        active = sum(
            1
            for n, p in zip(round_.plan.lengths, round_.prospects, strict=False)
            if n and not p.free
        )
        step_s = self._kind.steps.seconds(1, active) / max(active, 1)
        return chance >= round_.plan.tokens_a_second * (step_s + self._row_s(round_))

    def _drop_unlikely(self, round_: _Round, place: int, draft: Draft) -> None:
        """Keep the drafts that are worth a row of the launch; at least the first."""
        if self._drafting.fixed:
            return
        worth = round_.plan.tokens_a_second * self._row_s(round_)
        accepted, chance = round_.replies[place].accepted, 1.0
        for depth, grade in enumerate(draft.grades):
            chance *= accepted.grade(grade)
            if depth and chance < worth:
                draft.cut(depth)
                return

    def _chance(self, accepted: Acceptance, draft: Draft) -> float:
        chance = 1.0
        for grade in draft.grades:
            chance *= accepted.grade(grade)
        return chance

    def _row_s(self, round_: _Round) -> float:
        """Seconds that one more row costs in this round's launch."""
        count = len(round_.plan.lengths)
        drafts = max(sum(round_.plan.lengths), 1)
        more = self._kind.launch.seconds(count, count + drafts) - self._kind.launch.seconds(
            count, count
        )
        return max(more / drafts, 0.0)

    def _stepped(self, drafts: Sequence[Draft], seconds: float) -> None:
        drawn = [len(draft.ids) for draft in drafts if draft.ids]
        if drawn:
            self._kind.steps.observe(
                Measured(sessions=max(drawn), rows=sum(drawn), seconds=seconds)
            )

    def _forget(self, jobs: Sequence[Job]) -> None:
        """Drop the books of replies that ended; one that only waits pays with its counts."""
        if len(self._replies) > 2 * len(jobs) + 16:
            running = {job.key for job in jobs}
            self._replies = {key: r for key, r in self._replies.items() if key in running}


def _task(job: Job, reply: _Reply, most: int) -> DraftTask:
    return DraftTask(
        session=job.live,
        next_id=job.request.generated_ids[-1],
        params=job.request.spec.sampling,
        history=job.begun.history,
        text=reply.text,
        most=most,
    )
