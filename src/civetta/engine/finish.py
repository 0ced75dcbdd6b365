"""`Finisher`: the one place where a request ends, and where a running one gives its state back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from civetta.cache.protocol import KeepKind
from civetta.engine.protocol import Finished
from civetta.engine.request import RequestState
from civetta.log import log_event
from civetta.types import CancelCause, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.cache.protocol import ContinuationCache
    from civetta.engine.job import Job
    from civetta.engine.roster import Roster
    from civetta.engine.tally import Tally
    from civetta.errors import CivettaError

_log = logging.getLogger(__name__)


class Finisher:
    """Ends requests: takes them out, gives their state back, tells their readers; in this order.

    State that was computed is kept for later requests, unless a fault may have torn it. Whatever
    fails on the way, the reader is told: nobody waits for a reply that never comes.
    """

    def __init__(
        self,
        cache: ContinuationCache,
        roster: Roster,
        tally: Tally,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._roster, self._tally, self._clock = roster, tally, clock

    def finish(self, job: Job, reason: FinishReason, *, stop: str | None = None) -> None:
        """The reply is complete."""
        held = job.begun.text.finish()
        if held.stop is not None:  # the bytes that were held back completed a stop string
            reason, stop = FinishReason.STOP, held.stop
        self._end(job, RequestState.FINISHED, reason, text=held.text, stop=stop)

    def cancel(self, job: Job, cause: CancelCause) -> None:
        """Somebody ended it; what was held back still comes out."""
        text = "" if job.reply is None else job.reply.text.finish().text
        self._end(job, RequestState.CANCELLED, FinishReason.CANCELLED, text=text, cause=cause)

    def fail(
        self, job: Job, error: CivettaError, state: RequestState = RequestState.FAILED
    ) -> None:
        """It ends with an error."""
        self._end(job, state, FinishReason.ERROR, error=error)

    def put_back(self, job: Job) -> None:
        """Return a running request to the queue without its state; nothing it said is lost."""
        self._tally.put_back += 1
        job.request.put_back()
        self._roster.put_back(job)
        self._give_up_session(job, keep=False)

    def _end(
        self,
        job: Job,
        state: RequestState,
        reason: FinishReason,
        *,
        error: CivettaError | None = None,
        text: str = "",
        stop: str | None = None,
        cause: CancelCause | None = None,
    ) -> None:
        request = job.request
        self._roster.remove(job)
        try:
            self._tally.longest_sequence = max(
                self._tally.longest_sequence, request.prompt_tokens + len(request.generated_ids)
            )
            now_s = self._clock()
            request.end(state, now_s=now_s)
            self._tally.ended(request, request.usage(now_s=now_s))
            self._give_up_session(job, keep=error is None)
        finally:
            usage = request.usage(now_s=self._clock())
            if error is not None:
                job.outbox.fail(error)
            else:
                job.outbox.put(
                    Finished(reason=reason, usage=usage, text=text, stop=stop, cause=cause)
                )
        _log_end(job, reason, error, cause)

    def _give_up_session(self, job: Job, *, keep: bool) -> None:
        session, job.session = job.session, None
        restore, job.restore = job.restore, None
        job.keep_at.clear()
        ahead, job.ahead = job.ahead, 0
        if session is None:
            return
        try:
            if restore is not None:
                restore.cancel()
            elif keep and session.position:
                if ahead:  # a state is kept for what was said, no more
                    session.rewind(ahead)
                self._cache.keep(session, KeepKind.REPLY, job.images)
        finally:
            session.close()


def _log_end(
    job: Job, reason: FinishReason, error: CivettaError | None, cause: CancelCause | None
) -> None:
    usage = job.request.usage(now_s=0.0)
    log_event(
        _log,
        logging.WARNING if error is not None else logging.DEBUG,
        "request_end",
        id=job.request.spec.request_id,
        reason=reason if error is None else error.code,
        cause=cause,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        cache_source=usage.cache.source,
        cache_miss=usage.cache.miss,
        cache_miss_token=usage.cache.miss_token,
        shared_wait_s=usage.cache.wait_s or None,
        queue_s=usage.queue_s,
        prefill_s=usage.prefill_s,
        decode_s=usage.decode_s,
    )
