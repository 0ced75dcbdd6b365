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

MOST_LAG = 128
"""Rows whose keys may wait for a draft: where drafting does not pay, few are ever written. Those of
prompts are beyond it and are written at once."""
MOST_KEPT = MOST_LAG + REWIND_ROWS + 1
"""Tokens whose streams are here between launches, at most."""


class DraftRows:
    """Streams [N, W] float32 of the newest tokens, and how many head rows are true.

    `written` counts rows whose next token is part of the sequence, so it is below the position;
    `kept` counts the tokens, the newest ones, whose streams are here.
    """

    def __init__(self, width: int, device: torch.device | None = None) -> None:
        self.written = 0
        self.kept = 0
        self._joined_NW = torch.zeros(0, width, device=device)
        # Behind the joined ones: buffers and rows of them, cut out and joined when they are read.
        self._pushed: list[tuple[Tensor, int, int]] = []

    def lag(self, position: int) -> int:
        """Rows before `position` whose keys are still to be written and can be."""
        return min(position - self.written, self.kept)

    def push(self, streams_TW: Tensor, start: int, stop: int) -> None:
        """Append rows [start, stop) of `streams_TW`, float32, as the streams of new tokens.

        Not copied: nobody may write over them before they are settled or taken back.
        """
        self._pushed.append((streams_TW, start, stop))
        self.kept += stop - start

    def newest(self, rows: int) -> Tensor:
        """Streams [rows, W] of the newest tokens."""
        assert 0 < rows <= self.kept, "the streams of these tokens are gone"
        return self.tensor()[-rows:]

    def settle(self, position: int) -> None:
        """All rows that can be true are written: keep what a rewind may need, no more."""
        self.written = max(position - 1, 0)
        self._keep(self.tensor()[-(REWIND_ROWS + 1) :].clone())

    def rewind(self, tokens: int, position: int) -> None:
        """Forget the newest `tokens` tokens; `position` of them are left."""
        self._keep(self.tensor()[: max(self.kept - tokens, 0)].clone())
        self.written = min(self.written, max(position - 1, 0))

    def tensor(self) -> Tensor:
        """All kept streams, for snapshots and tests."""
        if self._pushed:
            rows = [streams_TW[start:stop] for streams_TW, start, stop in self._pushed]
            self._joined_NW = torch.cat([self._joined_NW, *rows])
            self._pushed.clear()
        return self._joined_NW

    def load(self, streams_NW: Tensor, written: int) -> None:
        """Take over a state stored with `tensor` and `written`."""
        self._keep(streams_NW.float().clone())
        self.written = written

    def numbers(self) -> dict[str, int]:
        """Rows that are true, and tokens whose streams are here."""
        return {"written": self.written, "kept": self.kept}

    def set_numbers(self, numbers: Mapping[str, int]) -> None:
        """Make room for another sequence's streams."""
        self.written = numbers["written"]
        width, device = self._joined_NW.shape[1], self._joined_NW.device
        self._keep(torch.zeros(numbers["kept"], width, device=device))

    def parts(self, position: int) -> dict[str, Tensor]:  # noqa: ARG002 - as SequenceState says
        """The kept streams."""
        return {"streams": self.tensor()}

    def _keep(self, streams_NW: Tensor) -> None:
        self._joined_NW, self.kept = streams_NW, len(streams_NW)
        self._pushed.clear()
