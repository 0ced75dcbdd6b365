"""`StepLoop`: admit, prefill, decode, sample, accept, deliver; one thread owns all of it.

Other threads touch three things: `submit` (the queue, under a lock), `Request.cancel` (a flag) and
`stop`. Everything else belongs to the thread that calls `run`, or to a test that calls `step`.

A fault ends the request it struck and no other; the thread goes on. Errors of civetta's own tree
reach the client as they are; anything else is logged with its traceback and reaches the client
as RequestFailed. Fault or not, a request ends in one place: `_end`.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from civetta.decode.history import TokenHistory
from civetta.decode.sampler import SampleRow, sample_row
from civetta.engine import scheduler
from civetta.engine.outbox import Outbox
from civetta.engine.protocol import Finished, Progress, Started, TokenEvent
from civetta.engine.request import Request, RequestState
from civetta.engine.tally import Tally
from civetta.errors import CivettaError, EngineBusy, EngineClosed, RequestFailed
from civetta.log import log_event
from civetta.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from civetta.decode.stream import TokenText
    from civetta.engine.language_model import LanguageModel, LiveSession
    from civetta.engine.protocol import EngineStats, GenerateRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """What bounds the loop. `end_ids` are the tokens that end a reply."""

    budget: scheduler.Budget
    max_pending: int
    context_tokens: int
    max_text_bytes: int
    max_unread: int
    end_ids: frozenset[int]


@dataclass(slots=True, kw_only=True)
class _Work:
    """What an admitted request needs to go on."""

    session: LiveSession
    text: TokenText
    history: TokenHistory


@dataclass(slots=True, kw_only=True)
class _Job:
    """A request with its reader's box; `work` from admission on."""

    request: Request
    outbox: Outbox
    work: _Work | None = None

    @property
    def live(self) -> _Work:
        """Its work; the job has been admitted."""
        assert self.work is not None, "the request still waits"
        return self.work


