"""Tables of random bytes on disk, with the bytes and the numbers that a gather has to return."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from civetta.checkpoint import formats
from civetta.ngram.layout import Field, Shard, TableLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from civetta.checkpoint.formats import QuantFormat


@dataclass(frozen=True)
class Table:
    layout: TableLayout
    stored_RB: NDArray[np.uint8]


def write_table(
    folder: Path,
    *,
    fmt: QuantFormat = formats.IQ4_NL,
    cols: int = 160,
    rows: int = 1000,
    shards: int = 1,
    files: int = 1,
    seed: int = 0,
    shuffled: bool = False,
    at: int = 77,
) -> Table:
    """A table whose shards lie in `files` files, unaligned, other bytes before and between."""
    rng = np.random.default_rng(seed)
    row_bytes = fmt.row_bytes(cols)
    stored = rng.integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    a_shard = -(-rows // shards)
    blobs = [bytearray(rng.bytes(at)) for _ in range(files)]
    placed: dict[int, Shard] = {}
    order = rng.permutation(shards) if shuffled else np.arange(shards)
    for k in order.tolist():
        part = stored[k * a_shard : (k + 1) * a_shard]
        blob = blobs[k % files]
        path = folder / f"part{k % files}.bin"
        placed[k] = Shard(path=path, offset=len(blob), rows=len(part))
        blob += part.tobytes() + rng.bytes(13)
    for n, blob in enumerate(blobs):
        (folder / f"part{n}.bin").write_bytes(bytes(blob))
    field = Field(row_bytes=row_bytes, shards=tuple(placed[k] for k in range(shards)))
    return Table(TableLayout(format=fmt, cols=cols, fields=(field,)), stored)


def as_asked(found) -> NDArray[np.uint8]:
    """The stored rows in the order they were asked for, [M, row_bytes]."""
    return found.data_NB.numpy()[found.back_M.reshape(-1)]


def open_fds() -> int:
    """Open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def os_threads() -> int:
    """Threads of this process, the native ones too."""
    return len(list(Path("/proc/self/task").iterdir()))


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
