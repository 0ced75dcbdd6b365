"""`Session`: one running sequence, and `SessionStore`, which opens them within a budget.

Verbs: `extend` (the model, after a launch), `rewind`, `close`. A session owns its pages and its
recurrent state; nothing else changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from civetta.errors import EngineBusy
from civetta.kernels.ops import PAGE_TOKENS
from civetta.state.drafts import DraftRows
from civetta.state.pages import PagePool, PageShape
from civetta.state.recurrent import REWIND_ROWS, RecurrentShape, RecurrentState


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """What the model needs from a session. `draft_width`: streams for a draft head, 0 without."""

    pages: PageShape
    recurrent: RecurrentShape
    ngram_context: int
    draft_width: int = 0


class Session:
    """Tokens so far, their rope positions, pages and recurrent state."""

    def __init__(self, pool: PagePool, shape: StateShape, dtype: torch.dtype, limit: int) -> None:
        self.limit = limit
        self.ids: list[int] = []
        self.pages: list[int] = []
        self.recurrent = RecurrentState(shape.recurrent, dtype)
        self.drafts = DraftRows(shape.draft_width) if shape.draft_width else None
        self._pool = pool
        self._rope = torch.zeros(3, PAGE_TOKENS, dtype=torch.int64)
        self._table = torch.zeros(0, dtype=torch.int64)
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

    def reserve(self, tokens: int) -> None:
        """Take the pages that `tokens` more tokens need.

        Raises EngineBusy, with nothing changed, when the pool or the context has no room.
        """
        assert not self._closed, "used a closed session"
        total = self.position + tokens
        if total > self.limit:
            raise EngineBusy(f"{total} tokens do not fit the context of {self.limit}")
        before = len(self.pages)
        try:
            while len(self.pages) * PAGE_TOKENS < total:
                self.pages.append(self._pool.take())
        except EngineBusy:
            for page in self.pages[before:]:
                self._pool.drop(page)
            del self.pages[before:]
            raise
        if len(self.pages) != before:
            self._table = torch.tensor(self.pages, dtype=torch.int64)

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
            while self._rope.shape[1] < stop:
                self._rope = torch.cat([self._rope, torch.zeros_like(self._rope)], dim=1)
            self._rope[:, start:stop] = rope_3T
            return self._rope[:, :stop]

    def extend(self, ids: list[int], rope_3T: Tensor) -> None:
        """Tokens whose state has been written; their pages were reserved before."""
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
        self.recurrent.rewind(tokens)
        self.rewindable -= tokens
        del self.ids[-tokens:]
        if self.drafts is not None:
            self.drafts.rewind(tokens, self.position)
        self.trim()

    def trim(self) -> None:
        """Give back pages that were reserved for tokens that did not come."""
        needed = -(-self.position // PAGE_TOKENS)
        for page in self.pages[needed:]:
            self._pool.drop(page)
        if needed != len(self.pages):
            del self.pages[needed:]
            self._table = torch.tensor(self.pages, dtype=torch.int64)

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
            if self.drafts is not None and self.drafts.kept:
                assert self.drafts.written <= max(self.position - 1, 0), "a head row is unfounded"
            assert 0 <= self.position - self.recurrent.base < 2 * PAGE_TOKENS, "open chunk too long"


class SessionStore:
    """Opens sessions over one page pool."""

    def __init__(
        self, shape: StateShape, *, sessions: int, context_tokens: int, dtype: torch.dtype
    ) -> None:
        pages = sessions * -(-context_tokens // PAGE_TOKENS)
        self.context_tokens = context_tokens
        self.pool = PagePool(shape.pages, pages, dtype)
        self._shape, self._dtype = shape, dtype

    def open(self) -> Session:
        """A new, empty session."""
        return Session(self.pool, self._shape, self._dtype, self.context_tokens)