class StepLoop:
    """The queue, the running requests, and the step that moves them."""

    def __init__(
        self,
        model: LanguageModel,
        limits: LoopLimits,
        *,
        new_text: Callable[[tuple[str, ...]], TokenText],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._limits = model, limits
        self._new_text, self._clock = new_text, clock
        self._tally = Tally()
        self._changed = threading.Condition()
        self._waiting: dict[int, _Job] = {}  # in order of arrival
        self._running: dict[int, _Job] = {}  # in order of admission
        self._at_work: _Job | None = None  # whose fault it is if the step raises now
        self._next_key = 0
        self._closing = False

    # ---- any thread ----------------------------------------------------------------------------

    def submit(self, spec: GenerateRequest) -> tuple[Request, Outbox]:
        """Queue a request that was checked. Raises EngineClosed or EngineBusy."""
        outbox = Outbox(max_unread=self._limits.max_unread)
        with self._changed:
            if self._closing:
                raise EngineClosed("The engine has shut down; start the server again.")
            room = self._limits.budget.sessions + self._limits.max_pending
            if len(self._waiting) + len(self._running) >= room:
                raise EngineBusy(
                    f"{len(self._running)} requests run and {len(self._waiting)} wait, which is all"
                    " that --sessions and --max-pending allow; retry in a moment."
                )
            request = Request(self._next_key, spec, now_s=self._clock())
            self._next_key += 1
            self._waiting[request.key] = _Job(request=request, outbox=outbox)
            self._tally.requests += 1
            self._changed.notify_all()
        return request, outbox

    def stop(self) -> None:
        """Let `run` end after the present step; what runs or waits is broken off then."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        """Counters now."""
        with self._changed:
            return self._tally.stats(running=len(self._running), waiting=len(self._waiting))

    # ---- the step thread: root -----------------------------------------------------------------

    def run(self) -> None:
        """Step until `stop`: the thread's root. It outlives whatever a step raises."""
        try:
            while self._wait_for_work():
                self._survive(self.step)
        finally:
            self.stop()
            while self._waiting or self._running:
                self._survive(self._break_off_one)

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting or self._running)
            return not self._closing

    def _survive(self, action: Callable[[], None]) -> None:
        for attempt in (action, self._end_struck):
            try:
                attempt()
            except Exception:  # noqa: BLE001 - a thread's root, the one broad except of the engine
                _log.exception("step_failed")
            else:
                return

    def _end_struck(self) -> None:
        """End the request that was worked on when the step raised; all of them if none was."""
        struck, self._at_work = self._at_work, None
        jobs = [struck] if struck else [*self._waiting.values(), *self._running.values()]
        for job in jobs:
            if not job.request.state.terminal:
                self._end(job, RequestState.FAILED, error=_internal_error())

    def _break_off_one(self) -> None:
        """At shutdown: a running request ends as cancelled, a waiting one was never served."""
        if self._waiting:
            job = self._at_work = next(iter(self._waiting.values()))
            error = EngineClosed("The engine shut down before the request's turn; send it again.")
            self._end(job, RequestState.CANCELLED, error=error)
        else:
            self._cancel(next(iter(self._running.values())))

    # ---- the step thread: one step -------------------------------------------------------------

    def step(self) -> None:
        """Break off what is overdue, then carry out one plan."""
        self._at_work = None
        self._sweep()
        plan = scheduler.plan(*self._views(), self._limits.budget)
        for key in plan.admit:
            self._guard(self._waiting[key], self._admit)
        for key in plan.decode:
            self._guard(self._running[key], self._decode)
        for chunk in plan.prefill:
            self._guard(self._running[chunk.key], partial(self._prefill, n_tokens=chunk.n_tokens))
        self._at_work = None

    def check(self) -> None:
        """Prove that the books balance; for the step thread, between steps."""
        assert len(self._running) <= self._limits.budget.sessions
        for key, job in (self._waiting | self._running).items():
            assert job.request.key == key
            assert not job.request.state.terminal
            assert not job.outbox.closed
            assert (job.request.state is RequestState.QUEUED) == (key in self._waiting)
            assert (job.work is None) == (key in self._waiting)
            job.request.check()

    def _views(self) -> tuple[list[scheduler.Waiting], list[scheduler.Running]]:
        with self._changed:
            waiting = [job.request for job in self._waiting.values()]
        return (
            [
                scheduler.Waiting(
                    key=request.key,
                    prompt_tokens=request.prompt_tokens,
                    client_id=request.spec.client_id,
                )
                for request in waiting
            ],
            [
                scheduler.Running(key=key, prompt_left=job.request.prompt_left)
                for key, job in self._running.items()
            ],
        )

    def _guard(self, job: _Job, action: Callable[[_Job], None]) -> None:
        """Do one request's part of a step; an error of the tree ends that request alone."""
        self._at_work = job
        try:
            action(job)
        except CivettaError as error:
            if job.request.state.terminal:
                raise
            self._end(job, RequestState.FAILED, error=error)

    def _sweep(self) -> None:
        now_s = self._clock()
        with self._changed:
            jobs = [*self._waiting.values(), *self._running.values()]
        for job in jobs:
            if job.request.overdue(now_s):
                self._guard(job, self._cancel)

    def _admit(self, job: _Job) -> None:
        request = job.request
        text = self._new_text(request.spec.stop)
        history = TokenHistory(
            request.spec.prompt_ids, repeat_last_n=request.spec.sampling.repeat_last_n
        )
        session = self._model.open_session()  # last: from here on `_end` closes it
        job.work = _Work(session=session, text=text, history=history)
        request.admit(cached_tokens=session.position, now_s=self._clock())
        with self._changed:
            del self._waiting[request.key]
            self._running[request.key] = job
        self._tally.cached_tokens += request.cached_tokens
        job.outbox.put(
            Started(prompt_tokens=request.prompt_tokens, cached_tokens=request.cached_tokens)
        )

    def _prefill(self, job: _Job, n_tokens: int) -> None:
        request, began_s = job.request, self._clock()
        start = request.prefilled_tokens
        ids = request.spec.prompt_ids[start : start + n_tokens]
        is_last = n_tokens == request.prompt_left
        logits = self._model.forward(job.live.session, ids, rows="last" if is_last else "none")
        now_s = self._clock()
        self._tally.prefilled(n_tokens, now_s - began_s)
        request.prefilled(n_tokens, now_s=now_s)
        job.outbox.put(
            Progress(processed_tokens=request.prefilled_tokens, prompt_tokens=request.prompt_tokens)
        )
        if is_last:
            self._accept(job, logits)

    def _decode(self, job: _Job) -> None:
        began_s = self._clock()
        last_id = job.request.generated_ids[-1]
        logits = self._model.forward(job.live.session, [last_id], rows="last")
        self._accept(job, logits)
        self._tally.decode_s += self._clock() - began_s

    def _accept(self, job: _Job, logits: Tensor) -> None:
        """Choose the next token from the last row, deliver it, end the reply where it ends."""
        request, work = job.request, job.live
        row = SampleRow(
            params=request.spec.sampling, position=work.session.position, history=work.history
        )
        sampled = sample_row(logits[-1].float().cpu().numpy(), row)
        token_id = sampled.token_id
        request.generated(token_id)
        work.history.append(token_id)
        self._tally.generated_tokens += 1
        if token_id in self._limits.end_ids and not request.spec.ignore_eos:
            # No logprob: the lists that clients get run along the text, and this token has none.
            job.outbox.put(TokenEvent(token_id=token_id, text=""))
            self._finish(job, FinishReason.STOP)
            return
        certain = work.text.push(token_id)
        request.text_bytes += len(certain.text.encode())
        job.outbox.put(TokenEvent(token_id=token_id, text=certain.text, logprob=sampled.logprob))
        if certain.stop is not None:
            self._finish(job, FinishReason.STOP, stop=certain.stop)
        elif request.exhausted(
            context_tokens=self._limits.context_tokens, max_text_bytes=self._limits.max_text_bytes
        ):
            self._finish(job, FinishReason.LENGTH)

    # ---- the step thread: ends -----------------------------------------------------------------

    def _finish(self, job: _Job, reason: FinishReason, *, stop: str | None = None) -> None:
        held = job.live.text.finish()
        if held.stop is not None:  # the bytes that were held back completed a stop string
            reason, stop = FinishReason.STOP, held.stop
        self._end(job, RequestState.FINISHED, reason=reason, text=held.text, stop=stop)

    def _cancel(self, job: _Job) -> None:
        self._at_work = job
        text = "" if job.work is None else job.work.text.finish().text
        self._end(job, RequestState.CANCELLED, reason=FinishReason.CANCELLED, text=text)

    def _end(
        self,
        job: _Job,
        state: RequestState,
        *,
        error: CivettaError | None = None,
        reason: FinishReason = FinishReason.ERROR,
        text: str = "",
        stop: str | None = None,
    ) -> None:
        """Take the request out, give its state back, tell its reader; in this order.

        Whatever fails on the way, the reader is told: nobody waits for a reply that never comes.
        """
        request = job.request
        with self._changed:
            self._waiting.pop(request.key, None)
            self._running.pop(request.key, None)
        try:
            request.end(state, now_s=self._clock())
            self._tally.ended(request)
            if job.work is not None:
                job.work.session.close()
        finally:
            usage = request.usage(now_s=self._clock())
            if error is not None:
                job.outbox.fail(error)
            else:
                job.outbox.put(Finished(reason=reason, usage=usage, text=text, stop=stop))
        _log_end(request, reason, error)


def _internal_error() -> RequestFailed:
    return RequestFailed(
        "Something failed inside civetta while it worked on this request, and the log has the"
        " details; retry, and report it if it happens again."
    )


def _log_end(request: Request, reason: FinishReason, error: CivettaError | None) -> None:
    usage = request.usage(now_s=0.0)
    log_event(
        _log,
        logging.WARNING if error is not None else logging.INFO,
        "request_end",
        id=request.spec.request_id,
        reason=reason if error is None else error.code,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        queue_s=usage.queue_s,
        prefill_s=usage.prefill_s,
        decode_s=usage.decode_s,
    )
