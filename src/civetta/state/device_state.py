"""What a sequence carries besides pages, on a GPU: one block of memory that kernels find by address.

The same state as `RecurrentState` in the places that the fused kernels write (kernels/fused/delta):
row p lies at place base mod 128 + p - base, histories are rings with position p in slot p mod ring.
Going back is a change of counters alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from civetta.kernels.ops import GDN_CHUNK
from civetta.state.recurrent import REWIND_ROWS, AnchoredState, RecurrentShape

PLACES = 2 * GDN_CHUNK + 2 * REWIND_ROWS
"""Places for the rows since the state's position."""

ALIGNMENT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of the block: byte offset, shape, dtype."""

    at: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


class DeviceLayout:
    """Where the parts of a state lie; the same for every session of a model."""

    def __init__(self, shape: RecurrentShape, dtype: torch.dtype) -> None:
        self.nbytes = 0
        v, h, a = shape.value_heads, shape.key_heads, shape.head_dim
        self.conv_ring = ring_of(shape.conv_rows)
        self.ple_ring = ring_of(shape.ple_rows) if shape.ple_width else 0
        self.gdn = [
            {
                "s": self._take((v, a, a), torch.float32),
                "k": self._take((PLACES, h, a), dtype),
                "v": self._take((PLACES, v, a), dtype),
                "log_decay": self._take((PLACES, v), torch.float32),
                "beta": self._take((PLACES, v), torch.float32),
                "conv": self._take((self.conv_ring, shape.channels), dtype),
            }
            for _ in range(shape.layers)
        ]
        self.ple = self._take((self.ple_ring, shape.ple_width), torch.float32)

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Part:
        part = Part(at=self.nbytes, shape=shape, dtype=dtype)
        self.nbytes += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        return part


def ring_of(rows: int) -> int:
    """Slots for `rows` rows of history and REWIND_ROWS to go back by: a power of two."""
    return 1 << (rows + REWIND_ROWS - 1).bit_length()


class DeviceState(AnchoredState):
    """All recurrent state of one sequence."""

    def __init__(
        self, shape: RecurrentShape, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.layout = DeviceLayout(shape, dtype)
        self._block = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)

    @property
    def address(self) -> int:
        """Where the block begins in the device's memory."""
        return self._block.data_ptr()

    def parts(self, position: int) -> dict[str, Tensor]:
        """S, the rows since, and the histories; views.

        Rows that lie in two places (see the kernels) are listed for both.
        """
        start, opened = self.base % (2 * GDN_CHUNK), position - self.base
        twice = max(start + opened - 2 * GDN_CHUNK, 0)
        found = {"ple": self._view(self.layout.ple)}
        for i, layer in enumerate(self.layout.gdn):
            found[f"gdn.{i}.s"] = self._view(layer["s"])
            for name in ("k", "v", "log_decay", "beta"):
                places = self._view(layer[name])
                found[f"gdn.{i}.{name}"] = places[start : start + opened]
                found[f"gdn.{i}.{name}.twice"] = places[:twice]
            found[f"conv.{i}"] = self._view(layer["conv"])
        return found

    def rewind(self, rows: int, position: int) -> None:  # noqa: ARG002 - as SequenceState says
        """Take back the newest `rows` <= REWIND_ROWS rows: places and slots need no change."""
        assert 0 <= rows <= REWIND_ROWS

    def _view(self, part: Part) -> Tensor:
        piece = self._block[part.at : part.at + part.nbytes]
        return piece.view(part.dtype).view(part.shape)
