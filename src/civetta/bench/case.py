"""What is measured: prefill or decoding of so many tokens, so deep in a context, for so many users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from civetta.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.model.mixes import Mix

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """Random weights at the real model's sizes; `ngram_base` rows (about) for each head's table."""

    mix: Mix
    layers: int
    ngram_base: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`tokens` more tokens of each of `sessions` sequences that hold `depth` tokens already."""

    kind: Kind
    tokens: int
    depth: int
    sessions: int

    @property
    def name(self) -> str:
        """As llama-bench spells it: pp4096, tg32 @ d32768."""
        short = "pp" if self.kind == "prefill" else "tg"
        return f"{short}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def context_tokens(self) -> int:
        """Tokens that a sequence holds in the end."""
        return self.depth + self.tokens


def make_cases(
    prompts: Sequence[int], replies: Sequence[int], depths: Sequence[int], sessions: Sequence[int]
) -> tuple[Case, ...]:
    """Every combination, shallow first; a length of 0 stands for no test of its kind.

    Raises UsageError when nothing is left to measure.
    """
    lengths: list[tuple[Kind, int]] = [
        *(("prefill", tokens) for tokens in prompts if tokens),
        *(("decode", tokens) for tokens in replies if tokens),
    ]
    if not lengths:
        raise UsageError("-p and -n are both 0, so there is nothing to measure: give one of them.")
    return tuple(
        Case(kind=kind, tokens=tokens, depth=depth, sessions=count)
        for depth in depths
        for kind, tokens in lengths
        for count in sessions
    )


def check_fits(cases: Sequence[Case], context_tokens: int) -> None:
    """Raise UsageError when a case needs more context than the model has."""
    for case in cases:
        if case.context_tokens > context_tokens:
            raise UsageError(
                f"{case.name} needs a context of {case.context_tokens} tokens and the model has"
                f" {context_tokens}: lower -d, -p or -n."
            )


def token_stream(seed: int, session: int, count: int, vocab: int) -> list[int]:
    """The first `count` ids of a session's stream: the same on every machine, each session its own.

    SplitMix64 (Steele, Lea and Flood 2014) over a counter, modulo the vocabulary.
    """
    with np.errstate(over="ignore"):
        start = np.uint64((seed << 20) + session) * np.uint64(0xD1342543DE82EF95)
        z = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return [int(i) for i in z % np.uint64(vocab)]
