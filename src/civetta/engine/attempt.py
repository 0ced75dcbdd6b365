"""`Attempts`: the step thread's root guard; a fault strikes those it was done for, nobody else."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol

from civetta.errors import CivettaError, DeviceLost, RequestFailed
from civetta.log import log_event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from civetta.engine.finish import Finisher
    from civetta.engine.job import Job

_log = logging.getLogger(__name__)


class Attempt(Protocol):
    """Does part of a step for some jobs; whatever it raises is theirs."""

    def __call__(self, jobs: Sequence[Job], action: Callable[[], None]) -> None:
        """Never raises."""
        ...


class Attempts:
    """Carries out actions.

    A fault in an action for one job ends its request: errors of civetta's own tree reach the
    client as they are; anything else is logged with its traceback and reaches it as RequestFailed.
    After a fault in a launch of several nobody knows whose it is, and their states may be torn:
    all go back to the queue, and each is alone in its launches until it is past that point.

    `device_fault()` is asked after a fault that nobody foresaw. Where it has an answer the device is
    gone for all: `lost` is what they hear, and nothing is tried again.
    """

    def __init__(self, finisher: Finisher, *, device_fault: Callable[[], str | None]) -> None:
        self._finisher, self._device_fault = finisher, device_fault
        self.lost: DeviceLost | None = None

    def __call__(self, jobs: Sequence[Job], action: Callable[[], None]) -> None:
        """Do `action`; a fault is struck onto the jobs."""
        error = self.error_of(action)
        if error is not None:
            self.strike(jobs, error)

    def error_of(self, action: Callable[[], None]) -> CivettaError | None:
        """Do `action`; what a client may hear of the fault, None when there was none."""
        try:
            action()
        except CivettaError as error:
            return error
        except Exception:  # noqa: BLE001 - the step thread's root, the engine's one broad except
            if self.lost is None:  # then whatever is done fails alike
                _log.exception("step_failed")
                self._ask_device()
            return self.lost or RequestFailed(
                "Something failed inside civetta while it worked on this request, and the log has"
                " the details; retry, and report it if it happens again."
            )
        return None

    def _ask_device(self) -> None:
        fault = self._device_fault()
        if fault is not None:
            log_event(_log, logging.CRITICAL, "device_lost", fault=fault)
            self.lost = DeviceLost(
                f"The device is lost ({fault}), and this server with it: start it again."
            )

    def strike(self, jobs: Sequence[Job], error: CivettaError) -> None:
        """End the one job, or send several back to the queue."""
        for job in jobs:
            if job.request.state.terminal:
                continue
            if len(jobs) == 1 or job.session is None or error is self.lost:
                self.error_of(partial(self._finisher.fail, job, error))
            else:
                job.alone_until = len(job.request.sequence_ids)
                self.error_of(partial(self._finisher.put_back, job))
