"""`Admission`: from the queue into a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.decode.history import TokenHistory
from civetta.engine.job import Reply
from civetta.engine.protocol import Started
from civetta.errors import EngineBusy

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.decode.stream import TokenText
    from civetta.engine.job import Job
    from civetta.engine.language_model import LanguageModel
    from civetta.engine.roster import Roster
    from civetta.engine.tally import Tally


class Admission:
    """Opens sessions for waiting requests."""

    def __init__(
        self,
        model: LanguageModel,
        roster: Roster,
        tally: Tally,
        *,
        new_text: Callable[[tuple[str, ...]], TokenText],
        clock: Callable[[], float],
    ) -> None:
        self._model, self._roster, self._tally = model, roster, tally
        self._new_text, self._clock = new_text, clock

    def admit(self, job: Job) -> None:
        """Start, or start again, a waiting request; it stays in the queue while there is no room.

        Raises EngineBusy when there is no room although nothing runs, and what the model raises.
        """
        spec = job.request.spec
        first = job.reply is None
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
        job.request.admit(cached_tokens=session.position, now_s=self._clock())
        self._roster.admitted(job)
        if first:
            self._tally.cached_tokens += job.request.cached_tokens
            job.outbox.put(
                Started(
                    prompt_tokens=job.request.prompt_tokens,
                    cached_tokens=job.request.cached_tokens,
                )
            )
