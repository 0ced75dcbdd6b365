"""What the step loop needs of a model; `TrunkModel` provides it, tests fake it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from civetta.chat.images import PreparedImage
    from civetta.model.inputs import Piece
    from civetta.state.session import Session


class Encoding(Protocol):
    """One image on its way through the vision tower."""

    @property
    def rows_NW(self) -> Tensor:
        """Rows, one a token; `advance` has returned True."""
        ...

    def advance(self) -> bool:
        """Do one step of bounded work; True when the rows are there."""
        ...


class LanguageModel(Protocol):
    """The model, as far as the loop cares. Used by the step thread alone."""

    @property
    def pages_total(self) -> int:
        """Pages of PAGE_TOKENS tokens that all sessions and the cache share."""
        ...

    @property
    def pages_free(self) -> int:
        """Pages nobody holds; any thread may ask."""
        ...

    def open_session(self) -> Session:
        """Open a sequence; raises a CivettaError when there is no room."""
        ...

    def expect(self, session: Session, ids: Sequence[int]) -> None:
        """Tokens that the session's next piece will begin with; only speed depends on it."""
        ...

    def forward_pieces(self, pieces: Sequence[Piece]) -> Tensor:
        """Append each piece to its session; float32 logits [rows, V] of the wanted rows.

        Rows come in the order of the pieces. A session occurs once. When it raises, the sessions
        of the launch may be torn and are of no further use.
        """
        ...

    @property
    def shortlists(self) -> Callable[[Tensor, Tensor, Tensor, int], Tensor] | None:
        """What lists the best tokens of rows where the logits are (kernels/shortlist); None: the
        rows are at hand as they are."""
        ...

    def image_digest(self, image: PreparedImage) -> bytes:
        """What tells an image's state apart: its pixels and the tower; 16 bytes."""
        ...

    def begin_image(self, image: PreparedImage) -> Encoding:
        """Start to encode an image; nothing is computed yet. Raises a CheckpointError."""
        ...
