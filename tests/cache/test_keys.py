"""Comparing token sequences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from civetta.cache.keys import common_prefix

TOKENS = st.lists(st.integers(0, 1), max_size=12)


@given(shared=TOKENS, first=TOKENS, second=TOKENS)
def test_common_prefix_is_the_longest(shared, first, second):
    a, b = shared + first, shared + second
    wanted = 0
    while wanted < min(len(a), len(b)) and a[wanted] == b[wanted]:
        wanted += 1
    assert common_prefix(a, b) == wanted
