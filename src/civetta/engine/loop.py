"""`StepLoop`: admit, decode, prefill; one thread owns all of it.

Other threads touch three things: the roster's queue (under its lock), `Request.cancel` (a flag)
and `stop`. Everything else belongs to the thread that calls `run`, or to a test that calls `step`.

A step: end what is overdue, ask the scheduler, carry its plan out. Who does it: `sharing` lets
requests wait for a prefix that another one computes, `admission` opens sessions and restores
stored state, `decoding` computes a round of replies, `prefill` computes prompt chunks,
`replies` chooses and delivers tokens, `finish` ends requests, `launch` runs the model, `attempt`
keeps a fault with those it struck.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from civetta.cache.off import NoCache
from civetta.engine import scheduler
from civetta.engine.admission import Admission
from civetta.engine.attempt import Attempts
from civetta.engine.decoding import Decoding
from civetta.engine.finish import Finisher
from civetta.engine.image_work import ImageWork
from civetta.engine.launch import Launcher
from civetta.engine.prefill import SCORED_ROWS, Prefill
from civetta.engine.protocol import Finished
from civetta.engine.replies import Replies
from civetta.engine.request import RequestState
from civetta.engine.roster import Roster
from civetta.engine.shares import PrefillShares
from civetta.engine.sharing import SharedPrefixes
from civetta.engine.speculation import Speculation
from civetta.engine.tally import LoopState, Tally
from civetta.errors import EngineClosed
from civetta.kernels.ops import PAGE_TOKENS
from civetta.types import CancelCause, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.cache.protocol import ContinuationCache
    from civetta.decode.guide import Guide
    from civetta.decode.stream import TokenText
    from civetta.engine.job import Job
    from civetta.engine.language_model import LanguageModel
    from civetta.engine.outbox import Outbox
    from civetta.engine.protocol import EngineStats, GenerateRequest, RequestView
    from civetta.engine.request import Request
    from civetta.engine.speculation import Drafting

HEADROOM_TOKENS = 256
"""Room for a reply that an admission beside others asks for, or it would soon be put back."""

IDLE_PAUSE_S = 0.001
"""Between two looks at a restore from disk, when nothing else is to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """What bounds the loop. `end_ids` are the tokens that end a reply.

    `image_cache_bytes`: what the vision tower made of images is kept up to so many bytes.
    """

    budget: scheduler.Budget
    max_pending: int
    context_tokens: int
    max_text_bytes: int
    max_unread: int
    end_ids: frozenset[int]
    cache_drain_s: float = 0.0
    image_cache_bytes: int = 0


