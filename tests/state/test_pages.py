"""Pages and sessions under random use: the books balance after every step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from civetta.errors import EngineBusy
from civetta.kernels.ops import PAGE_TOKENS
from civetta.state.pages import PagePool, PageShape
from civetta.state.recurrent import REWIND_ROWS, RecurrentShape
from civetta.state.session import Session, SessionStore, StateShape

PAGE_SHAPE = PageShape(layers=2, kv_heads=1, head_dim=4, index_dim=4, index_ratio=4)
SHAPE = StateShape(
    pages=PAGE_SHAPE,
    recurrent=RecurrentShape(
        layers=1, key_heads=1, value_heads=2, head_dim=4, channels=16, conv_rows=3,
        ple_width=8, ple_rows=9,
    ),
    ngram_context=2,
)  # fmt: skip
CONTEXT = 300


class Sessions(RuleBasedStateMachine):
    """Opens, extends, rewinds and closes sessions on one store."""

    def __init__(self) -> None:
        super().__init__()
        self.store = SessionStore(SHAPE, sessions=2, context_tokens=CONTEXT, dtype=torch.float32)
        self.open: list[Session] = []

    @rule()
    def begin(self) -> None:
        if len(self.open) < 4:
            self.open.append(self.store.open())

    @rule(which=st.integers(0, 3), tokens=st.integers(1, 200))
    def extend(self, which: int, tokens: int) -> None:
        if which >= len(self.open):
            return
        session, before = self.open[which], list(self.open[which].pages)
        free = self.store.pool.free_pages
        try:
            session.reserve(tokens)
        except EngineBusy:
            assert session.pages == before
            assert self.store.pool.free_pages == free
            return
        session.extend([1] * tokens, torch.zeros(3, tokens, dtype=torch.int64))
        session.recurrent.base = session.recurrent.base_after(session.position)

    @rule(which=st.integers(0, 3), tokens=st.integers(0, REWIND_ROWS))
    def rewind(self, which: int, tokens: int) -> None:
        if which < len(self.open) and tokens <= self.open[which].rewindable:
            self.open[which].rewind(tokens)

    @rule(which=st.integers(0, 3))
    def close(self, which: int) -> None:
        if which < len(self.open):
            session = self.open.pop(which)
            session.close()
            session.close()

    @invariant()
    def balanced(self) -> None:
        self.store.pool.check()
        held = [page for session in self.open for page in session.pages]
        assert len(set(held)) == len(held)
        assert self.store.pool.free_pages == self.store.pool.pages - len(held)
        for session in self.open:
            assert len(session.pages) == -(-session.position // PAGE_TOKENS)
            assert session.recurrent.base <= session.position


Sessions.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSessions = Sessions.TestCase


def test_shared_pages_live_until_the_last_owner() -> None:
    pool = PagePool(PAGE_SHAPE, 2, torch.float32)
    page = pool.take()
    pool.share(page)
    pool.drop(page)
    pool.check()
    assert pool.free_pages == 1
    pool.drop(page)
    assert pool.free_pages == 2
    with pytest.raises(AssertionError, match="free page"):
        pool.drop(page)


def test_a_page_comes_zeroed() -> None:
    pool = PagePool(PAGE_SHAPE, 1, torch.float32)
    for layer in pool.layers:
        layer.k.fill_(float("nan"))
        layer.index_key.fill_(float("nan"))
    pool.take()
    assert all((layer.k == 0).all() and (layer.index_key == 0).all() for layer in pool.layers)
    with pytest.raises(EngineBusy, match="0 of 1 are free"):
        pool.take()


def test_several_pages_come_zeroed_and_others_stay_as_they_are() -> None:
    pool = PagePool(PAGE_SHAPE, 6, torch.float32)
    kept = [pool.take() for _ in range(4)]
    for layer in pool.layers:
        layer.v.fill_(float("nan"))
    pool.drop(kept[0])
    pool.drop(kept[2])
    pool.drop(kept[3])
    taken = pool.take_several(4)
    assert len({*taken, kept[1]}) == 5
    for layer in pool.layers:
        assert (layer.v[taken] == 0).all()
        assert layer.v[kept[1]].isnan().all()
    pool.check()
    with pytest.raises(EngineBusy, match="2 pages of 64 tokens are needed and 1 of 6 are free"):
        pool.take_several(2)
    assert pool.free_pages == 1


def test_rewinds_add_up() -> None:
    session = SessionStore(SHAPE, sessions=1, context_tokens=CONTEXT, dtype=torch.float32).open()
    session.reserve(20)
    session.extend([1] * 20, torch.zeros(3, 20, dtype=torch.int64))
    session.rewind(REWIND_ROWS - 1)
    with pytest.raises(AssertionError, match="further than"):
        session.rewind(2)
    session.rewind(1)
    assert session.position == 20 - REWIND_ROWS
