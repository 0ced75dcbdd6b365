"""`Job`: a request with its reader's box and everything the step thread needs to go on with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from civetta.decode.history import TokenHistory
    from civetta.decode.stream import TokenText
    from civetta.engine.outbox import Outbox
    from civetta.engine.request import Request
    from civetta.state.session import Session


@dataclass(slots=True, kw_only=True)
class Reply:
    """The reply as it grows: its text, and the tokens that penalties count."""

    text: TokenText
    history: TokenHistory


@dataclass(slots=True, kw_only=True)
class Job:
    """One request at work.

    `ticket` is its place in the queue (shares.py). `reply` is there from the first admission on,
    `session` while it runs. Up to `alone_until` tokens its launches have no other member: a launch
    that failed with several does not say whose fault it was. `turn` is the step that last gave it
    prompt tokens.
    """

    request: Request
    outbox: Outbox
    ticket: int = 0
    reply: Reply | None = None
    session: Session | None = None
    alone_until: int = 0
    turn: int = 0

    @property
    def key(self) -> int:
        """The request's number."""
        return self.request.key

    @property
    def live(self) -> Session:
        """Its session; the job runs."""
        assert self.session is not None, "the request does not run"
        return self.session

    @property
    def begun(self) -> Reply:
        """Its reply; the job has been admitted once."""
        assert self.reply is not None, "the request was never admitted"
        return self.reply

    @property
    def alone(self) -> bool:
        """Whether its next launch is its own."""
        return self.session is not None and self.session.position < self.alone_until
