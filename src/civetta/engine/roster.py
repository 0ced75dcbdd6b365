"""`Roster`: which requests wait and which run. Any thread may read it and add to the queue.

Only the step thread moves jobs and takes them out.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from civetta.engine.job import Job
from civetta.engine.outbox import Outbox
from civetta.engine.request import Request
from civetta.engine.shares import QueueTickets
from civetta.errors import EngineBusy, EngineClosed

if TYPE_CHECKING:
    from civetta.decode.guide import Guide
    from civetta.engine.protocol import GenerateRequest
    from civetta.errors import CivettaError


class Roster:
    """The queue and the running requests, under one lock."""

    def __init__(self, *, sessions: int, max_pending: int, max_unread: int) -> None:
        self._sessions, self._max_pending = sessions, max_pending
        self._max_unread = max_unread
        self._changed = threading.Condition()
        self._waiting: dict[int, Job] = {}
        self._running: dict[int, Job] = {}  # in order of admission
        self._tickets = QueueTickets()
        self._next_key = 0
        self.closing = False
        self._refusal: CivettaError = EngineClosed(
            "The engine has shut down; start the server again."
        )
        self.submitted = 0

    # ---- any thread ----------------------------------------------------------------------------

    def add(self, spec: GenerateRequest, *, now_s: float, guide: Guide | None = None) -> Job:
        """Queue a request. Raises EngineBusy, or what the roster was closed with."""
        with self._changed:
            if self.closing:
                raise self._refusal.with_traceback(None)
            if len(self._waiting) + len(self._running) >= self._sessions + self._max_pending:
                raise EngineBusy(
                    f"{len(self._running)} requests run and {len(self._waiting)} wait, which is all"
                    " that --sessions and --max-pending allow; retry in a moment."
                )
            job = Job(
                request=Request(self._next_key, spec, now_s=now_s),
                outbox=Outbox(max_unread=self._max_unread),
                guide=guide,
                ticket=self._tickets.take(spec.client_id),
            )
            self._next_key += 1
            self.submitted += 1
            self._waiting[job.key] = job
            self._changed.notify_all()
        return job

    def close(self, refusal: CivettaError | None = None) -> None:
        """Accept nothing more and wake whoever waits for work; `refusal` is what comers hear."""
        with self._changed:
            self.closing = True
            self._refusal = refusal or self._refusal
            self._changed.notify_all()

    def wait_for_work(self) -> bool:
        """Block until there is a job; False when the roster is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closing or self._waiting or self._running)
            return not self.closing

    def pause(self, seconds: float) -> None:
        """Wait a moment; less when a request comes in or the roster closes."""
        with self._changed:
            self._changed.wait(seconds)

    def counts(self) -> tuple[int, int]:
        """How many run, how many wait."""
        with self._changed:
            return len(self._running), len(self._waiting)

    def find(self, request_id: str) -> list[Job]:
        """The jobs of that request id, one a choice; none when they ended or never were."""
        with self._changed:
            jobs = [*self._running.values(), *self._waiting.values()]
        return [job for job in jobs if job.request.spec.request_id == request_id]

    def waiting(self) -> list[Job]:
        """Who waits, first in the queue first: by ticket, then by arrival."""
        with self._changed:
            jobs = list(self._waiting.values())
        return sorted(jobs, key=lambda job: (job.ticket, job.key))

    def running(self) -> list[Job]:
        """Who runs, in order of admission."""
        with self._changed:
            return list(self._running.values())

    # ---- the step thread -----------------------------------------------------------------------

    def admitted(self, job: Job) -> None:
        """Move a job from the queue to the running ones."""
        with self._changed:
            del self._waiting[job.key]
            self._running[job.key] = job
            self._tickets.used(job.ticket)

    def put_back(self, job: Job) -> None:
        """Move a running job back; its ticket and number put it before all that came after it."""
        with self._changed:
            del self._running[job.key]
            self._waiting[job.key] = job

    def remove(self, job: Job) -> None:
        """Take a job out, wherever it is."""
        with self._changed:
            self._waiting.pop(job.key, None)
            self._running.pop(job.key, None)

    def check(self) -> None:
        """Prove that the books balance; for the step thread, between steps."""
        assert len(self._running) <= self._sessions
        assert self._waiting.keys().isdisjoint(self._running)
        for key, job in (self._waiting | self._running).items():
            assert job.key == key
            assert not job.request.state.terminal
            assert not job.outbox.closed
            assert job.request.queued == (key in self._waiting)
            assert (job.session is not None) == (key in self._running)
            job.request.check()
