"""Philox4x32-10: random words as a pure function of a counter and a key.

The generator is the one of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3" (SC 2011). It has no state, so the noise of one token at one position can be computed
alone, in any order, on any device, before or after a draft, and is always the same.

How civetta uses it:

    key      = (seed low 32 bits, seed high 32 bits)
    counter  = (token id >> 1, position low 32 bits, position high 32 bits, domain)
    words    = (w0, w1) for an even token id, (w2, w3) for an odd one

`position` is the index that the drawn token takes in its sequence, prompt included. `domain`
keeps uses apart; token sampling is domain 0.

From words to a number: r = (w_high << 32 | w_low) >> 12 has 52 bits; u = (r + 1/2) / 2**52. Both
steps are exact in float64, u lies in [2**-53, 1 - 2**-53], so that neither log(u) nor
log(-log(u)) ever meets zero. With 53 bits the half would be rounded away and u could become 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]

ROUNDS = 10
TOKEN_SAMPLING = 0
"""Counter word 3 for the noise that decides tokens."""

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_KEY_STEP_0 = 0x9E3779B9  # golden ratio
_KEY_STEP_1 = 0xBB67AE85  # sqrt(3) - 1
_MASK_32 = 0xFFFFFFFF
_SHIFT_32 = np.uint64(32)


def philox4x32(counter_4N: U32, key: tuple[int, int]) -> U32:
    """Ten rounds over N counters at once: uint32 [4, N] in, uint32 [4, N] out.

    Both key words are in [0, 2**32).
    """
    c0, c1, c2, c3 = (np.ascontiguousarray(word) for word in counter_4N)
    k0, k1 = key
    for _ in range(ROUNDS):
        high_0, low_0 = _multiply(c0, _MULTIPLIER_0)
        high_1, low_1 = _multiply(c2, _MULTIPLIER_1)
        c0, c1 = high_1 ^ c1 ^ np.uint32(k0), low_1
        c2, c3 = high_0 ^ c3 ^ np.uint32(k1), low_0
        k0, k1 = (k0 + _KEY_STEP_0) & _MASK_32, (k1 + _KEY_STEP_1) & _MASK_32
    return np.stack([c0, c1, c2, c3])


def uniform(
    *, seed: int, position: int, ids_N: NDArray[np.int64], domain: int = TOKEN_SAMPLING
) -> NDArray[np.float64]:
    """One number in (0, 1) for each token id at `position`: float64 [N].

    seed and position are in [0, 2**64), ids in [0, 2**33).
    """
    assert 0 <= seed < 2**64, "the seed is not a 64-bit number"
    assert 0 <= position < 2**64, "the position is not a 64-bit number"
    words_4N = philox4x32(_counters(position, ids_N, domain), (seed & _MASK_32, seed >> 32))
    odd_N = (ids_N & 1).astype(bool)
    low_N = np.where(odd_N, words_4N[2], words_4N[0]).astype(np.uint64)
    high_N = np.where(odd_N, words_4N[3], words_4N[1]).astype(np.uint64)
    bits_N = ((high_N << _SHIFT_32) | low_N) >> np.uint64(12)
    result: NDArray[np.float64] = (bits_N.astype(np.float64) + 0.5) * 2.0**-52
    return result


def gumbel(
    *, seed: int, position: int, ids_N: NDArray[np.int64], domain: int = TOKEN_SAMPLING
) -> NDArray[np.float64]:
    """Standard Gumbel noise -log(-log(u)) for each token id at `position`: float64 [N], finite.

    argmax(logits / T + noise) is a draw from softmax(logits / T) (the Gumbel-max rule).
    """
    u_N = uniform(seed=seed, position=position, ids_N=ids_N, domain=domain)
    result: NDArray[np.float64] = -np.log(-np.log(u_N))
    return result


def _counters(position: int, ids_N: NDArray[np.int64], domain: int) -> U32:
    counter_4N = np.empty((4, ids_N.shape[0]), dtype=np.uint32)
    counter_4N[0] = ids_N >> 1
    counter_4N[1] = position & _MASK_32
    counter_4N[2] = position >> 32
    counter_4N[3] = domain
    return counter_4N


def _multiply(word_N: U32, multiplier: np.uint64) -> tuple[U32, U32]:
    """High and low half of the 64-bit product."""
    product_N = word_N.astype(np.uint64) * multiplier
    return (product_N >> _SHIFT_32).astype(np.uint32), product_N.astype(np.uint32)