class StepLoop:
    """The step that moves all requests, and the thread's root around it."""

    def __init__(
        self,
        model: LanguageModel,
        limits: LoopLimits,
        *,
        new_text: Callable[[tuple[str, ...]], TokenText],
        cache: ContinuationCache | None = None,
        clock: Callable[[], float] = time.monotonic,
        drafting: Drafting | None = None,
        device_fault: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._model, self._limits, self._clock = model, limits, clock
        self._cache = cache = cache or NoCache()
        self._tally = Tally()
        self._roster = Roster(
            sessions=limits.budget.sessions,
            max_pending=limits.max_pending,
            max_unread=limits.max_unread,
        )
        self._finisher = Finisher(cache, self._roster, self._tally, clock=clock)
        self._attempt = Attempts(self._finisher, device_fault=device_fault)
        launcher = Launcher(model, cache, put_back=self._put_back_one)
        self._replies = replies = Replies(
            self._finisher,
            self._tally,
            end_ids=limits.end_ids,
            context_tokens=limits.context_tokens,
            max_text_bytes=limits.max_text_bytes,
        )
        self._images = ImageWork(model, cache_bytes=limits.image_cache_bytes)
        self._admission = Admission(
            model, cache, self._roster, self._tally, new_text=new_text, clock=clock
        )
        self._decoding = Decoding(
            launcher,
            replies,
            self._tally,
            attempt=self._attempt,
            clock=clock,
            speculation=None
            if drafting is None
            else Speculation(
                drafting, clock=clock, guard=self._attempt.error_of, announce=model.expect
            ),
        )
        self._sharing = SharedPrefixes(cache, clock=clock)
        self._prefill = Prefill(
            launcher,
            cache,
            replies,
            self._tally,
            self._images,
            chunk_tokens=limits.budget.prefill_chunk,
            given=self._given,
            attempt=self._attempt,
            clock=clock,
        )
        self._shares = PrefillShares()
        self._step_began_s: float | None = None
        self._unread: dict[int, Job] = {}  # admitted, and their first launch was not foretold

    # ---- any thread ----------------------------------------------------------------------------

    def submit(self, spec: GenerateRequest, guide: Guide | None = None) -> tuple[Request, Outbox]:
        """Queue a request that was checked. Raises EngineClosed or EngineBusy."""
        job = self._roster.add(spec, now_s=self._clock(), guide=guide)
        return job.request, job.outbox

    def abort(self, request_id: str) -> bool:
        """Call off the requests of that id; False when none waits or runs."""
        jobs = self._roster.find(request_id)
        for job in jobs:
            job.request.cancel(CancelCause.ABORTED)
        return bool(jobs)

    def give_up(self, request: Request) -> Finished:
        """Call off a request whose time is over, and its end as far as it is known by now.

        For a reader that a step under way keeps waiting; the step's end frees the request.
        """
        request.cancel(CancelCause.TIMEOUT)
        return Finished(
            reason=FinishReason.CANCELLED,
            usage=request.usage(now_s=self._clock()),
            cause=CancelCause.TIMEOUT,
        )

    def stop(self) -> None:
        """Let `run` end after the present step; what runs or waits is broken off then."""
        self._roster.close()

    def stats(self) -> EngineStats:
        """Counters now."""
        running, (_, waiting) = self._roster.running(), self._roster.counts()
        sessions = [job.session for job in running]
        return self._tally.stats(
            LoopState(
                running=len(running),
                waiting=waiting,
                restoring=sum(job.restore is not None for job in running),
                requests=self._roster.submitted,
                session_tokens=sum(session.position for session in sessions if session),
                pages_total=self._model.pages_total,
                pages_free=self._model.pages_free,
                cache=self._cache.stats(),
            )
        )

    def views(self) -> tuple[RequestView, ...]:
        """Who runs, in order of admission, then who waits."""
        jobs = (*self._roster.running(), *self._roster.waiting())
        return tuple(job.request.view() for job in jobs)

    def running_ids(self) -> list[str]:
        """Request ids of those who run."""
        return [job.request.spec.request_id for job in self._roster.running()]

    @property
    def device_lost(self) -> bool:
        """Whether the device failed for good; nothing is accepted then."""
        return self._attempt.lost is not None

    def step_s(self) -> float:
        """How long the step under way has taken so far; 0 between steps."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else self._clock() - began_s

    # ---- the step thread: root -----------------------------------------------------------------

    def run(self) -> None:
        """Step until `stop`: the thread's root. It outlives whatever a step raises."""
        try:
            while self._roster.wait_for_work():
                if not self.step():  # all that is left is reading stored state
                    self._roster.pause(IDLE_PAUSE_S)
        finally:
            self.stop()
            for job in [*self._roster.waiting(), *self._roster.running()]:
                self._attempt([job], partial(self._break_off, job))
            self._attempt.error_of(self._replies.close)
            self._attempt.error_of(partial(self._cache.close, drain_s=self._limits.cache_drain_s))

    def step(self) -> bool:
        """End what is overdue, then carry out one plan; whether there was any. Never raises."""
        self._step_began_s, computed = self._clock(), self._tally.steps
        error = self._attempt.error_of(self._step)
        self._step_began_s = None
        if self._attempt.lost is not None:
            self._roster.close(self._attempt.lost)
            error = self._attempt.lost
        if error is not None:  # the step itself is broken: nobody's request is to blame
            for job in [*self._roster.waiting(), *self._roster.running()]:
                self._attempt.strike([job], error)
        return self._tally.steps > computed

    def check(self) -> None:
        """Prove that the books balance; for the step thread, between steps."""
        self._roster.check()
        self._cache.check()
        self._images.check()

    # ---- the step thread: one step -------------------------------------------------------------

    def _step(self) -> None:
        waiting, running = self._sweep(self._roster.waiting()), self._sweep(self._roster.running())
        for job in running:
            if job.restore is not None:
                self._attempt([job], partial(self._admission.advance, job))
        running = [job for job in running if job.session is not None]
        self._images.sweep()
        waiting = self._marked(waiting)
        waiting = self._sharing.admissible(waiting, running)
        jobs = {job.key: job for job in (*waiting, *running)}
        plan = scheduler.plan(
            [
                scheduler.Waiting(
                    key=job.key, pages=_pages(job.request.prefill_tokens + HEADROOM_TOKENS)
                )
                for job in waiting
            ],
            self._views(running),
            self._limits.budget,
        )
        self._tally.steps += plan != scheduler.Plan()
        for key in plan.admit:
            jobs[key].turn = self._tally.steps
            self._attempt([jobs[key]], partial(self._admission.admit, jobs[key]))
        self._foretell(plan)
        if plan.decode:
            self._decoding.run([jobs[key] for key in plan.decode])
        chunks = [(jobs[chunk.key], chunk.n_tokens) for chunk in plan.prefill]
        chunks = [(job, n_tokens) for job, n_tokens in chunks if job.session is not None]
        if chunks:
            self._prefill.run(chunks)

    def _given(self, job: Job, n_tokens: int) -> None:
        """Book prompt tokens of this step to the client that they were computed for."""
        job.turn = self._tally.steps
        self._shares.give(job.request.spec.client_id, n_tokens)

    def _foretell(self, plan: scheduler.Plan) -> None:
        """Have read what new prefills begin with, behind the rest of this step.

        Their first launch is in this step, or in the next one as it will be if nobody ends.
        """
        unread = {**self._unread, **{job.key: job for job in self._admission.take_ready()}}
        self._unread = {key: job for key, job in unread.items() if job.session is not None}
        if not self._unread:
            return
        running = [job for job in self._roster.running() if job.session is not None]
        coming = scheduler.plan(
            [],
            scheduler.after(self._views(running), plan, step=self._tally.steps),
            self._limits.budget,
        )
        sizes = {chunk.key: chunk.n_tokens for chunk in (*coming.prefill, *plan.prefill)}
        for key in self._unread.keys() & sizes.keys():
            job = self._unread.pop(key)
            self._attempt([job], partial(self._prefill.expect, job, sizes[key]))

    def _marked(self, waiting: list[Job]) -> list[Job]:
        """Give requests with images the digests that the cache tells them apart by."""
        for job in waiting:
            if job.request.spec.images and not job.images:
                self._attempt([job], partial(self._images.mark, job))
        return [job for job in waiting if not job.request.state.terminal]

    def _views(self, running: list[Job]) -> list[scheduler.Running]:
        prefilling = [job for job in running if job.request.prompt_left]
        served = self._shares.of({job.request.spec.client_id for job in prefilling})
        return [
            scheduler.Running(
                key=job.key,
                prompt_left=job.request.prompt_left,
                client_id=job.request.spec.client_id,
                client_served=served.get(job.request.spec.client_id, 0),
                turn=job.turn,
                pages=_pages(max(job.live.position, job.request.prefill_tokens) + 1),
                restoring=job.restore is not None,
                at_once=SCORED_ROWS if job.request.scores else self._limits.budget.prefill_batch,
            )
            for job in running
        ]

    def _sweep(self, jobs: list[Job]) -> list[Job]:
        """Break off what is overdue; the others."""
        now_s = self._clock()
        for job in jobs:
            cause = job.request.overdue(now_s)
            if cause is not None:
                self._attempt([job], partial(self._finisher.cancel, job, cause))
        return [job for job in jobs if not job.request.state.terminal]

    def _put_back_one(self) -> bool:
        """Send the request that was admitted last back to the queue; False when only one runs."""
        running = self._roster.running()
        if len(running) < 2:
            return False
        self._finisher.put_back(running[-1])
        return True

    def _break_off(self, job: Job) -> None:
        """At shutdown: a running request ends as cancelled, a waiting one was never served."""
        if job.session is None:
            error = EngineClosed("The engine shut down before the request's turn; send it again.")
            self._finisher.fail(job, error, RequestState.CANCELLED)
        else:
            self._finisher.cancel(job, CancelCause.SHUTDOWN)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
