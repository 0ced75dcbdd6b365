"""Rendered conversations to token ids and loss weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from training.data.pictures import TOKEN_SIDE
from training.data.render import render_text
from training.data.sample import Document, Item, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent.parent / "tokenizer" / "nano"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The tokenizer with the ids and id runs that the encoder looks for."""

    tokenizer: Tokenizer
    end_of_text: int
    turn_start: int
    turn_end: int
    image: int
    assistant: list[int]
    think: list[int]
    no_think: list[int]


@cache
def marks() -> Marks:
    """Load the nano tokenizer once a process."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = {
        name: encode_text(f"<|{name}|>", tokenizer)[0]
        for name in ("endoftext", "im_start", "im_end", "image_pad")
    }
    return Marks(
        tokenizer=tokenizer,
        end_of_text=ids["endoftext"],
        turn_start=ids["im_start"],
        turn_end=ids["im_end"],
        image=ids["image_pad"],
        assistant=encode_text("assistant\n", tokenizer),
        think=encode_text("<think>\n", tokenizer),
        no_think=encode_text("<think>\n\n</think>\n\n", tokenizer),
    )


def encode_text(text: str, tokenizer: Tokenizer | None = None) -> list[int]:
    """Return the token ids of a text, special tokens included, nothing added."""
    found = tokenizer or marks().tokenizer
    return list(found.encode(text, add_special_tokens=False).ids)


def _replies(ids: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the half-open ranges that the model generates: after the prompt, with the end mark."""
    known = marks()
    start = -1
    for index, token in enumerate(ids):
        if token == known.turn_start:
            body = index + 1 + len(known.assistant)
            start = body if ids[index + 1 : body] == known.assistant else -1
        elif token == known.turn_end and start >= 0:
            for prefix in (known.no_think, known.think):
                if ids[start : start + len(prefix)] == prefix:
                    start += len(prefix)
                    break
            yield start, index + 1
            start = -1


def spread(
    ids: list[int], weight: np.ndarray, images: tuple[np.ndarray, ...]
) -> tuple[list[int], np.ndarray, list[tuple[int, np.ndarray]]]:
    """Repeat each image placeholder once an image token."""
    image = marks().image
    counts = [(p.shape[0] // TOKEN_SIDE) * (p.shape[1] // TOKEN_SIDE) for p in images]
    repeats = np.ones(len(ids), dtype=np.int64)
    places = [index for index, token in enumerate(ids) if token == image]
    assert len(places) == len(images), "a conversation mentions each image once"
    repeats[places] = counts
    starts = np.cumsum(repeats) - repeats
    weight[places] = 0.0
    slots = [(int(starts[place]), pixels) for place, pixels in zip(places, images, strict=True)]
    return np.repeat(ids, repeats).tolist(), np.repeat(weight, repeats), slots


def encode(item: Item, context_weight: float = 0.0) -> Sample:
    """Encode one item; `context_weight` is the loss weight of text that the model is given."""
    if isinstance(item, Document):
        ids = [*encode_text(item.text), marks().end_of_text]
        weight = np.ones(len(ids), dtype=np.float32)
        weight[0] = 0.0
        return Sample(ability=item.ability, ids=np.asarray(ids, dtype=np.int32), weight=weight)
    ids = encode_text(render_text(item))
    weight = np.full(len(ids), context_weight, dtype=np.float32)
    weight[0] = 0.0
    for start, stop in _replies(ids):
        weight[start:stop] = 1.0
    slots: list[tuple[int, np.ndarray]] = []
    if item.images:
        ids, weight, slots = spread(ids, weight, item.images)
    ids.append(marks().end_of_text)
    weight = np.append(weight, np.float32(0.0))
    return Sample(
        ability=item.ability,
        ids=np.asarray(ids, dtype=np.int32),
        weight=weight,
        images=tuple(slots),
        cells=item.cells,
    )
