"""Where images lie in a sequence: what a session remembers of them. No pixels, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """An image's placeholder tokens [start, stop), row by row of a rows x cols grid.

    `digest` tells images apart as the model sees them: pixels after preprocessing and tower.
    """

    start: int
    rows: int
    cols: int
    digest: bytes

    @property
    def tokens(self) -> int:
        """Tokens of the image."""
        return self.rows * self.cols

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + self.tokens

    @property
    def advance(self) -> int:
        """Rope positions that the image takes: its longer side (model.md D.3)."""
        return max(self.rows, self.cols)
