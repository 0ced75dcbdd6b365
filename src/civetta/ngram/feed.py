"""`RowFeed`: tokens in, rows of numbers out; rows are read before they are needed where possible.

`begin` asks for a forward's rows before its first layer, `take` waits for them at the n-gram layer.
`prefetch` reads what a later forward will need: the next chunk of a prompt behind the compute of
this one, a sampled token, drafts. The claim rules are exact:

- a prefetch is used only by tokens whose history and ids are equal to its own; whose they are does
  not matter;
- tokens that match no prefetch are read plainly. Their read queues behind the one in flight, whose
  rows stay claimable;
- a long piece is claimed whole, a short one (decode, drafts) token by token;
- a prefetch whose read failed counts for nothing: its claimer reads plainly, and gets the error if
  that fails too.

What nobody claims is dropped when newer prefetches need its place.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from civetta.errors import ReadFailed
from civetta.ngram.decode import RowDecoder
from civetta.ngram.store import GIVEN_UP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from civetta.ngram.hash import NgramHash
    from civetta.ngram.store import RowStore, StoredRows, Ticket

SHORT_TOKENS = 16
"""Pieces up to here are claimed token by token: a sampled token with its drafts is at most 8."""
CHUNK_TOKENS_KEPT = 4 * 8192
"""Of longer pieces: the largest chunk of four prompts, or as many short prompts as that makes."""
TOKENS_KEPT = 512

Piece = tuple["Sequence[int]", "Sequence[int]"]
Key = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedStats:
    """Counters. wait_s: time that `take` stood still; claimed, plain: reads by their origin."""

    wait_s: float = 0.0
    claimed: int = 0
    plain: int = 0
    prefetched: int = 0
    dropped: int = 0


@dataclass(slots=True)
class _Part:
    """Rows of consecutive tokens under one ticket; `claimed` when a prefetch had asked for them."""

    ticket: Ticket
    rows_TH: NDArray[np.int64]
    claimed: bool


class RowTicket:
    """The rows of one piece, asked for and not taken.

    `piece` of a table in memory: ids and what comes before them. Nothing is read before it is needed.
    """

    def __init__(self, parts: list[_Part], piece: Piece | None = None) -> None:
        self.parts, self.piece = parts, piece

    def cancel(self) -> None:
        """Give the rows up; any thread may."""
        self.piece = None
        for part in list(self.parts):
            part.ticket.cancel()


class RowFeed:
    """The table as the model sees it. One thread at a time, but for `RowTicket.cancel`."""

    def __init__(
        self,
        ngram_hash: NgramHash,
        store: RowStore,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        prefetch: bool = True,
    ) -> None:
        self.store = store
        self._hash = ngram_hash
        self._on_disk = store.placement == "disk"
        self._prefetches = prefetch and self._on_disk  # memory is read as it is needed
        self._decoder = RowDecoder(store.layout, device=device or torch.device("cpu"), dtype=dtype)
        self._ahead: dict[bool, OrderedDict[Key, _Part]] = {
            True: OrderedDict(),
            False: OrderedDict(),
        }  # by whether the piece is short
        self._stats = FeedStats()

    def begin(self, ids: Sequence[int], history: Sequence[int]) -> RowTicket:
        """Ask for the rows of `ids`, which follow `history`; never waits for a disk."""
        if not self._on_disk:
            return RowTicket([], (ids, history[-self._hash.context :]))
        rows_TH = self._hash.row_ids(ids, history)
        keys = self._keys(ids, history)
        parts: list[_Part] = []
        start = at = 0  # [start, at): tokens that no prefetch has
        try:
            for key in keys:
                ahead = self._ahead[self._is_short(ids)].pop(key, None)
                if ahead is not None:
                    self._read_plainly(parts, rows_TH[start:at])
                    parts.append(ahead)
                    self._count(claimed=1)
                at += len(key[1])
                if ahead is not None:
                    start = at
            self._read_plainly(parts, rows_TH[start:])
        except BaseException:
            RowTicket(parts).cancel()
            raise
        return RowTicket(parts)

    def take(self, *tickets: RowTicket) -> torch.Tensor:
        """Wait for the rows: dtype [T, heads * row_values], a token's rows side by side, those of one
        ticket after the other.

        Raises ReadFailed; the tickets are spent either way.
        """
        began_s = time.perf_counter()
        parts = self._parts(tickets)
        try:
            stored = [self._wait(part) for part in parts]
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
        finally:
            self._count(wait_s=time.perf_counter() - began_s)
        tokens = sum(len(part.rows_TH) for part in parts)
        return self._decoder.decode(*stored).view(tokens, -1)

    def _parts(self, tickets: Sequence[RowTicket]) -> list[_Part]:
        """What to wait for: parts asked for, or, of a table in memory, one gather for all pieces."""
        if self._on_disk:
            return [part for ticket in tickets for part in ticket.parts]
        pieces = [piece for ticket in tickets if (piece := ticket.piece) is not None]
        if len(pieces) < len(tickets):
            raise ReadFailed(GIVEN_UP)
        for ticket in tickets:
            ticket.piece = None
        parts: list[_Part] = []
        self._read_plainly(parts, self._hash.rows_of_pieces(pieces))
        return parts

    def prefetch(self, ids: Sequence[int], history: Sequence[int]) -> None:
        """Read rows of tokens that are expected to follow `history`; an error shows at the claim."""
        if not self._prefetches or not len(ids):
            return
        rows_TH = self._hash.row_ids(ids, history)
        short = self._is_short(ids)
        ahead = self._ahead[short]
        at = 0
        for key in self._keys(ids, history):
            count = len(key[1])
            if key not in ahead:
                rows = rows_TH[at : at + count]
                ahead[key] = _Part(self.store.submit(rows.reshape(-1)), rows, claimed=True)
                self._count(prefetched=1)
            at += count
        while self._kept_tokens(ahead) > (TOKENS_KEPT if short else CHUNK_TOKENS_KEPT):
            _, oldest = ahead.popitem(last=False)
            oldest.ticket.cancel()
            self._count(dropped=1)

    def stats(self) -> FeedStats:
        """Counters since the feed was made."""
        return self._stats

    def check(self) -> None:
        """Prove that the books balance."""
        assert self._kept_tokens(self._ahead[True]) <= TOKENS_KEPT
        assert self._kept_tokens(self._ahead[False]) <= CHUNK_TOKENS_KEPT
        waiting = sum(map(len, self._ahead.values()))
        s = self._stats
        assert s.prefetched == s.claimed + s.dropped + waiting, "a prefetch was lost"

    def close(self) -> None:
        """Drop what was prefetched and close the store; idempotent."""
        for ahead in self._ahead.values():
            while ahead:
                ahead.popitem()[1].ticket.cancel()
                self._count(dropped=1)
        self.store.close()

    def _is_short(self, ids: Sequence[int]) -> bool:
        return len(ids) <= SHORT_TOKENS

    def _kept_tokens(self, ahead: Mapping[Key, _Part]) -> int:
        return sum(len(part.rows_TH) for part in ahead.values())

    def _keys(self, ids: Sequence[int], history: Sequence[int]) -> list[Key]:
        """What a claim has to match: the tokens that rows depend on before a piece, and its ids."""
        context = self._hash.context
        tail = tuple(int(i) for i in history)[-context:]
        whole = tuple(int(i) for i in ids)
        if not self._is_short(ids):
            return [(tail, whole)]
        line = tail + whole
        at = len(tail)
        return [(line[max(0, n - context) : n], (line[n],)) for n in range(at, len(line))]

    def _read_plainly(self, parts: list[_Part], rows_TH: NDArray[np.int64]) -> None:
        if len(rows_TH):
            parts.append(_Part(self.store.submit(rows_TH.reshape(-1)), rows_TH, claimed=False))
            self._count(plain=1)

    def _wait(self, part: _Part) -> StoredRows:
        try:
            return part.ticket.wait()
        except ReadFailed:
            if not part.claimed:
                raise
        part.ticket, part.claimed = self.store.submit(part.rows_TH.reshape(-1)), False
        self._count(plain=1)
        return part.ticket.wait()

    def _count(self, **more: float) -> None:
        old = self._stats
        self._stats = replace(old, **{name: getattr(old, name) + n for name, n in more.items()})
