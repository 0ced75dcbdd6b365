"""Exact n-gram hashing: which table rows a token needs (model.md A.5)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MASK_64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
HASH_PRIME = 10007


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramHash:
    """Constants of the hash: `size` n of the longest n-gram, `heads_per_ngram` rows for each order.

    multipliers: one a distance, [0] for the newest token. vocab_sizes, offsets: one a head, bigram
    heads first. rows: rows a table must have at least.
    """

    size: int
    heads_per_ngram: int
    multipliers: tuple[int, ...]
    vocab_sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    eos_token_id: int
    rows: int

    @property
    def heads(self) -> int:
        """Rows a token."""
        return len(self.vocab_sizes)

    @property
    def context(self) -> int:
        """Earlier tokens that the hash of a token depends on."""
        return self.size - 1

    def row_ids(
        self, ids: Sequence[int] | NDArray[np.int64], history: Sequence[int]
    ) -> NDArray[np.int64]:
        """Rows [T, heads] int64 of tokens `ids`, which follow `history` (its last ones count).

        Walking back from a token, the first EOS and everything older count as EOS; so does what
        lies before the sequence. A token that is EOS itself keeps its own context.
        """
        return self._hashed(self._line(ids, history))

    def rows_of_pieces(
        self, pieces: Sequence[tuple[Sequence[int] | NDArray[np.int64], Sequence[int]]]
    ) -> NDArray[np.int64]:
        """`row_ids` of pieces (ids, history), one after the other."""
        lines = [self._line(ids, history) for ids, history in pieces]
        kept = np.concatenate([np.arange(len(line)) >= self.context for line in lines])
        rows: NDArray[np.int64] = self._hashed(np.concatenate(lines))[kept[self.context :]]
        return rows

    def _line(
        self, ids: Sequence[int] | NDArray[np.int64], history: Sequence[int]
    ) -> NDArray[np.uint64]:
        """Tokens that `ids` depend on, as many as the context, and `ids`."""
        past = [self.eos_token_id] * self.context + [int(x) for x in history[-self.context :]]
        line = np.empty(self.context + len(ids), dtype=np.uint64)
        line[: self.context] = past[-self.context :]
        line[self.context :] = ids
        return line

    def _hashed(self, tokens: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Rows of all tokens but the first, which are context."""
        count, eos = len(tokens) - self.context, np.uint64(self.eos_token_id)
        cut = np.zeros(count, dtype=bool)
        mixed = tokens[self.context :] * np.uint64(self.multipliers[0])
        out = np.empty((count, self.heads), dtype=np.int64)
        for distance in range(1, self.size):
            older = tokens[self.context - distance : self.context - distance + count]
            cut |= older == eos
            mixed = mixed ^ (np.where(cut, eos, older) * np.uint64(self.multipliers[distance]))
            heads = slice((distance - 1) * self.heads_per_ngram, distance * self.heads_per_ngram)
            sizes = np.array(self.vocab_sizes[heads], dtype=np.uint64)
            rest = (mixed[:, None] % sizes).astype(np.int64)
            out[:, heads] = rest + np.array(self.offsets[heads], dtype=np.int64)
        return out


def make_hash(
    *,
    vocab: int,
    size: int,
    heads_per_ngram: int,
    base: int,
    seed: int,
    eos_token_id: int,
    divisor: int,
    ple_index: int = 0,
) -> NgramHash:
    """The hash that a Hugging Face config implies (its tensors hold the same numbers)."""
    half = ((1 << 63) - 1) // vocab // 2
    start = seed + HASH_PRIME * ple_index
    multipliers = tuple(
        2 * (splitmix64((start + GAMMA * (i + 1)) & MASK_64) % half) + 1 for i in range(size)
    )
    heads = (size - 1) * heads_per_ngram
    primes = _primes_from(base, heads * (ple_index + 1))[heads * ple_index :]
    offsets = tuple(sum(primes[:h]) for h in range(heads))
    return NgramHash(
        size=size,
        heads_per_ngram=heads_per_ngram,
        multipliers=multipliers,
        vocab_sizes=tuple(primes),
        offsets=offsets,
        eos_token_id=eos_token_id,
        rows=-(-sum(primes) // divisor) * divisor,
    )


def splitmix64(x: int) -> int:
    """One step of splitmix64 (Steele et al. 2014), 64-bit unsigned."""
    x = (x + GAMMA) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


def _primes_from(low: int, count: int) -> list[int]:
    """The first `count` primes that are at least `low`."""
    found: list[int] = []
    candidate = max(low, 2)
    while len(found) < count:
        if _is_prime(candidate):
            found.append(candidate)
        candidate += 1
    return found


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    return n % 2 == 1 and all(n % d for d in range(3, isqrt(n) + 1, 2))
