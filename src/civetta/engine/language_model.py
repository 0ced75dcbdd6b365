"""What the step loop needs of a model; `model` provides it, tests fake it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class LiveSession(Protocol):
    """The state of one running sequence, as far as the loop cares."""

    @property
    def position(self) -> int:
        """Tokens in the sequence; those of a restored prefix count."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class LanguageModel(Protocol):
    """The model, as far as the loop cares."""

    def open_session(self) -> LiveSession:
        """Open a sequence; raises a CivettaError when there is no room."""
        ...

    def forward(
        self, session: Any, ids: Sequence[int], rows: Literal["none", "last", "all"]
    ) -> Tensor:
        """Append ids to the session and return float32 logits [rows, V] of the wanted rows."""
        ...
