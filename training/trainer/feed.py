"""Batches on the device, built and hashed ahead of time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from queue import Queue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from training.data.curriculum import Plan, plan
from training.data.mixture import Batch, stream
from training.trainer.step import ngram_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from civetta.model.config import ModelConfig

SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """One batch as tensors."""

    ids_BT: Tensor
    weight_BT: Tensor
    segment_BT: Tensor
    ngram_NH: Tensor


def text_plan(phase: str, tokens: int) -> Plan:
    """A phase without pictures: the tower is trained on its own."""
    full = plan(phase, tokens)
    cut = {
        name: tuple(pair for pair in getattr(full, name) if pair[0] != "vision")
        for name in ("short", "middle", "long")
    }
    return replace(full, **cut)


def batches(phases: str, start: int, tokens: int, workers: int) -> Iterator[Batch]:
    """Batches from number `start` through phases like "start:300,main:3000"."""
    for part in phases.split(","):
        name, _, until = part.partition(":")
        if start < int(until):
            stop = int(until)
            yield from stream(
                text_plan(name, tokens), seed=SEED, start=start, stop=stop, workers=workers
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
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if device == "cuda":
        tensors = {
            name: t.pin_memory().to(device, non_blocking=True) for name, t in tensors.items()
        }
    return Fed(**tensors)
