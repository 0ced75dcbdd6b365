"""The draft head against its transcription, and against itself however its rows are cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from mtp_reference import HeadReference

import tiny as writers
from civetta.kernels import cpu
from civetta.kernels.select import REFERENCE, select
from civetta.model.bind_mtp import find_head
from civetta.model.build import build_trunk, check_checkpoint
from civetta.model.mtp import can_draft
from civetta.state.drafts import MOST_KEPT, MOST_LAG

TINY = writers.make(3)
TOKENS = 140
IDS = [int(i) for i in np.random.default_rng(2).integers(0, 256, TOKENS + 8)]
OPS = {"reference": REFERENCE} | ({"native": select("cpu", 1)} if cpu.available() else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mtp") / "hf"
    return writers.write_hf(path, TINY.config, writers.stored(TINY.tensors))


def load(folder, ops=REFERENCE, dtype=torch.float32, norm="wide"):
    checked = check_checkpoint(folder)
    head = find_head(checked.checkpoint, checked.config, None)
    return build_trunk(checked, dtype=dtype, ops=ops, head=head, head_norm=norm)


@pytest.fixture(scope="module")
def trunk(folder):
    return load(folder)


def opened(trunk, tokens, chunk=64):
    session = trunk.store(sessions=1, context_tokens=TOKENS + 16).open()
    for start in range(0, tokens, chunk):
        trunk.forward(session, IDS[start : min(start + chunk, tokens)], "none")
    return session


def drafted(trunk, session, next_id, ids):
    """Logits of a chain that is fed `next_id`, then `ids`: [1 + len(ids), V]."""
    session.reserve(1 + len(ids))
    logits, chain = trunk.head.begin([session], [next_id])
    rows = [logits]
    for token_id in ids:
        logits, chain = trunk.head.extend(chain, [token_id])
        rows.append(logits)
    session.trim()
    return torch.cat(rows)


def streams_of(trunk, tokens):
    """X [T, S, D] of a prompt, read off the trunk."""
    seen = []
    real, trunk.head.follow = trunk.head.follow, lambda spans, x, inputs: seen.append(x)
    try:
        opened(trunk, tokens, tokens)
    finally:
        trunk.head.follow = real
    return seen[0].double().numpy()


def reference_rows(trunk, norm, tokens, chain):
    """Logits of the last prompt row and of a chain behind it."""
    reference = HeadReference(TINY.tensors, TINY.text, norm=norm)
    x_TSD = streams_of(trunk, tokens)
    for p in range(tokens):
        logits, y = reference.step(IDS[p + 1], x_TSD[p])
    rows = [logits]
    for token_id in chain:
        logits, y = reference.step(token_id, y)
        rows.append(logits)
    return np.stack(rows)


def relative(found, wanted):
    return np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


@pytest.mark.parametrize("norm", ["wide", "stream"])
@pytest.mark.parametrize("name", OPS)
def test_logits_equal_the_transcription(folder, name, norm):
    """Beyond the budget of 64 tokens, so the head's own indexer selects; and through a chain."""
    trunk = load(folder, OPS[name], norm=norm)
    chain = [5, 250, 17, 17, 9, 80]
    found = drafted(trunk, opened(trunk, TOKENS), IDS[TOKENS], chain).double().numpy()
    wanted = reference_rows(trunk, norm, TOKENS, chain)
    assert relative(found, wanted).max() <= 1e-4


def test_the_two_norms_are_different_heads(trunk):
    wide, stream = (reference_rows(trunk, norm, 40, []) for norm in ("wide", "stream"))
    assert relative(wide, stream).max() > 1e-3


def test_bf16_follows_float32(folder):
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        trunk = load(folder, dtype=dtype)
        rows.append(drafted(trunk, opened(trunk, 60), 7, [8, 9]).numpy())
    assert 1e-5 < np.median(relative(rows[1], rows[0])) < 0.05


@pytest.mark.parametrize("chunk", [1, 5, 64, 100, TOKENS])
@pytest.mark.parametrize("name", OPS)
def test_chunks_do_not_matter(folder, name, chunk):
    trunk = load(folder, OPS[name])
    wanted = drafted(trunk, opened(trunk, TOKENS, TOKENS), 3, [4, 5])
    session = opened(trunk, TOKENS, chunk)
    assert session.drafts.lag(TOKENS) <= MOST_LAG + 1
    assert session.drafts.kept <= MOST_KEPT
    assert torch.equal(drafted(trunk, session, 3, [4, 5]), wanted)


@pytest.mark.parametrize("chunk", [1, 5, TOKENS])
def test_a_launch_may_write_over_its_streams(trunk, monkeypatch, chunk):
    """Whether rows are written at once or wait: what was noted is a copy, or is read by then."""
    wanted = drafted(trunk, opened(trunk, TOKENS, TOKENS), 3, [4, 5])
    follow = trunk.head.follow

    def followed(spans, x_TSD, inputs_TD):
        buffer_TSD = x_TSD.clone()
        follow(spans, buffer_TSD, inputs_TD)
        buffer_TSD.fill_(float("nan"))

    monkeypatch.setattr(trunk.head, "follow", followed)
    assert torch.equal(drafted(trunk, opened(trunk, TOKENS, chunk), 3, [4, 5]), wanted)


