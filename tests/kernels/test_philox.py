from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from civetta.kernels.philox import gumbel, philox4x32, uniform

# Random123's published known-answer file, the three lines "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
word = st.integers(0, 2**32 - 1)


def philox_scalar(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """The round function in plain integers, as the paper prints it."""
    c = list(counter)
    k = list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (p1 >> 32) ^ c[1] ^ k[0],
            p1 % 2**32,
            (p0 >> 32) ^ c[3] ^ k[1],
            p0 % 2**32,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


def uniform_scalar(seed: int, position: int, token_id: int) -> float:
    words = philox_scalar(
        (token_id // 2, position % 2**32, position // 2**32, 0), (seed % 2**32, seed // 2**32)
    )
    low, high = words[2:] if token_id % 2 else words[:2]
    return ((high * 2**32 + low) // 4096 + 0.5) / 2**52


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answer_vectors(counter, key, expected):
    out = philox4x32(np.array([[c] for c in counter], dtype=np.uint32), key)
    assert tuple(int(x) for x in out[:, 0]) == expected
    assert philox_scalar(counter, key) == expected


def test_known_answers_hold_inside_a_batch():
    counters = np.array([c for c, _, _ in KNOWN_ANSWERS], dtype=np.uint32).T
    for i, (_, key, expected) in enumerate(KNOWN_ANSWERS):
        assert tuple(int(x) for x in philox4x32(counters, key)[:, i]) == expected


@given(st.tuples(word, word, word, word), st.tuples(word, word))
def test_vectorised_equals_scalar(counter, key):
    out = philox4x32(np.array([[c] for c in counter], dtype=np.uint32), key)
    assert tuple(int(x) for x in out[:, 0]) == philox_scalar(counter, key)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**33 - 1))
def test_uniform_equals_scalar(seed, position, token_id):
    u = uniform(seed=seed, position=position, ids_N=np.array([token_id], dtype=np.int64))
    assert u[0] == uniform_scalar(seed, position, token_id)
    assert 0.0 < u[0] < 1.0


def test_number_of_a_token_does_not_depend_on_its_company():
    ids = np.arange(1000, dtype=np.int64)
    whole = gumbel(seed=7, position=3, ids_N=ids)
    picked = ids[[999, 4, 5, 0]]
    assert np.array_equal(gumbel(seed=7, position=3, ids_N=picked), whole[picked])


def test_extreme_words_stay_finite(monkeypatch):
    for value, bound in ((0, 2.0**-53), (2**32 - 1, 1.0 - 2.0**-53)):
        monkeypatch.setattr(
            "civetta.kernels.philox.philox4x32",
            lambda counter, key, value=value: np.full_like(counter, value),
        )
        ids = np.array([0, 1], dtype=np.int64)
        assert uniform(seed=0, position=0, ids_N=ids).tolist() == [bound, bound]
        assert np.isfinite(gumbel(seed=0, position=0, ids_N=ids)).all()


def test_seed_position_token_and_domain_all_matter():
    ids = np.arange(64, dtype=np.int64)
    base = uniform(seed=1, position=1, ids_N=ids)
    assert len(set(base.tolist())) == 64
    for other in (
        uniform(seed=2, position=1, ids_N=ids),
        uniform(seed=1 + 2**32, position=1, ids_N=ids),
        uniform(seed=1, position=2, ids_N=ids),
        uniform(seed=1, position=1 + 2**32, ids_N=ids),
        uniform(seed=1, position=1, ids_N=ids, domain=1),
    ):
        assert not np.any(base == other)


def test_moments_of_the_noise():
    g = gumbel(seed=11, position=5, ids_N=np.arange(200_000, dtype=np.int64))
    assert abs(g.mean() - np.euler_gamma) < 0.01  # about 3.5 standard errors
    assert abs(g.var() - np.pi**2 / 6) < 0.03


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (2**64, 0), (0, -1)])
def test_numbers_out_of_range_are_our_mistake(seed, position):
    with pytest.raises(AssertionError):
        uniform(seed=seed, position=position, ids_N=np.array([0], dtype=np.int64))
