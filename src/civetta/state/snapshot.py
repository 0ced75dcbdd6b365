"""`Snapshot`: a sequence's whole state after some token, as a value.

It shares the sequence's pages and has copies of the rest. Nobody writes into a shared page
(`Session.reserve` copies it first), so a snapshot never changes.

The invariant, for every a and b: prefill(a + b) = restore(snapshot(a)) then prefill(b), bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from civetta.kernels.ops import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from civetta.state.pages import PagePool


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallState:
    """All of a snapshot but the pages.

    ids_T int32; rope_3T int64, the rope positions (t, h, w) of each token; `numbers` and `parts` of
    every `SequenceState`, by name; `rewindable`: tokens that a restored session can go back by.
    """

    ids_T: NDArray[np.int32]
    rope_3T: Tensor
    numbers: Mapping[str, int]
    parts: Mapping[str, Tensor]
    rewindable: int

    @property
    def position(self) -> int:
        """Tokens in the sequence."""
        return len(self.ids_T)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return (
            self.ids_T.nbytes
            + self.rope_3T.nbytes
            + sum(part.nbytes for part in self.parts.values())
        )


class Snapshot:
    """Small state, and one share of every page up to its position; `close` gives them back."""

    def __init__(self, small: SmallState, pages: tuple[int, ...], pool: PagePool) -> None:
        """Take over one share of each page, which the caller has taken."""
        assert len(pages) == -(-small.position // PAGE_TOKENS), "pages do not match tokens"
        self.small, self.pages, self.pool = small, pages, pool
        self._closed = False

    @property
    def position(self) -> int:
        """Tokens in the sequence."""
        return self.small.position

    @property
    def closed(self) -> bool:
        """Whether its pages were given back."""
        return self._closed

    def share(self) -> Snapshot:
        """The same value once more, with shares of its own."""
        assert not self._closed, "shared a closed snapshot"
        for page in self.pages:
            self.pool.share(page)
        return Snapshot(self.small, self.pages, self.pool)

    def close(self) -> None:
        """Give the pages back; idempotent."""
        if not self._closed:
            self._closed = True
            for page in self.pages:
                self.pool.drop(page)

    def check(self) -> None:
        """Prove that what it holds is held."""
        if not self._closed:
            assert all(self.pool.owners(page) > 0 for page in self.pages), "holds a free page"
            assert self.small.rope_3T.shape == (3, self.position), "rope does not match tokens"