def test_rows_wait_until_somebody_drafts(trunk, monkeypatch):
    """A reply that does not draft has the head written once in many tokens, if at all."""
    launches = []
    enter = trunk.head._enter
    monkeypatch.setattr(
        trunk.head, "_enter", lambda rows: (launches.append(len(rows[0].ids)), enter(rows))[1]
    )
    session = opened(trunk, 2, 1)
    for token_id in IDS[2:MOST_LAG]:
        trunk.forward(session, [token_id])
    assert not launches
    drafted(trunk, session, IDS[MOST_LAG], [])
    assert launches == [MOST_LAG]  # all that waited, in one launch with the draft's own row
    trunk.forward(session, IDS[MOST_LAG : MOST_LAG + 2])
    assert len(launches) == 1


@pytest.mark.parametrize("tokens", [1, 3, 4, 62, 63, 64, 65, 66, 67, 68, 71, 127, 128])
@pytest.mark.parametrize("accepted", [0, 1, 3, 7])
def test_a_round_leaves_no_trace(trunk, tokens, accepted):
    """Draft wrongly, verify, take back: later drafts equal those of a sequence that never did."""
    truth = IDS[tokens : tokens + 1 + accepted]
    wrong = [(i + 1) % 256 for i in IDS[tokens + 1 + accepted : tokens + 8]]
    session = opened(trunk, tokens)
    drafted(trunk, session, truth[0], [*truth[1:], *wrong][:6])
    trunk.forward(session, [*truth, *wrong], "all")
    session.rewind(len(wrong))
    session.check()
    assert session.ids == IDS[: tokens + 1 + accepted]
    again = drafted(trunk, session, 77, [78, 79])
    clean = drafted(trunk, opened(trunk, tokens + 1 + accepted), 77, [78, 79])
    assert torch.equal(again, clean)


def test_sessions_share_a_step(trunk):
    lengths, chains = (7, 66, 100), ([1, 2], [3, 4], [5, 6])
    alone = [
        drafted(trunk, opened(trunk, n), 9, chain) for n, chain in zip(lengths, chains, strict=True)
    ]
    store = trunk.store(sessions=3, context_tokens=TOKENS)
    sessions = [store.open() for _ in lengths]
    for session, n in zip(sessions, lengths, strict=True):
        trunk.forward(session, IDS[:n], "none")
        session.reserve(3)
    logits, chain = trunk.head.begin(sessions, [9, 9, 9])
    rows = [logits]
    logits, chain = trunk.head.extend(chain, [c[0] for c in chains])
    rows.append(logits)
    logits, chain = trunk.head.extend(chain.keep([0, 2]), [5 - 4 + 1, 6])
    for i in range(3):
        assert torch.equal(torch.stack([rows[0][i], rows[1][i]]), alone[i][:2])
    assert torch.equal(logits, torch.stack([alone[0][2], alone[2][2]]))


def test_drafting_does_not_touch_the_trunk(trunk):
    wanted = torch.cat([trunk.forward(opened(trunk, 60), IDS[60:70], "all")])
    session = opened(trunk, 60)
    drafted(trunk, session, 1, [2, 3, 4, 5, 6, 7])
    assert torch.equal(trunk.forward(session, IDS[60:70], "all"), wanted)


def test_a_state_without_streams_waits_for_one_token(trunk):
    session = opened(trunk, 20)
    session.drafts.load(torch.zeros(0, session.drafts.tensor().shape[1]), 0)
    assert not can_draft(session)
    trunk.forward(session, [4])
    assert can_draft(session)
    assert torch.isfinite(drafted(trunk, session, 5, [6])).all()


def test_streams_and_count_are_the_whole_state(trunk):
    """Pages aside: what a snapshot has to carry."""
    session = opened(trunk, 90)
    kept, written = session.drafts.tensor().clone(), session.drafts.written
    wanted = drafted(trunk, session, 5, [6, 7])
    session.drafts.load(kept, written)
    assert torch.equal(drafted(trunk, session, 5, [6, 7]), wanted)


def test_random_walks_of_rounds(trunk):
    """Rounds of every kind one after another: the head's rows are always those of the text."""
    random = np.random.default_rng(4)
    for start in (1, 60):
        session = opened(trunk, start)
        while session.position < TOKENS:
            room = TOKENS - session.position
            n = int(min(random.integers(0, 8), room - 1))
            accepted = int(random.integers(0, n + 1))
            at = session.position
            if random.random() < 0.7 and n:
                drafted(trunk, session, IDS[at], [1] * int(random.integers(0, n)))
            ids = [*IDS[at : at + 1 + accepted], *([300 - 20] * (n - accepted))]
            trunk.forward(session, ids, "none")
            session.rewind(n - accepted)
            session.check()
        assert session.ids == IDS[:TOKENS]
        clean = opened(trunk, TOKENS)
        for head, want in itertools.pairwise([session, clean]):
            assert torch.equal(drafted(trunk, head, 8, [9]), drafted(trunk, want, 8, [9]))
