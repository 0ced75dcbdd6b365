"""What a part of a bound network is stored in: its tensors, and their bytes."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from civetta.checkpoint.quant import QuantTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from civetta.checkpoint.quant import Weight

Leaf = TypeVar("Leaf")


def leaves_of(part: object, kinds: tuple[type[Leaf], ...]) -> Iterator[Leaf]:
    """Every object of some kinds in a dataclass, in tuples and in dataclasses in it."""
    if isinstance(part, kinds):
        yield part
    elif isinstance(part, (tuple, list)):
        for one in part:
            yield from leaves_of(one, kinds)
    elif is_dataclass(part):
        for field in fields(part):
            yield from leaves_of(getattr(part, field.name), kinds)


def matrices_of(part: object) -> Iterator[Weight]:
    """Every weight in a dataclass of weights."""
    return leaves_of(part, (Tensor, QuantTensor))


def tensors_of(part: object) -> Iterator[Tensor]:
    """The tensors that hold them: numbers, blocks, scales."""
    for w in matrices_of(part):
        held = (w,) if isinstance(w, Tensor) else (w.data_RB, w.scale, w.scale_2)
        yield from (x for x in held if x is not None)


def stored_bytes(part: object) -> int:
    """Bytes of all of them."""
    return sum(x.nbytes for x in tensors_of(part))
