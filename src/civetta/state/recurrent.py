"""What a sequence carries besides pages: delta state, open chunk, conv and n-gram history.

The delta state S is kept at `base`, a multiple of 64, with the rows since; S moves on only when a
chunk is complete and REWIND_ROWS beyond recall, so going back up to REWIND_ROWS rows is a change of
counters (design.md section 2, model.md B.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.kernels.ops import GDN_CHUNK

if TYPE_CHECKING:
    from collections.abc import Mapping

REWIND_ROWS = 8
"""Rows that a sequence can go back by without recomputing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """Sizes: GDN layers, key and value heads, head width, conv channels and history rows, n-gram
    conv width and history rows (0 without an n-gram layer)."""

    layers: int
    key_heads: int
    value_heads: int
    head_dim: int
    channels: int
    conv_rows: int
    ple_width: int
    ple_rows: int


class GdnState:
    """One layer: S [V, A, A] float32 at `base`; k [T, H, A], v [T, V, A] and gates since."""

    def __init__(
        self, shape: RecurrentShape, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        rows, heads, width = GDN_CHUNK + REWIND_ROWS, shape.value_heads, shape.head_dim
        self.s_VAA = torch.zeros(heads, width, width, device=device)
        self.k = torch.zeros(rows, shape.key_heads, width, dtype=dtype, device=device)
        self.v = torch.zeros(rows, heads, width, dtype=dtype, device=device)
        self.log_decay = torch.zeros(rows, heads, device=device)
        self.beta = torch.zeros(rows, heads, device=device)


class History:
    """The newest rows of one tensor, enough for a convolution and REWIND_ROWS steps back."""

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self.rows = rows
        self._kept = torch.zeros(rows + REWIND_ROWS, width, dtype=dtype, device=device)

    def last(self) -> Tensor:
        """The `rows` newest rows, zeros before the sequence's start."""
        return self._kept[REWIND_ROWS:]

    def push(self, new_TC: Tensor) -> None:
        """Append rows; the oldest fall away."""
        keep = self._kept.shape[0]
        self._kept = torch.cat([self._kept, new_TC.to(self._kept.dtype)])[-keep:].clone()

    def rewind(self, rows: int) -> None:
        """Forget the newest `rows` rows."""
        if rows:
            kept = self._kept
            self._kept = torch.cat([torch.zeros_like(kept[:rows]), kept[:-rows]])

    def tensor(self) -> Tensor:
        """All kept rows, for snapshots and tests."""
        return self._kept


class AnchoredState:
    """What every form of recurrent state has: S stands at `base`, the rows since are kept."""

    def __init__(self) -> None:
        self.base = 0

    def base_after(self, position: int) -> int:
        """Where S may stand once `position` tokens are in: all that no rewind can take back."""
        settled = max(position - REWIND_ROWS, 0)
        return max(self.base, settled - settled % GDN_CHUNK)

    def numbers(self) -> dict[str, int]:
        """Where S stands."""
        return {"base": self.base}

    def set_numbers(self, numbers: Mapping[str, int]) -> None:
        """Say where the S that follows stands."""
        self.base = numbers["base"]


class RecurrentState(AnchoredState):
    """All recurrent state of one sequence."""

    def __init__(
        self, shape: RecurrentShape, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.gdn = [GdnState(shape, dtype, device) for _ in range(shape.layers)]
        self.conv = [
            History(shape.conv_rows, shape.channels, dtype, device) for _ in range(shape.layers)
        ]
        self.ple = History(shape.ple_rows, shape.ple_width, torch.float32, device)

    def parts(self, position: int) -> dict[str, Tensor]:
        """S, the rows since, and the histories; views."""
        opened = position - self.base
        found = {"ple": self.ple.tensor()}
        for i, (layer, history) in enumerate(zip(self.gdn, self.conv, strict=True)):
            found[f"gdn.{i}.s"] = layer.s_VAA
            found[f"gdn.{i}.k"] = layer.k[:opened]
            found[f"gdn.{i}.v"] = layer.v[:opened]
            found[f"gdn.{i}.log_decay"] = layer.log_decay[:opened]
            found[f"gdn.{i}.beta"] = layer.beta[:opened]
            found[f"conv.{i}"] = history.tensor()
        return found

    def rewind(self, rows: int, position: int) -> None:  # noqa: ARG002 - as SequenceState says
        """Take back the newest `rows` <= REWIND_ROWS rows of every history."""
        assert 0 <= rows <= REWIND_ROWS
        for history in (*self.conv, self.ple):
            history.rewind(rows)
