"""`ResidentRows`: the whole table in memory, the host's or a device's, in its stored format."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from civetta.errors import DeviceError, ReadFailed
from civetta.ngram.store import GIVEN_UP, StoredRows, StoreStats
from civetta.ngram.table_files import TableFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from civetta.ngram.layout import Field, Shard, TableLayout

_CHUNK_BYTES = 8 << 20


class ResidentRows:
    """A table on `device`; read once, when it is opened. `read` is told of the bytes of each piece.

    Raises ReadFailed or CheckpointMalformed for files that cannot be read, DeviceError when memory
    does not suffice.
    """

    def __init__(
        self,
        layout: TableLayout,
        *,
        placement: str,
        device: torch.device,
        read: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.layout, self.placement, self._read = layout, placement, read
        self._gathers = self._rows = 0
        try:
            self._table: torch.Tensor | None = torch.empty(
                (layout.rows, layout.row_bytes), dtype=torch.uint8, device=device
            )
        except (RuntimeError, MemoryError) as error:
            raise DeviceError(
                f"The n-gram table needs {layout.nbytes} bytes on {device}, which are not free; use"
                " --ngram-placement disk."
            ) from error
        files = TableFiles(layout, direct=False)
        try:
            at = 0
            for field in layout.fields:
                self._load(files, field, at)
                at += field.row_bytes
            files.verify()
        finally:
            files.close()

    def _load(self, files: TableFiles, field: Field, at: int) -> None:
        """Read one piece of every row into bytes [at, at + row_bytes) of the stored rows."""
        table = self._table
        assert table is not None
        rows_a_chunk = max(1, _CHUNK_BYTES // field.row_bytes)
        first = 0
        for shard in field.shards:
            for start in range(0, shard.rows, rows_a_chunk):
                rows = min(rows_a_chunk, shard.rows - start)
                chunk = _read(files, field, shard, start, rows)
                table[first + start : first + start + rows, at : at + field.row_bytes] = chunk
                self._read(chunk.nbytes)
            first += shard.rows

    def submit(self, rows_M: NDArray[np.int64]) -> ResidentTicket:
        """Ask for rows [M]."""
        assert self._table is not None, "used a closed store"
        rows_N, back_M = np.unique(rows_M, return_inverse=True)
        assert not len(rows_N) or (rows_N[0] >= 0 and rows_N[-1] < self.layout.rows)
        self._gathers += 1
        self._rows += len(rows_N)
        return ResidentTicket(self._table, rows_N, back_M)

    def stats(self) -> StoreStats:
        """Counters since the store was opened."""
        return StoreStats(gathers=self._gathers, rows=self._rows, cached=self._rows)

    def close(self) -> None:
        """Let go of the memory."""
        self._table = None


class ResidentTicket:
    """Rows that were asked for; they are copied when they are taken."""

    def __init__(
        self, table: torch.Tensor, rows_N: NDArray[np.int64], back_M: NDArray[np.int64]
    ) -> None:
        self._table: torch.Tensor | None = table
        self._rows_N, self._back_M = rows_N, back_M

    def wait(self) -> StoredRows:
        """The rows; once. Raises ReadFailed after `cancel`."""
        table, self._table = self._table, None
        if table is None:
            raise ReadFailed(GIVEN_UP)
        where = torch.from_numpy(self._rows_N).to(table.device)
        return StoredRows(
            rows_N=self._rows_N, data_NB=table.index_select(0, where), back_M=self._back_M
        )

    def cancel(self) -> None:
        """Give the claim up."""
        self._table = None


def _read(files: TableFiles, field: Field, shard: Shard, start: int, rows: int) -> torch.Tensor:
    """Rows [start, start + rows) of a shard, uint8 [rows, row_bytes]."""
    chunk = np.empty((rows, field.row_bytes), dtype=np.uint8)
    number = files.paths.index(shard.path)
    view = chunk.data.cast("B")
    offset, got = shard.offset + start * field.row_bytes, 0
    while got < len(view):
        try:
            size = os.preadv(files.fds[number], [view[got:]], offset + got)
        except OSError as error:
            raise ReadFailed(
                f"Reading the n-gram table failed: {error.strerror}, {shard.path} at byte"
                f" {offset + got}. Check the disk and start again."
            ) from error
        if not size:
            raise ReadFailed(
                f"{shard.path} ended at byte {offset + got}, inside the n-gram table; it is"
                " truncated, download it again."
            )
        got += size
    return torch.from_numpy(chunk)
