"""`Admission`: from the queue into a session, with as much stored state as there is."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from civetta.cache.protocol import KeepKind, MissReason, RestorePoint, Tier
from civetta.decode.history import TokenHistory
from civetta.engine.job import Reply
from civetta.engine.protocol import Started
from civetta.errors import EngineBusy
from civetta.log import log_event
from civetta.types import CacheSaving

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.cache.protocol import ContinuationCache
    from civetta.decode.stream import TokenText
    from civetta.engine.job import Job
    from civetta.engine.language_model import LanguageModel
    from civetta.engine.roster import Roster
    from civetta.engine.tally import Tally

_log = logging.getLogger(__name__)


class Admission:
    """Opens sessions for waiting requests and fills them from the cache."""

    def __init__(
        self,
        model: LanguageModel,
        cache: ContinuationCache,
        roster: Roster,
        tally: Tally,
        *,
        new_text: Callable[[tuple[str, ...]], TokenText],
        clock: Callable[[], float],
    ) -> None:
        self._model, self._cache = model, cache
        self._roster, self._tally = roster, tally
        self._new_text, self._clock = new_text, clock
        self._ready: list[Job] = []

    def take_ready(self) -> list[Job]:
        """Those whose prefill may begin, since the last call; some may have ended meanwhile."""
        ready, self._ready = self._ready, []
        return ready

    def admit(self, job: Job) -> None:
        """Start, or start again, a waiting request; it stays in the queue while there is no room.

        Raises EngineBusy when there is no room although nothing runs, and what the model raises.
        """
        spec = job.request.spec
        if job.reply is None:
            job.reply = Reply(
                text=self._new_text(spec.stop),
                history=TokenHistory(spec.prompt_ids, repeat_last_n=spec.sampling.repeat_last_n),
            )
        try:
            session = self._model.open_session()
        except EngineBusy:
            if not self._roster.running():
                raise
            return
        job.session = session  # from here on whoever ends the request closes it
        if job.spans:
            session.attach(job.spans)
        job.request.leave_queue(now_s=self._clock())
        self._roster.admitted(job)
        if not job.request.uses_cache:
            job.point = RestorePoint(cached_tokens=0, miss=MissReason.DISABLED)
            self._restored(job, 0, MissReason.DISABLED)
            return
        job.point = self._cache.find(job.request.sequence_ids, job.images)
        job.restore = self._cache.begin(job.point, session)  # also of nothing: it counts the miss
        self.advance(job)

    def advance(self, job: Job) -> None:
        """Move a restore on; the request prefills from the moment it is complete."""
        restore = job.restore
        assert restore is not None, "nothing is being restored"
        try:
            if not restore.advance():
                return
            tokens, miss = restore.tokens, restore.miss
        except EngineBusy:  # the session is empty and usable; computing may find room later
            tokens, miss = 0, MissReason.EVICTED
        job.restore = None
        point = job.point
        assert point is not None, "a restore has a point"
        self._restored(job, tokens, miss or point.miss)

    def _restored(self, job: Job, tokens: int, miss: MissReason | None) -> None:
        request, point = job.request, job.point
        assert point is not None, "the cache was asked"
        assert job.live.position == tokens, "a restored session stands where the cache says"
        first = request.saving is None
        saving = CacheSaving(
            source=point.tier if tokens else Tier.NONE,
            miss=miss,
            miss_token=point.miss_token,
            wait_s=job.parking.wait_s,
        )
        request.restored(tokens, saving)
        self._ready.append(job)
        places = {at: KeepKind.PROMPT for at in point.keep_at if at > tokens}
        job.keep_at = {**places, **{at: kind for at, kind in job.keep_at.items() if at > tokens}}
        if first:
            self._tally.cached_tokens += request.cached_tokens
            job.outbox.put(
                Started(prompt_tokens=request.prompt_tokens, cached_tokens=request.cached_tokens)
            )
        log_event(
            _log,
            logging.DEBUG,
            "request_admitted",
            id=request.spec.request_id,
            sequence_tokens=request.prompt_left + tokens,
            cached_tokens=tokens,
            cache_source=saving.source,
            cache_miss=miss,
        )
