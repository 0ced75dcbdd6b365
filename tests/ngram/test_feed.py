"""The claim rules of a prefetch, and that no schedule of gathers changes a single bit."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import write_table

from civetta.checkpoint import formats
from civetta.errors import ReadFailed
from civetta.ngram.disk_rows import DiskRows
from civetta.ngram.feed import CHUNK_TOKENS_KEPT, SHORT_TOKENS, TOKENS_KEPT, RowFeed
from civetta.ngram.hash import make_hash
from civetta.ngram.reader import Fault, available_kinds
from civetta.ngram.resident_rows import ResidentRows

HASH = make_hash(
    vocab=50, size=3, heads_per_ngram=2, base=300, seed=4, eos_token_id=0, divisor=8
)  # fmt: skip
CPU = torch.device("cpu")
LONG = list(range(1, 31))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("feed")
    return write_table(
        folder, fmt=formats.Q8_0, cols=32, rows=HASH.rows, shards=3, files=2, shuffled=True
    )


@pytest.fixture
def feed(table):
    made = RowFeed(HASH, DiskRows(table.layout, cache_bytes=0), dtype=torch.float32)
    yield made
    made.check()
    made.close()
    made.check()


def numbers(table, ids, history, dtype=torch.float32):
    """Rows by another way, from the bytes that were written."""
    where = HASH.row_ids(ids, history)
    raw = table.stored_RB[where.reshape(-1)]
    scale = raw[:, :2].copy().view(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore"):  # random halves may be infinite
        values = scale * raw[:, 2:].view(np.int8)
    return torch.from_numpy(values.reshape(len(where), -1)).to(dtype)


def same(a, b):
    return a.shape == b.shape and torch.equal(a.nan_to_num(1.5), b.nan_to_num(1.5))


def reads(feed):
    return feed.store.stats().gathers


def test_an_exact_match_is_claimed_and_nothing_is_read_again(feed, table):
    feed.prefetch(LONG, [7, 8])
    before = reads(feed)
    assert same(feed.take(feed.begin(LONG, [5, 7, 8])), numbers(table, LONG, [7, 8]))
    assert reads(feed) == before
    assert (feed.stats().claimed, feed.stats().plain) == (1, 0)


@pytest.mark.parametrize(
    ("ids", "history"),
    [
        (LONG[:-1], [7, 8]),
        ([*LONG, 3], [7, 8]),
        ([9, *LONG[1:]], [7, 8]),
        (LONG, [6, 8]),
        (LONG, [8]),
        (LONG, []),
    ],
)
def test_a_mismatch_is_read_plainly_and_leaves_the_rows_claimable(feed, table, ids, history):
    feed.prefetch(LONG, [7, 8])
    assert same(feed.take(feed.begin(ids, history)), numbers(table, ids, history))
    assert (feed.stats().claimed, feed.stats().plain) == (0, 1)
    assert same(feed.take(feed.begin(LONG, [7, 8])), numbers(table, LONG, [7, 8]))
    assert (feed.stats().claimed, feed.stats().plain) == (1, 1)


def test_rows_are_claimed_once(feed, table):
    feed.prefetch(LONG, [7, 8])
    for _ in range(2):
        assert same(feed.take(feed.begin(LONG, [7, 8])), numbers(table, LONG, [7, 8]))
    assert (feed.stats().claimed, feed.stats().plain) == (1, 1)


def test_another_gather_waits_for_the_read_in_flight(feed, table):
    """Gathers are served in order: the other one ends after the prefetch, whose rows stay."""
    feed.store.reader.inject(Fault(delay_us=30_000, count=1))
    feed.prefetch(LONG, [7, 8])
    assert same(feed.take(feed.begin(LONG, [1, 1])), numbers(table, LONG, [1, 1]))
    assert same(feed.take(feed.begin(LONG, [7, 8])), numbers(table, LONG, [7, 8]))
    assert feed.stats().claimed == 1


def test_drafts_are_claimed_token_by_token(feed, table):
    """A sampled token, then its drafts, are announced one after the other; a draft may be wrong."""
    feed.prefetch([11], [7, 8])
    feed.prefetch([12, 13, 14], [8, 11])
    piece = [11, 12, 13, 20, 21]
    assert same(feed.take(feed.begin(piece, [7, 8])), numbers(table, piece, [7, 8]))
    assert (feed.stats().claimed, feed.stats().plain) == (3, 1)


def test_prefetching_the_same_again_reads_once(feed):
    for _ in range(3):
        feed.prefetch([11], [7, 8])
        feed.prefetch(LONG, [7, 8])
    assert feed.stats().prefetched == reads(feed) == 2


def test_what_nobody_claims_is_bounded(feed, table):
    piece = [i % 50 for i in range(CHUNK_TOKENS_KEPT // 4 - 1)]
    for n in range(4 + 5):
        feed.prefetch([n, *piece], [7, 8])
    for n in range(TOKENS_KEPT + 9):
        feed.prefetch([n % 50], [n // 50, 1])
    feed.check()
    assert feed.stats().dropped == 5 + 9
    for n in (0, 4 + 4):
        assert same(feed.take(feed.begin([n, *piece], [7, 8])), numbers(table, [n, *piece], [7, 8]))
    assert (feed.stats().claimed, feed.stats().plain) == (1, 1)


def test_many_short_prompts_are_kept(feed, table):
    """A step's batch may be many prompts: each piece is claimed where it comes."""
    for n in range(40):
        feed.prefetch([n, *LONG], [])
    for n in range(40):
        assert same(feed.take(feed.begin([n, *LONG], [])), numbers(table, [n, *LONG], []))
    assert (feed.stats().claimed, feed.stats().plain) == (40, 0)


