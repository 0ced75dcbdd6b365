"""What a sequence carries for the draft head: the streams that its rows still need.

Row p of the head takes the trunk's streams after token p and the id of token p + 1 (model.md B.1).
Its keys lie in the sequence's pages, one layer behind the trunk's, and are true for the first
`written` rows. The streams kept here reach from there, or from as far as a rewind can go, to the
newest token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.state.recurrent import REWIND_ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping


class DraftRows:
    """Streams [N, W] float32 of the newest tokens, and how many head rows are true.

    `written` counts rows whose next token is part of the sequence, so it is below the position.
    """

    def __init__(self, width: int, device: torch.device | None = None) -> None:
        self.written = 0
        self._streams_NW = torch.zeros(0, width, device=device)

    @property
    def kept(self) -> int:
        """Tokens whose streams are here: the newest ones."""
        return int(self._streams_NW.shape[0])

    def lag(self, position: int) -> int:
        """Rows before `position` whose keys are still to be written and can be."""
        return min(position - self.written, self.kept)

    def push(self, streams_TW: Tensor) -> None:
        """Append the streams of new tokens."""
        self._streams_NW = torch.cat([self._streams_NW, streams_TW.float()])

    def newest(self, rows: int) -> Tensor:
        """Streams [rows, W] of the newest tokens."""
        assert 0 < rows <= self.kept, "the streams of these tokens are gone"
        return self._streams_NW[-rows:]

    def settle(self, position: int) -> None:
        """All rows that can be true are written: keep what a rewind may need, no more."""
        self.written = max(position - 1, 0)
        self._streams_NW = self._streams_NW[-(REWIND_ROWS + 1) :].clone()

    def rewind(self, tokens: int, position: int) -> None:
        """Forget the newest `tokens` tokens; `position` of them are left."""
        kept = max(self.kept - tokens, 0)
        self._streams_NW = self._streams_NW[:kept].clone()
        self.written = min(self.written, max(position - 1, 0))

    def tensor(self) -> Tensor:
        """All kept streams, for snapshots and tests."""
        return self._streams_NW

    def load(self, streams_NW: Tensor, written: int) -> None:
        """Take over a state stored with `tensor` and `written`."""
        self._streams_NW, self.written = streams_NW.float().clone(), written

    def numbers(self) -> dict[str, int]:
        """Rows that are true, and tokens whose streams are here."""
        return {"written": self.written, "kept": self.kept}

    def set_numbers(self, numbers: Mapping[str, int]) -> None:
        """Make room for another sequence's streams."""
        self.written = numbers["written"]
        self._streams_NW = torch.zeros(
            numbers["kept"], self._streams_NW.shape[1], device=self._streams_NW.device
        )

    def parts(self, position: int) -> dict[str, Tensor]:  # noqa: ARG002 - as SequenceState says
        """The kept streams."""
        return {"streams": self._streams_NW}
