"""`NoCache`: the continuation cache that keeps nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.cache.protocol import CacheStats, MissReason, RestorePoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.cache.protocol import ImageMark, KeepKind
    from civetta.state.session import Session


class NoRestore:
    """A restore of nothing: done at once."""

    def __init__(self, miss: MissReason | None = None) -> None:
        self.tokens = 0
        self.miss = miss

    def advance(self) -> bool:
        """Done."""
        return True

    def wait(self, timeout_s: float) -> None:
        """There is nothing to wait for."""

    def cancel(self) -> None:
        """Nothing to stop."""


class NoCache:
    """Every lookup misses, nothing is kept: what --cache off means, and tests of a cold engine."""

    def find(self, tokens: Sequence[int], images: Sequence[ImageMark] = ()) -> RestorePoint:  # noqa: ARG002
        """Nothing, and no positions to stop at."""
        return RestorePoint(cached_tokens=0, miss=MissReason.DISABLED)

    def begin(self, point: RestorePoint, session: Session) -> NoRestore:  # noqa: ARG002
        """A restore of nothing."""
        return NoRestore()

    def keep(  # noqa: D102 - as the protocol says
        self,
        session: Session,  # noqa: ARG002
        kind: KeepKind,  # noqa: ARG002
        images: Sequence[ImageMark] = (),  # noqa: ARG002
    ) -> bool:
        return False

    def make_room(self, pages: int) -> bool:  # noqa: ARG002
        """There is nothing to give up."""
        return False

    def stats(self) -> CacheStats:
        """Zeros."""
        return CacheStats()

    def check(self) -> None:
        """There are no books."""

    def close(self, *, drain_s: float = 0.0) -> None:
        """There is nothing to close."""
