"""`TrunkModel`: a trunk, its session store and its vision tower as the step loop's model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from civetta.chat.images import PreparedImage
    from civetta.model.inputs import Piece
    from civetta.model.trunk import Trunk
    from civetta.model.vision import ImageEncoding
    from civetta.model.vision_build import LazyTower
    from civetta.state.session import Session, SessionStore


class TrunkModel:
    """The trunk, its session store and the vision tower as the step loop sees them."""

    def __init__(self, trunk: Trunk, store: SessionStore, tower: LazyTower | None = None) -> None:
        self._trunk, self._store, self._tower = trunk, store, tower

    @property
    def pages_total(self) -> int:
        """Pages that all sessions and the cache share."""
        return self._store.pool.pages

    @property
    def pages_free(self) -> int:
        """Pages nobody holds."""
        return self._store.pool.free_pages

    def open_session(self) -> Session:
        """A new, empty session."""
        return self._store.open()

    def expect(self, session: Session, ids: Sequence[int]) -> None:
        """Read ahead what the session's next tokens need."""
        self._trunk.expect(session, ids)

    def forward_pieces(self, pieces: Sequence[Piece]) -> Tensor:
        """Append each piece to its session; float32 logits of the wanted rows [n, vocab]."""
        return self._trunk.forward_pieces(pieces)

    @property
    def shortlists(self) -> Callable[[Tensor, Tensor, Tensor, int], Tensor] | None:
        """The kernel that lists the best tokens of rows; None on a CPU."""
        return self._trunk.shortlists

    def image_digest(self, image: PreparedImage) -> bytes:
        """16 bytes of the pixels and the tower."""
        return self._tower_in_use.digest(image)

    def begin_image(self, image: PreparedImage) -> ImageEncoding:
        """Start to encode; the first image loads the tower."""
        return self._tower_in_use.begin(image)

    @property
    def _tower_in_use(self) -> LazyTower:
        assert self._tower is not None, "requests with images are refused without a tower"
        return self._tower
