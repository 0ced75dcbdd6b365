"""Drafts from the text itself: what followed when the newest tokens were last seen.

No model, no state but the tokens. Where a text repeats (code that is edited, quotes, lists) this is
right often and costs nothing; elsewhere it finds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LONGEST_MATCH = 32
"""Tokens compared backwards at most; a longer match is not surer."""


class TextIndex:
    """The tokens of one sequence, searchable from the end."""

    __slots__ = ("_ids_N", "_size")

    def __init__(self) -> None:
        self._ids_N = np.zeros(256, np.int32)
        self._size = 0

    def __len__(self) -> int:
        """Tokens of the sequence."""
        return self._size

    def append(self, ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        need = self._size + len(ids)
        if need > len(self._ids_N):
            grown_N = np.zeros(max(need, 2 * len(self._ids_N)), np.int32)
            grown_N[: self._size] = self._ids_N[: self._size]
            self._ids_N = grown_N
        self._ids_N[self._size : need] = ids
        self._size = need

    def continuation(self, most: int) -> tuple[tuple[int, ...], int]:
        """Up to `most` tokens that may follow, and how many tokens before them were alike.

        The longest match wins, the newest of equals. A match that runs into the end repeats itself.
        """
        if self._size < 2 or most < 1:
            return (), 0
        end_M, match = self._matches()
        if not match:
            return (), 0
        place = int(end_M[-1])
        period = self._size - 1 - place
        ids_N = self._ids_N[place + 1 : self._size]
        return tuple(int(ids_N[i % period]) for i in range(most)), match

    def _matches(self) -> tuple[NDArray[np.int64], int]:
        """Places [M] where the longest match ends, ascending, and its length; 0: there is none."""
        size, ids_N = self._size, self._ids_N
        best_M = np.flatnonzero(ids_N[: size - 1] == ids_N[size - 1])
        for match in range(1, LONGEST_MATCH):
            longer_M = best_M[best_M >= match]
            longer_M = longer_M[ids_N[longer_M - match] == ids_N[size - 1 - match]]
            if not len(longer_M):
                return best_M, match if len(best_M) else 0
            best_M = longer_M
        return best_M, LONGEST_MATCH
