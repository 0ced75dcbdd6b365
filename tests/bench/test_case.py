from __future__ import annotations

import pytest

from civetta.bench.case import Case, check_fits, make_cases, token_stream
from civetta.errors import UsageError


def test_names_are_those_of_llama_bench():
    deep = Case(kind="prefill", tokens=4096, depth=32768, sessions=1)
    assert deep.name == "pp4096 @ d32768"
    assert deep.context_tokens == 36864
    assert Case(kind="decode", tokens=32, depth=0, sessions=4).name == "tg32"


def test_every_combination_once_and_shallow_ones_first():
    found = make_cases([512, 64], [8], [0, 100], [1, 2])
    assert len(set(found)) == len(found) == 12
    assert [c.depth for c in found] == [0] * 6 + [100] * 6
    assert [c.name for c in found[:6]] == ["pp512", "pp512", "pp64", "pp64", "tg8", "tg8"]


def test_zero_leaves_a_kind_out():
    assert [c.name for c in make_cases([0], [8], [0], [1])] == ["tg8"]
    assert [c.name for c in make_cases([16], [0], [0], [1])] == ["pp16"]
    with pytest.raises(UsageError, match="nothing to measure"):
        make_cases([0], [0], [0], [1])


def test_a_case_beyond_the_context_is_named():
    cases = make_cases([64], [0], [0, 64], [1])
    check_fits(cases, 128)
    with pytest.raises(UsageError, match=r"pp64 @ d64 needs a context of 128 tokens.*127"):
        check_fits(cases, 127)


def test_a_stream_is_fixed_and_its_sessions_differ():
    """The numbers are SplitMix64's: a change of them would change every published hash."""
    assert token_stream(0, 0, 4, 1 << 20) == REFERENCE[:4]
    assert token_stream(0, 0, 2, 1 << 20) == REFERENCE[:2]
    streams = [token_stream(seed, s, 64, 1000) for seed in (0, 1) for s in (0, 1, 2)]
    assert len({tuple(s) for s in streams}) == 6
    assert all(0 <= i < 1000 for s in streams for i in s)
    assert len(set(streams[0])) > 50


def _splitmix64(state: int) -> int:
    mask = (1 << 64) - 1
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


REFERENCE = [_splitmix64(k * 0x9E3779B97F4A7C15 & ((1 << 64) - 1)) % (1 << 20) for k in range(1, 5)]
