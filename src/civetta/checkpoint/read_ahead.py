"""Ask the system to read parts of mapped files before they are needed, in large pieces.

Reading a mapped page that is not in memory stops the reader for one small read. `MADV_WILLNEED`
starts the reads of a whole range, as large as the system makes them, beside what is computed.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

PIECE_BYTES = 64 << 20
"""Asked for at once, so that other threads' reads come in between."""


def ask_ahead(tensors: Iterable[Tensor]) -> int:
    """Have the pages behind tensors read; bytes that were asked for. Changes speed alone.

    Tensors in plain memory are no matter: their pages are there. 0 where the system has no such call.
    """
    advise = _advise()
    if advise is None:
        return 0
    asked = 0
    for x in tensors:
        start = x.data_ptr() - x.data_ptr() % mmap.PAGESIZE
        stop = x.data_ptr() + _span_bytes(x)
        for at in range(start, stop, PIECE_BYTES):
            size = min(PIECE_BYTES, stop - at)
            if advise(ctypes.c_void_p(at), ctypes.c_size_t(size), mmap.MADV_WILLNEED):
                break  # refused: it is read when it is touched
            asked += size
    return asked


def _span_bytes(x: Tensor) -> int:
    """From the first byte to the last; rows may lie apart."""
    if not x.numel():
        return 0
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.itemsize


def _advise() -> Callable[..., int] | None:
    if not hasattr(mmap, "MADV_WILLNEED"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)
