"""Seeded choices, and the split into training and held-out items by a hash of the item's name."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
Split = Literal["train", "heldout"]

HELDOUT_OF_16 = 1
"""One item in sixteen is held out."""


def split_of(key: str) -> Split:
    """Tell which side an item belongs to; the same key always belongs to the same side."""
    return "heldout" if zlib.crc32(key.encode()) % 16 < HELDOUT_OF_16 else "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One draw of an item: the random source, the wanted side, and how large it may get.

    `room` is the number of tokens that the sample may take. `single` asks for one question in the
    plainest form, as the evaluation puts it. `thinking` forces the mode; None leaves it to chance.
    """

    rng: random.Random
    split: Split = "train"
    room: int = 1024
    single: bool = False
    thinking: bool | None = None

    def choice(self, options: Sequence[T]) -> T:
        """Pick one option."""
        return options[int(self.rng.random() * len(options))]

    def chance(self, probability: float) -> bool:
        """Tell whether an event of this probability happens."""
        return self.rng.random() < probability

    def between(self, low: int, high: int) -> int:
        """Pick an integer, both ends included."""
        return low + int(self.rng.random() * (high - low + 1))

    def unseen(self, make: Callable[[], T], key: Callable[[T], str]) -> T:
        """Repeat `make` until the key of what it made falls on the wanted side."""
        while True:
            item = make()
            if split_of(key(item)) == self.split:
                return item


def seeded(*parts: object) -> random.Random:
    """Return a random source that depends on `parts` only."""
    return random.Random("/".join(str(part) for part in parts))
