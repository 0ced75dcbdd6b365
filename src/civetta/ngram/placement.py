"""Where the n-gram table is kept: `auto` decides by its size against free memory, and says why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from civetta.errors import UsageError
from civetta.host import available_host_bytes
from civetta.log import log_event
from civetta.ngram.disk_rows import CACHE_BYTES, DiskRows
from civetta.ngram.resident_rows import ResidentRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.ngram.layout import TableLayout
    from civetta.ngram.store import RowStore

PLACEMENTS = ("auto", "disk", "ram", "gpu")
RESERVE_BYTES = 2 << 30
"""Memory that `auto` leaves to sessions, activations and the rest of the machine."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """Bytes that may be taken: of the host, and of the GPU (0 without one)."""

    host_bytes: int
    gpu_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How to keep and read the table; see the flags of the same names in options.py."""

    placement: str = "auto"
    reader: str = "auto"
    cache_bytes: int = CACHE_BYTES


def open_store(
    layout: TableLayout,
    options: StoreOptions,
    *,
    device: torch.device,
    other_bytes: int,
    read: Callable[[int], None] = lambda _: None,
) -> RowStore:
    """The store that `options` ask for, logged with the reason.

    other_bytes: stored weights beside the table, which `auto` keeps room for. `read` is told of bytes
    that were read into memory, piece by piece. Raises UsageError for
    a placement that the device does not have, DeviceError when memory does not suffice, ReadFailed
    or CheckpointMalformed for the files.
    """
    placement, reason = options.placement, "asked for"
    free = free_memory(device)
    if placement == "auto":
        placement, reason = choose(
            layout.nbytes, other_bytes=other_bytes, free=free, on_gpu=device.type != "cpu"
        )
    if placement == "gpu" and device.type == "cpu":
        raise UsageError("--ngram-placement gpu needs a GPU; use ram, disk or auto.")
    log_event(
        _log,
        logging.INFO,
        "ngram_placement",
        placement=placement,
        reason=reason,
        table_bytes=layout.nbytes,
        other_bytes=other_bytes,
        free_host_bytes=free.host_bytes,
        free_gpu_bytes=free.gpu_bytes or None,
    )
    if placement == "disk":
        return DiskRows(layout, reader=options.reader, cache_bytes=options.cache_bytes)
    where = device if placement == "gpu" else torch.device("cpu")
    return ResidentRows(layout, placement=placement, device=where, read=read)


def choose(
    table_bytes: int, *, other_bytes: int, free: FreeMemory, on_gpu: bool
) -> tuple[str, str]:
    """Placement and reason: the fastest memory in which the table leaves room for the rest."""
    if on_gpu and table_bytes + other_bytes + RESERVE_BYTES <= free.gpu_bytes:
        return "gpu", "fits beside the model on the GPU"
    beside = 0 if on_gpu else other_bytes
    if table_bytes + beside + RESERVE_BYTES <= free.host_bytes:
        return "ram", "fits beside the model in memory"
    return "disk", "does not fit beside the model in memory"


def free_memory(device: torch.device) -> FreeMemory:
    """What this process may take now, under the limit of its control group."""
    gpu_bytes = int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
    return FreeMemory(host_bytes=available_host_bytes(), gpu_bytes=gpu_bytes)
