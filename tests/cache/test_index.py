"""The radix tree against a list that is searched from end to end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from civetta.cache import index as index_module
from civetta.cache.index import FORGET_SHARE, NODE_SYMBOLS, RadixIndex
from civetta.cache.keys import common_symbols

REACH = 3
KEYS = st.lists(st.integers(-1, 1), min_size=1, max_size=9).map(tuple)


def array(key):
    return np.array(key, dtype=np.int64)


class Index(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = RadixIndex(reach=REACH)
        self.entries = {}
        self.seen = []
        self.lost = set()
        self.next = 0

    @rule(key=KEYS)
    def insert(self, key):
        there = self.index.at(array(key))
        assert there == next((n for n, k in self.entries.items() if k == key), None)
        if there is None:
            self.index.insert(array(key), self.next)
            self.entries[self.next] = key
            self.seen.append(key)
            self.lost.discard(key)
            self.next += 1

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def remove(self, data):
        entry = data.draw(st.sampled_from(sorted(self.entries)))
        self.index.remove(entry, used_s=0.0)
        self.lost.add(self.entries.pop(entry))

    @rule(key=KEYS)
    def match(self, key):
        found = self.index.match(array(key))
        shared = {n: common_symbols(array(key), array(k)) for n, k in self.entries.items()}
        common = max((common_symbols(array(key), array(k)) for k in self.seen), default=0)
        assert found.common == common
        near = {(n, s) for n, s in shared.items() if len(self.entries[n]) <= s + REACH}
        assert set(found.reachable) == near
        assert len(found.reachable) == len(near)
        onward = {k[common] for k in self.seen if k[:common] == key[:common] and len(k) > common}
        assert found.extends == (not onward)
        assert set(found.lost_depths) == {
            len(k) for k in self.lost if k == key[: len(k)] and len(k) <= common
        }
        here = key[common : common + 1]
        assert found.image_differs == bool(here and onward and min(*here, *onward) < 0)

    @invariant()
    def relations(self):
        self.index.check()
        assert len(self.index) == len(self.entries)
        for entry, key in self.entries.items():
            above = {n: k for n, k in self.entries.items() if key[: len(k)] == k and k != key}
            wanted = max(above, key=lambda n: len(above[n]), default=None)
            assert self.index.parent_entry(entry) == wanted
            below = {k[len(key)] for k in self.entries.values() if k[: len(key)] == key != k}
            assert self.index.lineages(entry) == len(below)
            assert self.index.depth(entry) == len(key)


Index.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestIndex = Index.TestCase


def test_what_is_remembered_is_bounded():
    index = RadixIndex(reach=8, remember=1000)
    for n in range(50):
        index.insert(array([n, *range(99)]), n)
        if n != 7:
            index.remove(n, used_s=float(n))
        index.check()
    assert index.match(array([7, *range(99)])).common == 100
    assert index.match(array([49, *range(99)])).common == 100
    assert index.match(array([8, *range(99)])).common == 0


def test_prefixes_without_a_state_are_not_searched(monkeypatch):
    """Thousands of conversations are gone: a look at those who stay is as short as before."""
    walks = []
    subtree = index_module._subtree
    monkeypatch.setattr(index_module, "_subtree", lambda node: walks.append(1) or subtree(node))
    bound = 200 * (NODE_SYMBOLS + 1)
    index = RadixIndex(reach=8, remember=bound)
    index.insert(array([1]), 0)
    for n in range(1, 2001):
        index.insert(array([1, n]), n)
        index.remove(n, used_s=0.0)
        assert index.lineages(0) == 0
        assert index.match(array([1, n, 2])).reachable == ((0, 1),)
        assert index.remembered <= bound
    # each walk makes room for a quarter of what is remembered
    assert 0 < len(walks) <= 2000 // (200 // FORGET_SHARE)
    index.check()
    nodes = []
    monkeypatch.setattr(index_module, "_near", lambda node, deepest: nodes.append(1) or iter(()))
    index.match(array([1, 1_000_000]))
    assert not nodes, "what leads to no state is not looked at"


def test_one_state_a_prefix():
    index = RadixIndex(reach=8)
    index.insert(array([1, 2]), 1)
    with pytest.raises(AssertionError, match="two states"):
        index.insert(array([1, 2]), 2)
