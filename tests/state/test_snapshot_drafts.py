"""Snapshots of sessions with a draft head: drafts go on as if nothing had happened."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny as writers
from civetta.kernels.select import REFERENCE
from civetta.model.bind_mtp import find_head
from civetta.model.build import build_trunk, check_checkpoint

TINY = writers.make(3)
TOKENS = 150
IDS = [int(i) for i in np.random.default_rng(5).integers(0, 256, TOKENS)]


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp") / "hf"
    checked = check_checkpoint(writers.write_hf(folder, TINY.config, writers.stored(TINY.tensors)))
    head = find_head(checked.checkpoint, checked.config, None)
    assert head is not None
    return build_trunk(checked, dtype=torch.float32, ops=REFERENCE, head=head)


def drafts_of(trunk, session, next_id):
    """Logits of a chain of three drafts after `next_id`."""
    session.reserve(4)
    logits, chain = trunk.head.begin([session], [next_id])
    rows = [logits]
    for token in (5, 9):
        logits, chain = trunk.head.extend(chain, [token])
        rows.append(logits)
    session.trim()
    return torch.cat(rows)


@pytest.mark.parametrize("cut", [1, 9, 63, 64, 65, 72, 128, 129])
def test_trunk_and_drafts_go_on_from_a_snapshot(trunk, cut):
    store = trunk.store(sessions=4, context_tokens=TOKENS + 16)
    origin = store.open()
    trunk.forward(origin, IDS[:cut], "none")
    snapshot = origin.snapshot()
    wanted_rows = trunk.forward(origin, IDS[cut:], "all")
    wanted_drafts = drafts_of(trunk, origin, 7)
    for other in ([1, 2, 3], []):  # someone else goes another way in between
        stranger = store.open()
        stranger.restore(snapshot)
        if other:
            trunk.forward(stranger, other, "none")
        drafts_of(trunk, stranger, 200)
        session = store.open()
        session.restore(snapshot)
        session.check()
        assert torch.equal(trunk.forward(session, IDS[cut:], "all"), wanted_rows)
        assert torch.equal(drafts_of(trunk, session, 7), wanted_drafts)
        for held in (stranger, session):
            held.close()
    snapshot.close()
    origin.close()
    store.pool.check()
    assert store.pool.free_pages == store.pool.pages


def test_drafting_does_not_touch_what_others_share(trunk):
    """A draft writes the row of the newest token, in a page that a snapshot and a twin have too."""
    store = trunk.store(sessions=4, context_tokens=TOKENS + 16)
    first = store.open()
    trunk.forward(first, IDS[:64], "none")
    second = first.fork()
    one, two = drafts_of(trunk, first, 7), drafts_of(trunk, second, 8)
    assert first.pages != second.pages
    alone = store.open()
    trunk.forward(alone, IDS[:64], "none")
    assert torch.equal(drafts_of(trunk, alone.fork(), 7), one)
    assert torch.equal(drafts_of(trunk, alone.fork(), 8), two)
    assert torch.equal(
        trunk.forward(first, IDS[64:70], "all"), trunk.forward(alone, IDS[64:70], "all")
    )


def test_a_restore_some_tokens_back_keeps_its_drafts(trunk):
    store = trunk.store(sessions=3, context_tokens=TOKENS + 16)
    origin = store.open()
    trunk.forward(origin, IDS[:130], "none")
    snapshot = origin.snapshot()
    session = store.open()
    session.restore(snapshot, 127)
    alone = store.open()
    trunk.forward(alone, IDS[:127], "none")
    assert torch.equal(
        trunk.forward(session, IDS[127:], "all"), trunk.forward(alone, IDS[127:], "all")
    )
    assert torch.equal(drafts_of(trunk, session, 7), drafts_of(trunk, alone, 7))
