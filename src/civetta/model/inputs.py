"""What one forward takes: pieces of sequences, and the rows whose logits are wanted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from civetta.state.session import Session

Rows = Literal["none", "last", "all"]


class RowTicket(Protocol):
    """Rows that were asked for and not taken."""

    def cancel(self) -> None:
        """Give them up; without effect on rows that were taken."""
        ...


class RowSource(Protocol):
    """The n-gram table as the model sees it; `history` is what comes before `ids`, its last
    tokens at least.
    """

    def begin(self, ids: Sequence[int], history: Sequence[int]) -> Any:
        """Ask for the rows of `ids`, without waiting: a RowTicket."""
        ...

    def take(self, *tickets: Any) -> Tensor:
        """Wait for rows: [T, heads * row_values], a token's rows side by side, those of one ticket
        after the other; raises ReadFailed."""
        ...

    def prefetch(self, ids: Sequence[int], history: Sequence[int]) -> None:
        """Read rows ahead that a coming piece will ask for."""
        ...

    def close(self) -> None:
        """Give files, threads and memory back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageRows:
    """What the vision tower made of one image: rows [N, D] for positions start, start + 1, ..."""

    start: int
    rows_ND: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New tokens of one session; `rows` says which of them need logits.

    next_ids: the session's next piece where it is known, as in a prompt; its n-gram rows are read
    while this one is computed.
    `images` hold the rows of every image of `session.images` that the piece reaches into; they
    stand in for the embeddings of its placeholder ids. Other images may be among them.
    """

    session: Session
    ids: Sequence[int]
    rows: Rows = "last"
    next_ids: Sequence[int] = ()
    images: Sequence[ImageRows] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where a piece lies in the packed rows: [start, stop), and its first position.

    known_3N: rope positions of the sequence's tokens up to the piece's last one.
    """

    session: Session
    start: int
    stop: int
    first: int
    known_3N: Tensor

    @property
    def part(self) -> slice:
        """The packed rows of the piece."""
        return slice(self.start, self.stop)

    def tail(self, rows: int, start: int) -> Span:
        """The last `rows` rows, lying from `start` on in other packed rows."""
        skipped = self.stop - self.start - rows
        return replace(self, start=start, stop=start + rows, first=self.first + skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Rows of a launch that are needed behind its last mixer: packed numbers, and their spans.

    A piece without such rows has no span. Rows ascend, so N rows out of N are all of them.
    """

    rows_N: Tensor
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, pieces: Sequence[Piece], spans: Sequence[Span]) -> Wanted:
        """What the pieces' `rows` ask for; int64, on the CPU."""
        parts, narrow, start = [torch.zeros(0, dtype=torch.int64)], [], 0
        for piece, span in zip(pieces, spans, strict=True):
            count = {"none": 0, "last": 1, "all": span.stop - span.start}[piece.rows]
            if count:
                parts.append(torch.arange(span.stop - count, span.stop))
                narrow.append(span.tail(count, start))
                start += count
        return cls(rows_N=torch.cat(parts), spans=tuple(narrow))
