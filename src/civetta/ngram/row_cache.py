"""`RowCache`: stored rows kept in memory, bounded, direct-mapped by row number.

Every row has one slot; a new row takes it from the old one. No bookkeeping beyond the row number of
each slot, so that looking up a gather costs a few array operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPREAD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: neighbours land far apart (Knuth, 6.4)


class RowCache:
    """At most `budget_bytes` of rows of `row_bytes`; 0 keeps none. Not thread-safe."""

    def __init__(self, *, budget_bytes: int, row_bytes: int, table_rows: int) -> None:
        slots = min(budget_bytes // (row_bytes + 8), 2 * table_rows)
        self.slots = 1 << (slots.bit_length() - 1) if slots > 0 else 0
        self._shift = np.uint64(64 - max(self.slots.bit_length() - 1, 1))
        self._tags = np.full(self.slots, -1, dtype=np.int64)
        self._rows = np.empty((self.slots, row_bytes), dtype=np.uint8)  # touched as it fills

    def look_up(self, rows_N: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
        """Which of the rows are held [N], and the bytes of those [held, row_bytes], copied."""
        if not self.slots:
            return np.zeros(len(rows_N), dtype=bool), self._rows
        at_N = self._slots_of(rows_N)
        held_N = self._tags[at_N] == rows_N
        return held_N, self._rows[at_N[held_N]]

    def keep(self, rows_N: NDArray[np.int64], data_NB: NDArray[np.uint8]) -> None:
        """Take rows in; of two that want one slot either stays."""
        if not self.slots or not len(rows_N):
            return
        at_N = self._slots_of(rows_N)
        self._tags[at_N] = rows_N
        stays = self._tags[at_N] == rows_N
        self._rows[at_N[stays]] = data_NB[stays]

    def _slots_of(self, rows_N: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.slots == 1:
            return np.zeros(len(rows_N), dtype=np.int64)
        mixed = rows_N.astype(np.uint64) * np.uint64(SPREAD)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(SPREAD)  # once keeps strides
        return (mixed >> self._shift).astype(np.int64)
