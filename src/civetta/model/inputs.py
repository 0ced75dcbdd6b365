"""What one forward takes: pieces of sequences, and the rows whose logits are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from civetta.state.session import Session

Rows = Literal["none", "last", "all"]


class RowSource(Protocol):
    """The n-gram table as the model sees it."""

    def gather(self, ids_TH: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        """Rows of each token side by side, [T, heads * row_values]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New tokens of one session; `rows` says which of them need logits."""

    session: Session
    ids: Sequence[int]
    rows: Rows = "last"


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
