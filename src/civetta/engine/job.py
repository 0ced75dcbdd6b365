"""`Job`: a request with its reader's box and everything the step thread needs to go on with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.cache.protocol import ImageMark, KeepKind, Restore, RestorePoint
    from civetta.decode.guide import Guide
    from civetta.decode.history import TokenHistory
    from civetta.decode.stream import TokenText
    from civetta.engine.outbox import Outbox
    from civetta.engine.request import Request
    from civetta.state.session import Session
    from civetta.state.spans import ImageSpan


@dataclass(slots=True, kw_only=True)
class Reply:
    """The reply as it grows: its text, and the tokens that penalties count."""

    text: TokenText
    history: TokenHistory


@dataclass(slots=True, kw_only=True)
class Parking:
    """A request that waits for another one to compute a prefix that both have (sharing.py).

    `leader` computes it up to `position`; `met` are the numbers of the requests that were looked
    at once. `since_s` is when the waiting began, `wait_s` how long it took in all.
    """

    leader: Job | None = None
    position: int = 0
    met: set[int] = field(default_factory=set)
    since_s: float = 0.0
    wait_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Job:
    """One request at work.

    `ticket` is its place in the queue (shares.py). `guide` bounds its tokens, where something
    does. `reply` is there from the first admission on, `session` while it runs. Up to
    `alone_until` tokens its launches have no other member: a launch that failed with several does
    not say whose fault it was. `turn` is the step that last gave it prompt tokens. `restore` fills
    the session from `point` until the prefill begins; a launch ends at each position of `keep_at`,
    and the state is kept there. `ahead` tokens of the session are verified drafts that the reply
    does not have yet. `delivered_s` is when it last got a token.
    `images` tell the cache what `spans` tell the session; with `image_rows`, the rows of those
    encoded by their number, they belong to image_work.py.
    """

    request: Request
    outbox: Outbox
    guide: Guide | None = None
    ticket: int = 0
    reply: Reply | None = None
    session: Session | None = None
    alone_until: int = 0
    turn: int = 0
    images: tuple[ImageMark, ...] = ()
    spans: tuple[ImageSpan, ...] = ()
    image_rows: dict[int, Tensor] = field(default_factory=dict)
    restore: Restore | None = None
    point: RestorePoint | None = None
    keep_at: dict[int, KeepKind] = field(default_factory=dict)
    parking: Parking = field(default_factory=Parking)
    ahead: int = 0
    delivered_s: float | None = None

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

    def next_stop(self, *, after: int) -> int | None:
        """The next position where a launch has to end; None when there is none."""
        return min((at for at in self.keep_at if at > after), default=None)

    @property
    def alone(self) -> bool:
        """Whether its next launch is its own."""
        return self.session is not None and self.session.position < self.alone_until
