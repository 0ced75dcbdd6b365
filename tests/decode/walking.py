"""A vocabulary with markers, guides on it, and replies drawn at random from what a guide allows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from chat.vocabularies import gguf_metadata
from civetta.chat.tokenizer import Tokenizer
from civetta.decode.guides import Guides
from civetta.types import Constraint, Grammar

if TYPE_CHECKING:
    from collections.abc import Callable

    from civetta.decode.guide import Guide
    from civetta.decode.mask import TokenMask

PADDING = 3


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(gguf_metadata())


@functools.cache
def guides() -> Guides:
    return Guides(tokenizer(), vocab_size())


def vocab_size() -> int:
    """Of the logits: wider than the tokenizer's."""
    return tokenizer().vocab_size + PADDING


def constraint(kind: str, text: str, **more: object) -> Constraint:
    return Constraint(grammar=Grammar(kind=kind, text=text), **more)


def guide_of(
    bound: Constraint | None = None, *, thinking: bool = False, budget: int | None = None
) -> Guide:
    guide = guides().of(thinking=thinking, thinking_budget=budget, constraint=bound)
    assert guide is not None
    return guide


def allowed_ids(mask: TokenMask | None) -> list[int]:
    if mask is None:
        return list(range(vocab_size()))
    values_V = mask.apply(np.zeros(vocab_size(), np.float32))
    return [int(i) for i in np.flatnonzero(np.isfinite(values_V))]


def say(guide: Guide, text: str) -> bool:
    """Advance by the tokens of a text; False as soon as one is not allowed."""
    return say_ids(guide, tokenizer().encode(text))


def say_ids(guide: Guide, ids: list[int]) -> bool:
    for token_id in ids:
        mask = guide.rows()[0]
        if mask is not None and not mask.allows(token_id):
            return False
        guide.advance(token_id)
    return True


def may_end(guide: Guide) -> bool:
    mask = guide.rows()[0]
    return mask is None or mask.allows(tokenizer().eos_id)


def draw(
    guide: Guide,
    rng: np.random.Generator,
    *,
    most: int = 400,
    prefer: Callable[[list[int]], list[int]] | None = None,
) -> tuple[list[int], bool]:
    """A random reply, and whether it ended by itself. `prefer` narrows what is drawn from."""
    ids: list[int] = []
    ends = tokenizer().eog_ids
    while len(ids) < most:
        mask = guide.rows()[0]
        possible = allowed_ids(mask)
        assert possible, "a guide leaves something to say"
        if mask is not None and mask.banned_N is None:
            assert max(possible) < tokenizer().vocab_size, "padding is no token"
        if prefer is not None:
            possible = prefer(possible) or possible
        token_id = int(rng.choice(possible))
        if token_id in ends:
            return ids, True
        ids.append(token_id)
        guide.advance(token_id)
    return ids, False


def text_of(ids: list[int]) -> str:
    return tokenizer().decode(ids, skip_special=True)
