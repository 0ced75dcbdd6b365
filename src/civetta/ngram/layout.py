"""`TableLayout`: where the rows of the n-gram table lie in the files, and in which format.

A table is one tensor or several equal ones in row order (model.md A.3, C.2). A row is stored in one
piece, or in two (NVFP4 codes and their group scales in tensors of their own, A.8); the pieces side
by side are the stored row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from civetta.checkpoint.formats import QuantFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Consecutive rows: `rows` of them from byte `offset` of a file on.

    scale, scale_2: factors of these rows beside those inside them, [1] float32 (FP8, NVFP4).
    """

    path: Path
    offset: int
    rows: int
    scale: Tensor | None = None
    scale_2: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One piece of every row, `row_bytes` long; all shards but the last have equally many rows."""

    row_bytes: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLayout:
    """The whole table; `cols` values a row."""

    format: QuantFormat
    cols: int
    fields: tuple[Field, ...]

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return sum(shard.rows for shard in self.fields[0].shards)

    @property
    def rows_a_shard(self) -> int:
        """Rows of every shard but the last, which may have fewer."""
        return self.fields[0].shards[0].rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row, all its pieces together."""
        return sum(field.row_bytes for field in self.fields)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.rows * self.row_bytes

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, each once, in order of first use."""
        found = [shard.path for field in self.fields for shard in field.shards]
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Parts of files and where they go, sorted by file and offset.

    file_P int32 (position in `TableLayout.paths`), offset_P int64 in the file, bytes_P int32, out_P
    int64 in the memory of the gather.
    """

    file_P: NDArray[np.int32]
    offset_P: NDArray[np.int64]
    bytes_P: NDArray[np.int32]
    out_P: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.file_P)


class RowLocator:
    """Rows to pieces; holds the shards of a layout as arrays."""

    def __init__(self, layout: TableLayout) -> None:
        numbers = {path: n for n, path in enumerate(layout.paths)}
        self._layout = layout
        self._file_FS = np.array(
            [[numbers[s.path] for s in f.shards] for f in layout.fields], dtype=np.int32
        )
        self._offset_FS = np.array(
            [[s.offset for s in f.shards] for f in layout.fields], dtype=np.int64
        )
        first = list(zip(self._file_FS[0], self._offset_FS[0], strict=True))
        self._in_order = len(layout.fields) == 1 and first == sorted(first)

    def pieces(self, rows_N: NDArray[np.int64]) -> Pieces:
        """The pieces of `rows_N`, which ascend; row i goes to byte i * row_bytes."""
        layout = self._layout
        shard_N, inside_N = np.divmod(rows_N, layout.rows_a_shard)
        start_N = np.arange(len(rows_N), dtype=np.int64) * layout.row_bytes
        parts, at = [], 0
        for f, field in enumerate(layout.fields):
            offset_N = self._offset_FS[f][shard_N] + inside_N * field.row_bytes
            size_N = np.full(len(rows_N), field.row_bytes, dtype=np.int32)
            parts.append((self._file_FS[f][shard_N], offset_N, size_N, start_N + at))
            at += field.row_bytes
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        if not self._in_order:
            order = np.lexsort((columns[1], columns[0]))
            columns = [column[order] for column in columns]
        file_P, offset_P, bytes_P, out_P = columns
        return Pieces(file_P=file_P, offset_P=offset_P, bytes_P=bytes_P, out_P=out_P)
