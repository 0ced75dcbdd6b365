"""Batches on the device, built and hashed ahead of time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from queue import Queue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from training.data.curriculum import Plan, plan
from training.data.mixture import Batch, stream
from training.trainer.positions import rotary_positions
from training.trainer.step import ngram_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from civetta.model.config import ModelConfig

SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """One batch as tensors; without pictures `positions_B3T` is None and `pictures` empty."""

    ids_BT: Tensor
    weight_BT: Tensor
    segment_BT: Tensor
    ngram_NH: Tensor
    positions_B3T: Tensor | None = None
    pictures: tuple[Pictures, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """The pictures of one size: uint8 pixels [M, H, W, 3], and for each of their K tokens its place

    among the N rows of the batch and what lies in its square, int64 [M, K].
    """

    pixels_MHWC: Tensor
    place_MK: Tensor
    cells_MK: Tensor


def text_plan(phase: str, tokens: int) -> Plan:
    """A phase without pictures: the tower is trained on its own."""
    full = plan(phase, tokens)
    cut = {
        name: tuple(pair for pair in getattr(full, name) if pair[0] != "vision")
        for name in ("short", "middle", "long")
    }
    return replace(full, **cut)


def batches(
    phases: str, start: int, tokens: int, workers: int, *, pictures: bool = False
) -> Iterator[Batch]:
    """Batches from number `start` through phases like "start:300,main:3000"."""
    make = plan if pictures else text_plan
    for part in phases.split(","):
        name, _, until = part.partition(":")
        if start < int(until):
            stop = int(until)
            yield from stream(
                make(name, tokens), seed=SEED, start=start, stop=stop, workers=workers
            )
            start = stop


def feed(c: ModelConfig, source: Iterator[Batch], device: str) -> Iterator[Fed]:
    """Prepare the next batches in a thread while the device works."""
    box: Queue[Fed | BaseException | None] = Queue(4)

    def work() -> None:
        try:
            for batch in source:
                box.put(_prepare(c, batch, device))
            box.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            box.put(error)

    threading.Thread(target=work, daemon=True).start()
    while (item := box.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item


def _prepare(c: ModelConfig, batch: Batch, device: str) -> Fed:
    arrays: dict[str, Any] = {
        "ids_BT": batch.ids_BT,
        "weight_BT": batch.weight_BT,
        "segment_BT": batch.segment_BT,
        "ngram_NH": ngram_rows(c, batch.ids_BT),
    }
    if batch.images:
        rows, tokens = batch.ids_BT.shape
        slots = [(i.row, i.start, i.pixels.shape[:2]) for i in batch.images]
        arrays["positions_B3T"] = rotary_positions(rows, tokens, slots)
    tensors = {name: _sent(array, device) for name, array in arrays.items()}
    return Fed(**tensors, pictures=tuple(_pictures(batch, device)))


def _pictures(batch: Batch, device: str) -> Iterator[Pictures]:
    """The pictures of a batch, those of one size together."""
    tokens = batch.ids_BT.shape[1]
    for size in sorted({i.pixels.shape for i in batch.images}):
        group = [i for i in batch.images if i.pixels.shape == size]
        count = group[0].cells.size
        place = np.stack([i.row * tokens + i.start + np.arange(count) for i in group])
        yield Pictures(
            pixels_MHWC=_sent(np.stack([i.pixels for i in group]), device),
            place_MK=_sent(place, device),
            cells_MK=_sent(np.stack([i.cells for i in group]), device),
        )


def _sent(array: np.ndarray, device: str) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor
