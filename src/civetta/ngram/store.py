"""`RowStore`: the n-gram table wherever it is kept; rows are asked for first and taken later.

A store hands out stored rows; `decode.py` makes numbers of them. Placement changes no bit: the
bytes are the file's everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from civetta.ngram.layout import TableLayout

GIVEN_UP = "The read of n-gram rows was given up; send the request again."
"""What a claim says that was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """The rows of a gather, each once, and where they belong.

    rows_N: row numbers, ascending. data_NB: their bytes, uint8 [N, row_bytes], on the store's
    device. back_M: for each of the M rows that were asked for, in order, its place in rows_N.
    """

    rows_N: NDArray[np.int64]
    data_NB: Tensor
    back_M: NDArray[np.int64]


class Ticket(Protocol):
    """A claim to rows that were asked for."""

    def wait(self) -> StoredRows:
        """The rows; once a ticket. Raises ReadFailed when they cannot be read, or after `cancel`."""
        ...

    def cancel(self) -> None:
        """Give the claim up; any thread may, at any time, more than once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counters. rows: asked for, after duplicates were dropped; cached: found in memory."""

    gathers: int = 0
    rows: int = 0
    cached: int = 0
    reads: int = 0
    read_bytes: int = 0


class RowStore(Protocol):
    """The table."""

    placement: str
    layout: TableLayout

    def submit(self, rows_M: NDArray[np.int64]) -> Ticket:
        """Ask for rows [M], in any order and with repetitions; never waits for a disk."""
        ...

    def stats(self) -> StoreStats:
        """Counters since the store was opened."""
        ...

    def close(self) -> None:
        """Give files, threads and memory back; idempotent."""
        ...
