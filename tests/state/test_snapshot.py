"""prefill(a + b) = restore(snapshot(a)) then prefill(b), bit for bit; shared pages never change."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from civetta.errors import EngineBusy
from civetta.kernels.ops import PAGE_TOKENS
from civetta.model.build import load_trunk
from civetta.model.tiny import write_tiny
from civetta.state.pages import PageShape
from civetta.state.recurrent import REWIND_ROWS, RecurrentShape
from civetta.state.session import Session, SessionStore, StateShape

if TYPE_CHECKING:
    from civetta.model.trunk import Trunk
    from civetta.state.snapshot import Snapshot

TOKENS = 200
CUTS = [1, 2, 63, 64, 65, 70, 72, 100, 127, 128, 129, 136, 150, 199]


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Trunk:
    return load_trunk(write_tiny(tmp_path_factory.mktemp("tiny")))


@functools.cache
def token_ids() -> list[int]:
    ids = torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(3))
    return [int(i) for i in ids]


@pytest.fixture(scope="module")
def cold(trunk: Trunk) -> torch.Tensor:
    session = trunk.store(sessions=1, context_tokens=TOKENS).open()
    return trunk.forward(session, token_ids(), "all")


@pytest.mark.parametrize("first", CUTS)
def test_every_pair_of_cuts(trunk: Trunk, cold: torch.Tensor, first: int) -> None:
    """Snapshot at `first`, restore, on to `second`, snapshot, restore, on to the end."""
    ids = token_ids()
    store = trunk.store(sessions=5, context_tokens=TOKENS)
    origin = store.open()
    trunk.forward(origin, ids[:first], "none")
    snapshot = origin.snapshot()
    for second in [cut for cut in CUTS if cut > first]:
        middle = store.open()
        middle.restore(snapshot)
        assert torch.equal(trunk.forward(middle, ids[first:second], "all"), cold[first:second])
        later = middle.snapshot()
        last = store.open()
        last.restore(later)
        assert torch.equal(trunk.forward(last, ids[second:], "all"), cold[second:])
        for held in (middle, last, later):
            held.check()
            held.close()
    assert torch.equal(trunk.forward(origin, ids[first:], "all"), cold[first:])
    snapshot.close()
    snapshot.close()
    origin.close()
    store.pool.check()
    assert store.pool.free_pages == store.pool.pages


@pytest.mark.parametrize("at", [9, 64, 66, 71, 130])
@pytest.mark.parametrize("back", [1, 3, 8])
def test_restore_some_tokens_back(trunk: Trunk, cold: torch.Tensor, at: int, back: int) -> None:
    ids = token_ids()
    store = trunk.store(sessions=3, context_tokens=TOKENS)
    origin = store.open()
    trunk.forward(origin, ids[:at], "none")
    snapshot = origin.snapshot()
    session = store.open()
    session.restore(snapshot, at - back)
    session.check()
    assert session.rewindable == min(REWIND_ROWS, at) - back
    wanted = cold[at - back :]
    # The session writes over rows that the snapshot has too; the snapshot must not see it.
    wrong = store.open()
    wrong.restore(snapshot, at - back)
    trunk.forward(wrong, [5] * 20, "none")
    assert torch.equal(trunk.forward(session, ids[at - back :], "all"), wanted)
    again = store.open()
    again.restore(snapshot)
    assert torch.equal(trunk.forward(again, ids[at:], "all"), cold[at:])


def test_forks_go_their_own_ways(trunk: Trunk, cold: torch.Tensor) -> None:
    ids = token_ids()
    store = trunk.store(sessions=4, context_tokens=TOKENS)
    root = store.open()
    trunk.forward(root, ids[:100], "none")
    twins = [root.fork() for _ in range(3)]
    for n, twin in enumerate(twins):
        trunk.forward(twin, [n] * 30, "none")
    assert torch.equal(trunk.forward(root, ids[100:], "all"), cold[100:])
    for n, twin in enumerate(twins):
        alone = trunk.store(sessions=1, context_tokens=TOKENS).open()
        trunk.forward(alone, [*ids[:100], *[n] * 30], "none")
        assert torch.equal(
            trunk.forward(alone, ids[:9], "all"), trunk.forward(twin, ids[:9], "all")
        )
    assert len({twin.pages[0] for twin in twins}) == 1
    assert len({twin.pages[1] for twin in twins}) == 3


def test_a_page_as_bytes_and_back(trunk: Trunk) -> None:
    store = trunk.store(sessions=1, context_tokens=TOKENS)
    session = store.open()
    trunk.forward(session, token_ids()[:110], "none")
    pool, page = store.pool, session.pages[1]
    data = pool.read(page, 46)
    new = pool.take()
    pool.write(new, data)
    assert data.nbytes == pool.page_bytes
    assert torch.equal(pool.read(new, PAGE_TOKENS), data)
    for layer in pool.layers:
        assert torch.equal(layer.k[new, :46], layer.k[page, :46])
        assert torch.equal(layer.index_key[new, :11], layer.index_key[page, :11])
        assert not layer.v[new, 46:].any()
    pool.share(new)
    with pytest.raises(AssertionError, match="shared page"):
        pool.write(new, data)


SHAPE = StateShape(
    pages=PageShape(layers=1, kv_heads=1, head_dim=2, index_dim=2, index_ratio=4),
    recurrent=RecurrentShape(
        layers=1, key_heads=1, value_heads=1, head_dim=2, channels=4, conv_rows=3,
        ple_width=4, ple_rows=2,
    ),
    ngram_context=2,
    draft_width=4,
)  # fmt: skip


def write_rows(session: Session, tokens: list[int]) -> None:
    """As a model with one row of lag does: token numbers as keys, the last row comes later."""
    start = session.position
    session.reserve(len(tokens))
    ids = [*session.ids, *tokens]
    for row in range(max(start - 1, 0), len(ids) - 1):
        page = session.pages[row // PAGE_TOKENS]
        # The next token is in the row, as with a draft head.
        session.pool.layers[0].k[page, row % PAGE_TOKENS] = ids[row] * 1000 + ids[row + 1]
    session.extend(tokens, torch.zeros(3, len(tokens), dtype=torch.int64))
    session.recurrent.base = session.recurrent.base_after(session.position)
    assert session.drafts is not None
    session.drafts.push(torch.ones(len(tokens), 4), 0, len(tokens))
    session.drafts.settle(session.position)


def rows_of(pages: tuple[int, ...] | list[int], store: SessionStore, count: int) -> list[float]:
    k = store.pool.layers[0].k[list(pages)].flatten(0, 1)[: max(count - 1, 0), 0, 0]
    return [float(value) for value in k]


def wanted_rows(ids: list[int]) -> list[float]:
    return [float(a * 1000 + b) for a, b in itertools.pairwise(ids)]


class Sharing(RuleBasedStateMachine):
    """Sessions and snapshots in any order: contents stay right, the books balance."""

    def __init__(self) -> None:
        super().__init__()
        self.store = SessionStore(
            SHAPE, sessions=2, context_tokens=200, dtype=torch.float32, spare_pages=5
        )
        self.sessions: list[Session] = []
        self.snapshots: list[Snapshot] = []

    @rule()
    def begin(self) -> None:
        if len(self.sessions) < 4:
            self.sessions.append(self.store.open())

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), tokens=st.integers(1, 90), token=st.integers(1, 99))
    def extend(self, data: st.DataObject, tokens: int, token: int) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        before, free = list(session.pages), self.store.pool.free_pages
        try:
            session.reserve(tokens)
        except EngineBusy:
            assert (session.pages, self.store.pool.free_pages) == (before, free)
            return
        write_rows(session, [token] * tokens)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), back=st.integers(0, REWIND_ROWS))
    def rewind(self, data: st.DataObject, back: int) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        session.rewind(min(back, session.rewindable))

    @precondition(lambda self: self.sessions and len(self.snapshots) < 4)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        self.snapshots.append(data.draw(st.sampled_from(self.sessions)).snapshot())

    @precondition(lambda self: self.snapshots and len(self.sessions) < 4)
    @rule(data=st.data(), back=st.integers(0, REWIND_ROWS))
    def restore(self, data: st.DataObject, back: int) -> None:
        snapshot = data.draw(st.sampled_from(self.snapshots))
        session = self.store.open()
        tokens = snapshot.position - min(back, snapshot.small.rewindable)
        session.restore(snapshot, tokens)
        assert session.ids == snapshot.small.ids_T.tolist()[:tokens]
        self.sessions.append(session)

    @precondition(lambda self: self.sessions and len(self.sessions) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.sessions.append(data.draw(st.sampled_from(self.sessions)).fork())

    @precondition(lambda self: self.sessions or self.snapshots)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([*self.sessions, *self.snapshots]))
        held.close()
        self.sessions = [s for s in self.sessions if s is not held]
        self.snapshots = [s for s in self.snapshots if s is not held]

    @invariant()
    def contents_are_right(self) -> None:
        for session in self.sessions:
            rows = rows_of(session.pages, self.store, session.position)
            # After a rewind the last row still names the token that was taken back.
            assert rows[:-1] == wanted_rows(session.ids)[:-1]
        for snapshot in self.snapshots:
            rows = rows_of(snapshot.pages, self.store, snapshot.position)
            assert rows[:-1] == wanted_rows(snapshot.small.ids_T.tolist())[:-1]
            snapshot.check()

    @invariant()
    def balanced(self) -> None:
        pool = self.store.pool
        pool.check()
        holders = [page for s in (*self.sessions, *self.snapshots) for page in s.pages]
        assert pool.free_pages == pool.pages - len(set(holders))
        assert all(pool.owners(page) == holders.count(page) for page in holders)


Sharing.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSharing = Sharing.TestCase
