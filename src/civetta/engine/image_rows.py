"""`ImageRowsCache`: what the vision tower made of images, by digest, within a byte budget."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class ImageRowsCache:
    """Rows [N, D] of images seen lately; the one unused for longest goes first."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.bytes_held = 0
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()

    def get(self, digest: bytes) -> Tensor | None:
        """The rows of an image, None when they are not here."""
        rows_ND = self._rows.get(digest)
        if rows_ND is not None:
            self._rows.move_to_end(digest)
        return rows_ND

    def put(self, digest: bytes, rows_ND: Tensor) -> None:
        """Keep rows; those above the budget on their own are not kept."""
        if digest in self._rows or rows_ND.nbytes > self.budget_bytes:
            return
        self._rows[digest] = rows_ND
        self.bytes_held += rows_ND.nbytes
        while self.bytes_held > self.budget_bytes:
            _, oldest = self._rows.popitem(last=False)
            self.bytes_held -= oldest.nbytes

    def check(self) -> None:
        """Prove that the books balance."""
        assert self.bytes_held == sum(rows.nbytes for rows in self._rows.values())
        assert self.bytes_held <= self.budget_bytes
