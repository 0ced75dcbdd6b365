"""One answer whatever the placement, reader, cache and prefetch; a failed read fails its forward."""

from __future__ import annotations

import errno
import itertools

import numpy as np
import pytest
import torch
import transformers_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from civetta.errors import ReadFailed
from civetta.kernels.select import REFERENCE
from civetta.model.build import TableOptions, load_trunk
from civetta.model.inputs import Piece
from civetta.ngram.placement import StoreOptions
from civetta.ngram.reader import Fault, available_kinds

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = np.random.default_rng(3).integers(0, 320, 200).tolist()
OTHER = np.random.default_rng(4).integers(0, 320, 200).tolist()
SETTINGS = {
    "ram": TableOptions(store=StoreOptions(placement="ram")),
    "disk": TableOptions(store=StoreOptions(placement="disk")),
    "plain": TableOptions(store=StoreOptions(placement="disk", cache_bytes=0), prefetch=False),
    **{
        kind: TableOptions(store=StoreOptions(placement="disk", reader=kind, cache_bytes=0))
        for kind in available_kinds()
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = oracle.random_model(oracle.text_config(), seed=5)
    return oracle.save(model, tmp_path_factory.mktemp("placed"))


@pytest.fixture(scope="module")
def trunks(folder):
    made = {
        name: load_trunk(folder, ops=REFERENCE, table=table) for name, table in SETTINGS.items()
    }
    yield made
    for trunk in made.values():
        trunk.close()


@pytest.fixture(scope="module")
def wanted(trunks):
    return [forward(trunks["ram"], open_session(trunks["ram"]), ids) for ids in (IDS, OTHER)]


def open_session(trunk):
    return trunk.store(sessions=1, context_tokens=256).open()


def forward(trunk, session, ids, next_ids=()):
    return trunk.forward_pieces([Piece(session=session, ids=ids, rows="all", next_ids=next_ids)])


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("cuts", [[], [64, 128], [1, 2, 3, 150], list(range(64, 100))])
def test_chunks_with_prefetch(trunks, wanted, name, cuts):
    trunk = trunks[name]
    for _ in range(2):  # cold, then with the rows of the first run in the cache
        session, bounds = open_session(trunk), [0, *cuts, len(IDS)]
        pairs = [IDS[a:b] for a, b in itertools.pairwise(bounds)]
        rows = [
            forward(trunk, session, ids, later)
            for ids, later in zip(pairs, [*pairs[1:], ()], strict=True)
        ]
        assert torch.equal(torch.cat(rows), wanted[0])
        trunk._rows.check()
    if name not in ("ram", "plain") and len(cuts) == 2:
        assert trunk._rows.stats().claimed >= 2


STEP = st.tuples(
    st.sampled_from(["first", "second", "both"]),
    st.sampled_from([1, 2, 17, 40]),  # tokens of a piece
    st.sampled_from(["nothing", "one", "right", "longer"]),  # what is said to come next
    st.sampled_from([0, 1, 17, 30]),  # tokens that are announced, and may not come so
)


@settings(max_examples=12, deadline=None)
@given(name=st.sampled_from(sorted(SETTINGS)), steps=st.lists(STEP, min_size=2, max_size=6))
def test_two_sequences_interleaved_anywhere(trunks, wanted, name, steps):
    trunk = trunks[name]
    texts, sessions, rows = (IDS, OTHER), [open_session(trunk), open_session(trunk)], [[], []]
    for who, size, ahead, announced in steps:
        turn = {"first": [0], "second": [1], "both": [0, 1]}[who]
        pieces = []
        for n in turn:
            at = sessions[n].position
            trunk.expect(sessions[n], texts[n][at : at + announced])
            later = {"nothing": 0, "one": 1, "right": size, "longer": size + 1}[ahead]
            pieces.append(
                Piece(
                    session=sessions[n],
                    ids=texts[n][at : at + size],
                    rows="all",
                    next_ids=texts[n][at + size : at + size + later],
                )
            )
        logits = trunk.forward_pieces(pieces).split([len(piece.ids) for piece in pieces])
        for n, part in zip(turn, logits, strict=True):
            rows[n].append(part)
    for n, found in enumerate(rows):
        got = torch.cat(found) if found else wanted[n][:0]
        assert torch.equal(got, wanted[n][: len(got)])
    trunk._rows.check()


@pytest.mark.parametrize("name", available_kinds())
def test_a_failed_read_fails_its_forward_and_the_next_one_is_right(trunks, wanted, name):
    trunk = trunks[name]
    trunk._rows.store.reader.inject(Fault(error=errno.EIO, count=1))
    with pytest.raises(ReadFailed, match="Input/output error"):
        forward(trunk, open_session(trunk), IDS)
    assert torch.equal(forward(trunk, open_session(trunk), IDS), wanted[0])


def test_layer_0_runs_while_the_rows_are_read(trunks, wanted, monkeypatch):
    """Rows are asked for before the first layer and waited for at the n-gram layer."""
    trunk, order = trunks["disk"], []

    def noted(name):
        plain = getattr(trunk._rows, name)
        monkeypatch.setattr(trunk._rows, name, lambda *args: (order.append(name), plain(*args))[1])

    for name in ("begin", "take", "prefetch"):
        noted(name)
    block = trunk._block
    monkeypatch.setattr(trunk, "_block", lambda *args: (order.append("block"), block(*args))[1])
    forward(trunk, open_session(trunk), IDS[:20], IDS[20:40])
    layer = trunk.config.ple.layer
    assert order[: layer + 3] == ["begin", *["block"] * layer, "take", "prefetch"]
    assert order.count("block") == trunk.config.layers


def test_a_forward_that_breaks_off_leaves_no_ticket(trunks, monkeypatch):
    trunk, cancelled = trunks["disk"], []

    def broken(*_):
        raise ZeroDivisionError

    begin = trunk._rows.begin

    def watched(*args):
        ticket = begin(*args)
        monkeypatch.setattr(ticket, "cancel", lambda: cancelled.append(1))
        return ticket

    monkeypatch.setattr(trunk._rows, "begin", watched)
    monkeypatch.setattr(trunk, "_block", broken)
    with pytest.raises(ZeroDivisionError):
        forward(trunk, open_session(trunk), IDS[:20])
    assert cancelled