def test_without_prefetch_nothing_is_read_ahead(table):
    feed = RowFeed(HASH, DiskRows(table.layout), dtype=torch.float32, prefetch=False)
    feed.prefetch(LONG, [7, 8])
    assert reads(feed) == 0
    feed.close()


def test_a_table_in_memory_is_not_read_ahead(table):
    store = ResidentRows(table.layout, placement="ram", device=torch.device("cpu"))
    feed = RowFeed(HASH, store, dtype=torch.float32)
    feed.prefetch(LONG, [7, 8])
    assert feed.stats().prefetched == reads(feed) == 0
    assert same(feed.take(feed.begin(LONG, [7, 8])), numbers(table, LONG, [7, 8]))
    feed.close()


def test_a_prefetch_that_failed_is_read_again(feed, table):
    feed.store.reader.inject(Fault(error=errno.EIO, count=1))
    feed.prefetch(LONG, [7, 8])
    assert same(feed.take(feed.begin(LONG, [7, 8])), numbers(table, LONG, [7, 8]))
    feed.store.reader.inject(Fault(error=errno.EIO, count=1 << 40))
    feed.prefetch(LONG, [7, 8])
    with pytest.raises(ReadFailed, match="Input/output error"):
        feed.take(feed.begin(LONG, [7, 8]))
    feed.store.reader.inject(Fault(count=0))


def test_a_ticket_is_spent(feed):
    for spend in (feed.take, lambda ticket: ticket.cancel()):
        ticket = feed.begin(LONG, [7, 8])
        spend(ticket)
        with pytest.raises(ReadFailed, match="given up"):
            feed.take(ticket)


TOKENS = st.integers(0, 12)
PIECES = st.one_of(
    st.lists(TOKENS, min_size=1, max_size=4), st.lists(TOKENS, min_size=SHORT_TOKENS, max_size=40)
)


def test_rows_of_several_pieces_are_taken_together(table):
    """In the order of the tickets; one of them was read ahead token by token."""
    feed = RowFeed(HASH, DiskRows(table.layout), dtype=torch.float32)
    feed.prefetch([3, 4], [1, 2])
    tickets = [feed.begin([9, 8, 7], [5]), feed.begin([3, 4], [1, 2]), feed.begin(LONG, [7, 8])]
    assert [len(ticket.parts) for ticket in tickets] == [1, 2, 1]
    wanted = [numbers(table, ids, before) for ids, before in
              (([9, 8, 7], [5]), ([3, 4], [1, 2]), (LONG, [7, 8]))]  # fmt: skip
    assert same(feed.take(*tickets), torch.cat(wanted))
    feed.check()
    feed.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_schedule_changes_a_bit(table, data):
    """Two sequences cut anywhere, gathers in any order between each other, prefetches right, wrong
    and forgotten, reads that fail now and then, any reader, cache and placement."""
    kind = data.draw(st.sampled_from([*available_kinds(), "ram", "gpu"]))
    if kind in ("ram", "gpu"):
        store = ResidentRows(table.layout, placement=kind, device=CPU)
    else:
        cache = data.draw(st.sampled_from([0, 1000, 1 << 20]))
        store = DiskRows(table.layout, reader=kind, cache_bytes=cache)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    feed = RowFeed(HASH, store, dtype=dtype, prefetch=data.draw(st.booleans()))
    faults = 0

    def take(ticket, ids, before):
        nonlocal faults
        try:
            assert same(feed.take(ticket), numbers(table, ids, before, dtype))
        except ReadFailed:
            faults -= 1  # each fault fails one gather at most
            assert faults >= 0

    sequences = [[], []]
    pending = []
    for _ in range(data.draw(st.integers(1, 12))):
        who = data.draw(st.integers(0, 1))
        piece, step = data.draw(PIECES), data.draw(st.sampled_from("pbbtcf"))
        history = sequences[who]
        if step == "p":
            feed.prefetch(piece, history)
        elif step == "b":
            if data.draw(st.booleans()):
                feed.prefetch(piece, history[-2:])
            pending.append((feed.begin(piece, history), piece, list(history)))
            sequences[who] = [*history, *piece]
        elif step == "t" and pending:
            take(*pending.pop(data.draw(st.integers(0, len(pending) - 1))))
        elif step == "c" and pending:
            pending.pop()[0].cancel()
        elif step == "f" and hasattr(store, "reader"):
            faults += 1
            store.reader.inject(Fault(error=errno.EIO, count=1))
    for rest in pending:
        take(*rest)
    feed.check()
    feed.close()
    feed.check()
