"""Rounds of drafts, some of which stand: afterwards everything is as if nothing had been drafted.

Not only the next logits, which a test may meet by luck: every byte of state that a later token or
a snapshot can read, at the edges of blocks, pages, delta chunks and the sparse budget.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny as writers
from civetta.kernels import cpu
from civetta.kernels.ops import PAGE_TOKENS
from civetta.kernels.select import REFERENCE, select
from civetta.model.bind_mtp import find_head
from civetta.model.build import build_trunk, check_checkpoint
from civetta.model.inputs import Piece
from civetta.state.recurrent import REWIND_ROWS

TINY = writers.make(3)
EDGES = [
    4,
    64,
    67,
    68,
    72,
    128,
    136,
]  # a block, page = chunk, budget + 3, S moves on, page, S again
TOKENS = 170
BUDGET = 2048  # the real model's: a page and a chunk end there too
IDS = [int(i) for i in np.random.default_rng(6).integers(0, 256, BUDGET + 64)]
OPS = select("cpu", 1) if cpu.available() else REFERENCE


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    path = tmp_path_factory.mktemp("rollback") / "hf"
    checked = check_checkpoint(writers.write_hf(path, TINY.config, writers.stored(TINY.tensors)))
    head = find_head(checked.checkpoint, checked.config, None)
    return build_trunk(checked, dtype=torch.float32, ops=OPS, head=head)


def opened(trunk, tokens):
    session = trunk.store(sessions=1, context_tokens=TOKENS + 16).open()
    trunk.forward(session, IDS[:tokens], "none")
    return session


def state_of(trunk, session):
    """Everything that later launches read, by name; the head's rows are brought up to date."""
    trunk.head.catch_up([session])
    position, recurrent = session.position, session.recurrent
    live = position - recurrent.base
    state = {"ids": torch.tensor(session.ids), "rope": session.rope_positions()}
    state["base"] = torch.tensor(recurrent.base)
    for i, layer in enumerate(recurrent.gdn):
        state[f"S{i}"] = layer.s_VAA
        for name in ("k", "v", "log_decay", "beta"):
            state[f"{name}{i}"] = getattr(layer, name)[:live]
    for i, conv in enumerate(recurrent.conv):
        state[f"conv{i}"] = conv.last()
    state["ple"] = recurrent.ple.last()
    places = torch.arange(position)
    page, place = session.table_P()[places // PAGE_TOKENS], places % PAGE_TOKENS
    ratio = trunk.config.index_ratio
    for i, layer in enumerate(session.pool.layers):
        seen = position - (i == trunk.head.layer)  # the head's newest row waits for the next token
        for name in ("k", "v", "index_raw"):
            state[f"{name}{i}"] = getattr(layer, name)[page, place][:seen]
        state[f"index{i}"] = layer.index_key[page, place // ratio][::ratio][: seen // ratio]
    state["streams"] = session.drafts.newest(1)
    state["written"] = torch.tensor(session.drafts.written)
    return state


def same(trunk, session, clean):
    """Both states, bit for bit.

    The delta state may stand one chunk further in the one that went on and came back; a few tokens
    later both stand there, and are compared there.
    """
    assert session.position == clean.position
    further = session.recurrent.base != clean.recurrent.base
    due = session.recurrent.base + REWIND_ROWS if further else 0
    for one in (session, clean):
        if one.position < due:
            trunk.forward(one, IDS[one.position : due], "none")
    found, wanted = state_of(trunk, session), state_of(trunk, clean)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def play(trunk, session, rounds):
    """Each round: draft `n` tokens with the head, verify, keep `accepted` of them."""
    for n, accepted in rounds:
        at = session.position
        truth = IDS[at : at + 1 + accepted]
        wrong = [(IDS[at + 1 + i] + 1 + i) % 256 for i in range(accepted, n)]
        if n:
            session.reserve(1 + n)
            _, chain = trunk.head.begin([session], [truth[0]])
            for token_id in [*truth[1:], *wrong][: n - 1]:
                _, chain = trunk.head.extend(chain, [token_id])
        trunk.forward(session, [*truth, *wrong], "all")
        session.rewind(n - accepted)
        session.trim()
        session.check()


@pytest.mark.parametrize("accepted", range(8))
@pytest.mark.parametrize("edge", EDGES)
def test_every_length_at_every_edge(trunk, edge, accepted):
    """A round of seven that begins before the edge and would end behind it."""
    for before in (1, 4, 8):
        start = max(edge - before, 1)
        session = opened(trunk, start)
        play(trunk, session, [(7, accepted)])
        clean = opened(trunk, start + 1 + accepted)
        same(trunk, session, clean)


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    """A trunk with the real budget, and a sequence whose next round of seven passes it."""
    config = copy.deepcopy(TINY.config)
    config["text_config"]["indexer_budget"] = BUDGET
    path = tmp_path_factory.mktemp("real_budget") / "hf"
    checked = check_checkpoint(writers.write_hf(path, config, writers.stored(TINY.tensors)))
    head = find_head(checked.checkpoint, checked.config, None)
    trunk = build_trunk(checked, dtype=torch.float32, ops=OPS, head=head)
    assert trunk.config.index_budget == BUDGET
    session = trunk.store(sessions=3, context_tokens=BUDGET + 64).open()
    trunk.forward(session, IDS[: BUDGET - 2], "none")
    return trunk, session


@pytest.mark.parametrize("accepted", range(8))
def test_every_length_at_the_real_budget(prompted, accepted):
    """Rows before, at and behind 2,048 tokens, and behind 2,051, from where blocks are chosen."""
    trunk, prompt = prompted
    session, clean = prompt.fork(), prompt.fork()
    play(trunk, session, [(7, accepted)])
    trunk.forward(clean, IDS[clean.position : session.position], "none")
    same(trunk, session, clean)
    follow = IDS[session.position : session.position + 9]
    assert torch.equal(trunk.forward(session, follow, "all"), trunk.forward(clean, follow, "all"))
    session.close()
    clean.close()


rounds = st.lists(
    st.integers(0, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    min_size=1,
    max_size=7,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(EDGES), st.integers(-9, 4), rounds)
def test_any_rounds_equal_no_rounds(trunk, edge, offset, rounds):
    session = opened(trunk, max(edge + offset, 1))
    play(trunk, session, rounds)
    clean = opened(trunk, session.position)
    follow = IDS[session.position : session.position + 9]
    if session.position % 2:
        assert torch.equal(
            trunk.forward(session, follow, "all"), trunk.forward(clean, follow, "all")
        )
    same(trunk, session, clean)


def test_rounds_of_several_sessions_are_one_launch(trunk):
    """Ragged drafts in one batch: each row is the row that a sequence alone computes."""
    starts, drafts = (3, 60, 65, 130), (7, 0, 3, 5)
    store = trunk.store(sessions=4, context_tokens=TOKENS)
    sessions = [store.open() for _ in starts]
    for session, start in zip(sessions, starts, strict=True):
        trunk.forward(session, IDS[:start], "none")
    pieces = [
        Piece(session=s, ids=IDS[start : start + 1 + n], rows="all")
        for s, start, n in zip(sessions, starts, drafts, strict=True)
    ]
    together = trunk.forward_pieces(pieces)
    alone = [
        trunk.forward(opened(trunk, start), IDS[start : start + 1 + n], "all")
        for start, n in zip(starts, drafts, strict=True)
    ]
    assert torch.equal(together, torch.cat(alone))
