"""`Session`: one running sequence, and `SessionStore`, which opens them within a budget.

Verbs: `extend` (the model, after a launch), `rewind`, `snapshot`, `restore`, `fork`, `close`. A
session owns its small state and shares its pages; `reserve` makes those its own that are about to
be written, by copying what others hold too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from civetta.errors import EngineBusy
from civetta.kernels.ops import PAGE_TOKENS
from civetta.state.device_state import DeviceState
from civetta.state.drafts import DraftRows
from civetta.state.pages import PagePool, PageShape
from civetta.state.parts import all_numbers, all_parts, set_all_numbers
from civetta.state.recurrent import REWIND_ROWS, RecurrentShape, RecurrentState
from civetta.state.snapshot import SmallState, Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.state.parts import SequenceState
    from civetta.state.spans import ImageSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """What the model needs from a session. `draft_width`: streams for a draft head, 0 without;
    `addressed`: kernels read and write the recurrent state by its address (`DeviceState`)."""

    pages: PageShape
    recurrent: RecurrentShape
    ngram_context: int
    draft_width: int = 0
    addressed: bool = False


class Session:
    """Tokens so far, their rope positions, pages and recurrent state."""

    def __init__(
        self,
        pool: PagePool,
        shape: StateShape,
        dtype: torch.dtype,
        limit: int,
        device: torch.device | None = None,
    ) -> None:
        self.limit = limit
        self.ids: list[int] = []
        self.pages: list[int] = []
        self.images: tuple[ImageSpan, ...] = ()
        kind = DeviceState if shape.addressed else RecurrentState
        self.recurrent: RecurrentState | DeviceState = kind(shape.recurrent, dtype, device)
        self.drafts = DraftRows(shape.draft_width, device) if shape.draft_width else None
        self.states: dict[str, SequenceState] = {"recurrent": self.recurrent}
        if self.drafts is not None:
            self.states["drafts"] = self.drafts
        self._pool, self._shape, self._dtype = pool, shape, dtype
        self._rope = torch.zeros(3, PAGE_TOKENS, dtype=torch.int64, device=device)
        self._table = torch.zeros(0, dtype=torch.int64, device=device)
        self._closed = False
        self.rewindable = 0

    @property
    def position(self) -> int:
        """Tokens in the sequence."""
        return len(self.ids)

    @property
    def pool(self) -> PagePool:
        """The pool that holds this session's pages."""
        return self._pool

    @property
    def settled_pages(self) -> int:
        """Leading pages that no further token writes into; the draft head's rows come late."""
        lag = 0 if self.drafts is None else self.drafts.lag(self.position)
        return (self.position - lag) // PAGE_TOKENS

    def pages_needed(self, tokens: int) -> int:
        """Free pages that `reserve` takes: for new tokens, and for copies of shared pages.

        Raises EngineBusy when the context is too short.
        """
        total = self.position + tokens
        if total > self.limit:
            raise EngineBusy(f"{total} tokens do not fit the context of {self.limit}")
        if not tokens:
            return 0
        missing = max(-(-total // PAGE_TOKENS) - len(self.pages), 0)
        return missing + len(self._shared_places())

    def _shared_places(self) -> list[int]:
        """Which of the pages that are still written into others hold too."""
        open_places = range(self.settled_pages, len(self.pages))
        return [i for i in open_places if self._pool.owners(self.pages[i]) > 1]

    def reserve(self, tokens: int) -> None:
        """Make the pages that `tokens` more tokens write into this session's own.

        Whoever writes calls it first, for drafted tokens too: pages may have been shared since the
        last call (`snapshot`, `restore`, `fork`).

        Raises EngineBusy, with nothing changed, when the pool or the context has no room.
        """
        assert not self._closed, "used a closed session"
        needed = self.pages_needed(tokens)
        self._pool.require(needed)
        shared = self._shared_places() if tokens else []
        missing = needed - len(shared)
        for i in shared:
            page = self.pages[i]
            self.pages[i] = self._pool.copy(page)
            self._pool.drop(page)
        self.pages += self._pool.take_several(missing)
        if shared or missing:
            self._table = torch.tensor(self.pages, dtype=torch.int64, device=self._table.device)

    def attach(self, images: Sequence[ImageSpan]) -> None:
        """Say where images lie in the sequence, in the part still to come too."""
        stop = 0
        for span in images:
            assert span.start >= stop, "images overlap or are out of order"
            stop = span.stop
        self.images = tuple(images)

    def table_P(self) -> Tensor:
        """Page numbers in order, int64."""
        return self._table

    def rope_positions(self) -> Tensor:
        """Rope positions (t, h, w) of the tokens so far, int64 [3, position]."""
        return self._rope[:, : self.position]

    def foresee(self, rope_3T: Tensor, first: int | None = None) -> Tensor:
        """Rope positions of tokens to come, from `first` (the next token) on.

        Returns those of all tokens up to the last of them, int64 [3, N], a view that the next call
        may change behind the sequence's end.
        """
        start = self.position if first is None else first
        stop = start + rope_3T.shape[1]
        with torch.inference_mode():  # the buffer may have been made in it: then only there
            self.rope_room(stop)[:, start:stop] = rope_3T
            return self._rope[:, :stop]

    def rope_room(self, tokens: int) -> Tensor:
        """The buffer of rope positions, int64 [3, N] with N >= `tokens`; whoever fills it in says
        so with `extend`."""
        with torch.inference_mode():
            while self._rope.shape[1] < tokens:
                self._rope = torch.cat([self._rope, torch.zeros_like(self._rope)], dim=1)
        return self._rope

    def extend(self, ids: list[int], rope_3T: Tensor | None) -> None:
        """Tokens whose state has been written; their pages were reserved before.

        rope_3T: their rope positions; None when they are in the buffer already (`rope_room`).
        """
        if rope_3T is not None:
            self.foresee(rope_3T)
        self.ids.extend(ids)
        self.rewindable = min(REWIND_ROWS, self.rewindable + len(ids))

    def rewind(self, tokens: int) -> None:
        """Take back the newest `tokens` <= `rewindable` tokens; exact, nothing is recomputed.

        `rewindable` is at most REWIND_ROWS, falls with each rewind and grows with each extend.
        """
        assert 0 <= tokens <= self.rewindable, "rewound further than the state reaches"
        if not tokens:
            return
        self.rewindable -= tokens
        del self.ids[-tokens:]
        for state in self.states.values():
            state.rewind(tokens, self.position)
        self.trim()

    def trim(self) -> None:
        """Give back pages that were reserved for tokens that did not come."""
        needed = -(-self.position // PAGE_TOKENS)
        for page in self.pages[needed:]:
            self._pool.drop(page)
        if needed != len(self.pages):
            del self.pages[needed:]
            self._table = torch.tensor(self.pages, dtype=torch.int64, device=self._table.device)

    def snapshot(self) -> Snapshot:
        """The state as it is now, as a value; this session goes on undisturbed."""
        assert not self._closed, "used a closed session"
        small = self._small()
        copies = {name: part.clone() for name, part in small.parts.items()}
        return Snapshot(
            replace(small, rope_3T=small.rope_3T.clone(), parts=copies),
            self._share_pages(),
            self._pool,
        )

    def restore(self, snapshot: Snapshot, tokens: int | None = None) -> None:
        """Take over a snapshot's state in this empty session; the snapshot stays as it is.

        `tokens` goes back to fewer than the snapshot has, by at most its `rewindable`. Raises
        EngineBusy, with nothing changed, when the context is too short.
        """
        assert snapshot.pool is self._pool, "a snapshot of another store"
        small = snapshot.small
        tokens = small.position if tokens is None else tokens
        assert small.position - small.rewindable <= tokens <= small.position, "out of reach"
        if small.position > self.limit:
            raise EngineBusy(f"{small.position} tokens do not fit the context of {self.limit}")
        self._adopt(small, snapshot.pages)
        self.rewind(small.position - tokens)

    def fork(self) -> Session:
        """A second session in the same state; both go on as if alone."""
        assert not self._closed, "used a closed session"
        twin = Session(self._pool, self._shape, self._dtype, self.limit, self._table.device)
        twin.images = self.images
        small = self._small()
        twin._adopt(small, self.pages[: -(-small.position // PAGE_TOKENS)])
        return twin

    def _small(self) -> SmallState:
        """The small state; its tensors are views."""
        return SmallState(
            ids_T=np.array(self.ids, dtype=np.int32),
            rope_3T=self.rope_positions(),
            numbers=all_numbers(self.states),
            parts=all_parts(self.states, self.position),
            rewindable=self.rewindable,
        )

    def _share_pages(self) -> tuple[int, ...]:
        pages = tuple(self.pages[: -(-self.position // PAGE_TOKENS)])
        for page in pages:
            self._pool.share(page)
        return pages

    def _adopt(self, small: SmallState, pages: Sequence[int]) -> None:
        assert not self._closed, "used a closed session"
        assert not self.ids, "restored into a session that has begun"
        assert not self.pages, "restored into a session with pages"
        for page in pages:
            self._pool.share(page)
        self.pages = list(pages)
        self._table = torch.tensor(self.pages, dtype=torch.int64, device=self._table.device)
        self.extend(small.ids_T.tolist(), small.rope_3T)
        self.rewindable = small.rewindable
        set_all_numbers(self.states, small.numbers)
        own = all_parts(self.states, self.position)
        assert own.keys() == small.parts.keys(), "a snapshot of another kind of session"
        for name, part in own.items():
            part.copy_(small.parts[name])

    def close(self) -> None:
        """Give everything back; idempotent."""
        if not self._closed:
            self._closed = True
            for page in self.pages:
                self._pool.drop(page)
            self.pages.clear()

    def check(self) -> None:
        """Prove that the pages cover the tokens and no more."""
        if not self._closed:
            assert len(self.pages) == -(-self.position // PAGE_TOKENS), "pages do not match tokens"
            assert len(set(self.pages)) == len(self.pages), "a page is listed twice"
            assert all(self._pool.owners(page) for page in self.pages), "holds a free page"
            if self.drafts is not None and self.drafts.kept:
                assert self.drafts.written <= max(self.position - 1, 0), "a head row is unfounded"
            assert 0 <= self.position - self.recurrent.base < 2 * PAGE_TOKENS, "open chunk too long"


class SessionStore:
    """Opens sessions over one page pool, which has `spare_pages` for snapshots besides."""

    def __init__(
        self,
        shape: StateShape,
        *,
        sessions: int,
        context_tokens: int,
        dtype: torch.dtype,
        spare_pages: int = 0,
        device: torch.device | None = None,
    ) -> None:
        pages = sessions * -(-context_tokens // PAGE_TOKENS) + spare_pages
        self.context_tokens = context_tokens
        self.pool = PagePool(shape.pages, pages, dtype, device)
        self._shape, self._dtype, self._device = shape, dtype, device

    def open(self) -> Session:
        """A new, empty session."""
        return Session(self.pool, self._shape, self._dtype, self.context_tokens, self._device)
