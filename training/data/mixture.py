"""Packs samples into batches; every batch depends on the plan, the seed and its number only."""

from __future__ import annotations

import multiprocessing
import sys
import zlib
from collections import Counter
from dataclasses import dataclass, field
from queue import Empty
from typing import TYPE_CHECKING, Any

import numpy as np

from training.data.abilities import ABILITIES
from training.data.draw import Draw, seeded
from training.data.encode import encode, marks

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from training.data.curriculum import Plan, Shape
    from training.data.sample import Sample

LEAST_ROOM = 32
"""A row with less room than this is closed."""

SLACK = 96
"""A row with less room than this is closed once a sample did not fit."""

WAITING = 24
"""Samples kept aside for a row in which they fit."""

QUEUED = 3
"""Finished batches that a worker holds ready."""

TYPICAL_TOKENS = 150
"""First guess of the length of a sample."""

POLL_S = 2.0
"""How often a waiting caller looks whether the worker is still alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSlot:
    """One picture: its row, the index of its first placeholder, uint8 [height, width, 3].

    `cells` says what lies in the square of each of its tokens (`scenes.cells`).
    """

    row: int
    start: int
    pixels: np.ndarray
    cells: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of whole samples, each sample ending with `<|endoftext|>`, padded with the same.

    `weight_BT[b, t]` is the loss weight of predicting `ids_BT[b, t]` from the tokens before it; 0
    for the first token of a sample, for image placeholders and for padding. `segment_BT` numbers
    the samples of a row from 0; padding has -1. `tokens` counts tokens an ability.
    """

    index: int
    ids_BT: np.ndarray  # int32 [B, T]
    weight_BT: np.ndarray  # float32 [B, T]
    segment_BT: np.ndarray  # int32 [B, T]
    images: list[ImageSlot]
    tokens: dict[str, int]


@dataclass(slots=True)
class _Row:
    """A row that is being filled."""

    room: int
    samples: list[Sample] = field(default_factory=list)

    def take(self, sample: Sample) -> bool:
        if len(sample.ids) > self.room:
            return False
        self.samples.append(sample)
        self.room -= len(sample.ids)
        return True


class _Source:
    """Draws samples so that the tokens of each ability approach its share."""

    def __init__(self, plan: Plan, shape: Shape, rng: random.Random) -> None:
        self._rng = rng
        self._plan = plan
        self._shares = plan.shares_at(shape.seq_len)
        self._room = shape.seq_len
        self._tokens: Counter[str] = Counter()
        self._samples: Counter[str] = Counter()
        self._total = 0

    def _ability(self) -> str:
        """Pick by chance; being behind its share and having short samples make one likelier."""
        likely = {}
        for name, share in self._shares.items():
            wanted = share * (self._total + self._room) - self._tokens[name]
            typical = (self._tokens[name] + TYPICAL_TOKENS) / (self._samples[name] + 1)
            likely[name] = max(wanted, 1.0) / typical
        return self._rng.choices(list(likely), list(likely.values()))[0]

    def draw(self) -> Sample:
        while True:
            name = self._ability()
            draw = Draw(rng=self._rng, room=self._room)
            sample = encode(ABILITIES[name](draw), self._plan.context_weight)
            if len(sample.ids) <= self._room:
                self._tokens[name] += len(sample.ids)
                self._samples[name] += 1
                self._total += len(sample.ids)
                return sample


def build_batch(plan: Plan, seed: int, index: int) -> Batch:
    """Build batch number `index`; the same arguments always give the same batch."""
    rng = seeded("batch", seed, index, zlib.crc32(repr(plan).encode()))
    shape = plan.shape_of(seed, index)
    source = _Source(plan, shape, rng)
    waiting: list[Sample] = []
    rows = []
    for _ in range(shape.rows):
        row = _Row(room=shape.seq_len)
        _fill(row, source, waiting)
        rows.append(row)
    return _assemble(index, shape, rows)


def _fill(row: _Row, source: _Source, waiting: list[Sample]) -> None:
    waiting[:] = [sample for sample in waiting if not row.take(sample)]
    # Once samples are set aside in number, the row is full enough.
    while row.room >= LEAST_ROOM and len(waiting) < WAITING:
        sample = source.draw()
        if not row.take(sample):
            waiting.append(sample)
            if row.room < SLACK:
                return


def _assemble(index: int, shape: Shape, rows: list[_Row]) -> Batch:
    size = (shape.rows, shape.seq_len)
    ids = np.full(size, marks().end_of_text, dtype=np.int32)
    weight = np.zeros(size, dtype=np.float32)
    segment = np.full(size, -1, dtype=np.int32)
    images: list[ImageSlot] = []
    tokens: Counter[str] = Counter()
    for b, row in enumerate(rows):
        start = 0
        for number, sample in enumerate(row.samples):
            stop = start + len(sample.ids)
            ids[b, start:stop] = sample.ids
            weight[b, start:stop] = sample.weight
            segment[b, start:stop] = number
            images += [
                ImageSlot(row=b, start=start + at, pixels=pixels, cells=cells)
                for (at, pixels), cells in zip(sample.images, sample.cells, strict=True)
            ]
            tokens[sample.ability] += len(sample.ids)
            start = stop
    return Batch(
        index=index,
        ids_BT=ids,
        weight_BT=weight,
        segment_BT=segment,
        images=images,
        tokens=dict(tokens),
    )


def stream(
    plan: Plan, *, seed: int = 0, start: int = 0, stop: int | None = None, workers: int = 0
) -> Iterator[Batch]:
    """Yield batches `start`, `start + 1`, … in order; the same whatever `workers` is.

    With workers, worker w of n builds every n-th batch ahead of time, in a process of its own that
    is spawned (so the caller's main module must be importable). Closing the iterator ends them.
    `stop` None means without end. Raises RuntimeError when a worker dies.
    """
    numbers = range(start, sys.maxsize if stop is None else stop)
    if workers == 0:
        for index in numbers:
            yield build_batch(plan, seed, index)
        return
    context = multiprocessing.get_context("spawn")
    hands: list[tuple[Any, Any]] = []
    for worker in range(workers):
        box = context.Queue(QUEUED)
        mine = numbers[worker::workers]
        hands.append(
            (context.Process(target=_work, args=(plan, seed, mine, box), daemon=True), box)
        )
    for process, _ in hands:
        process.start()
    try:
        for place in range(len(numbers)):
            yield _next(*hands[place % workers])
    finally:
        for process, _ in hands:
            process.terminate()
        for process, _ in hands:
            process.join()


def _work(plan: Plan, seed: int, numbers: range, box: Any) -> None:
    """Build the batches of `numbers` and put them into the box."""
    for index in numbers:
        box.put(build_batch(plan, seed, index))


def _next(process: Any, box: Any) -> Batch:
    """Wait for a worker's next batch."""
    while True:
        try:
            batch: Batch = box.get(timeout=POLL_S)
        except Empty:
            if process.exitcode not in (None, 0):
                raise RuntimeError(
                    f"A data worker ended with code {process.exitcode}; its error is above."
                ) from None
        else:
            return batch
