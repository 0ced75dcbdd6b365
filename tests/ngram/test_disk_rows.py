"""Rows from disk, by every reader: right, or an error that names the file; never anything else."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import as_asked, open_fds, os_threads, resident_bytes, write_table

from civetta.checkpoint import formats
from civetta.errors import CheckpointMalformed, ReadFailed, UsageError
from civetta.ngram.disk_rows import DiskRows
from civetta.ngram.reader import DEPTHS, KINDS, Fault, available_kinds, open_reader

READERS = list(available_kinds())


@pytest.fixture(params=READERS)
def kind(request):
    return request.param


@pytest.fixture
def table(tmp_path):
    return write_table(tmp_path, rows=3000)


@pytest.fixture
def store(table, kind):
    opened = DiskRows(table.layout, reader=kind, cache_bytes=0)
    yield opened
    opened.close()


def gather(store, rows):
    return as_asked(store.submit(np.asarray(rows)).wait())


def test_all_readers_of_this_machine_are_tested():
    assert "python" in READERS
    assert set(READERS) <= set(KINDS)


def test_a_kind_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("civetta.ngram.reader._refusal", lambda _: "the kernel says no")
    with pytest.raises(UsageError, match="--ngram-reader uring is not possible here: the kernel"):
        open_reader([], largest_bytes=90, kind="uring")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_gather_returns_the_bytes_of_the_file(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("t")
    table = write_table(
        folder,
        fmt=data.draw(st.sampled_from([formats.IQ4_NL, formats.BF16, formats.F32, formats.Q8_0])),
        cols=data.draw(st.sampled_from([32, 160, 2080])),
        rows=data.draw(st.integers(1, 400)),
        shards=(shards := data.draw(st.integers(1, 5))),
        files=data.draw(st.integers(1, shards)),
        shuffled=data.draw(st.booleans()),
        at=data.draw(st.integers(1, 9000)),
    )
    store = DiskRows(
        table.layout,
        reader=data.draw(st.sampled_from(READERS)),
        depth=data.draw(st.integers(1, 9)),
        cache_bytes=data.draw(st.sampled_from([0, 3000, 1 << 20])),
        direct=data.draw(st.booleans()),
    )
    ids = st.lists(st.integers(0, table.layout.rows - 1), max_size=300)
    tickets = [
        (rows, store.submit(np.array(rows, dtype=np.int64)))
        for rows in data.draw(st.lists(ids, max_size=4))
    ]
    for rows, ticket in data.draw(st.permutations(tickets)):
        assert np.array_equal(as_asked(ticket.wait()), table.stored_RB[rows])
    store.close()


def test_neighbours_share_reads_and_repeated_rows_are_read_once(store, table):
    rows = np.arange(3000)
    assert np.array_equal(
        gather(store, np.concatenate([rows[::-1], rows])), table.stored_RB[np.r_[rows[::-1], rows]]
    )
    pages = -(-(77 + 3000 * 90) // 4096)
    assert pages // 4 <= store.stats().reads <= pages // 3 + 2


def test_the_cache_keeps_rows_within_its_budget(table, kind):
    store = DiskRows(table.layout, reader=kind, cache_bytes=200_000)
    rows = np.arange(0, 3000, 7)
    first, reads = gather(store, rows), store.stats().reads
    again = gather(store, rows)
    assert np.array_equal(first, again)
    held = store.stats().cached
    assert 0.7 * len(rows) < held <= len(rows)
    assert store.stats().reads - reads <= len(rows) - held
    assert store._cache._rows.nbytes <= 200_000
    store.close()


@pytest.mark.parametrize("kind", [k for k in READERS if k != "uring"])
def test_a_gather_wakes_no_more_readers_than_it_has_reads(table, kind):
    store = DiskRows(table.layout, reader=kind, cache_bytes=0)
    gather(store, [0, 1, 2, 1500, 2999])  # three places far apart
    assert store.reader.stats()["threads"] == store.reader.stats()["wakes"] == 3
    time.sleep(0.1)
    gather(store, [10])
    assert store.reader.stats()["threads"] == 3
    assert store.reader.stats()["wakes"] == 4
    store.close()


def test_a_filesystem_that_refuses_direct_reads_is_read_buffered(table, monkeypatch, caplog, kind):
    monkeypatch.setattr("civetta.ngram.table_files._open_direct", lambda _: None)
    with caplog.at_level("WARNING"):
        store = DiskRows(table.layout, reader=kind)
    assert not store.files.direct
    assert "ngram_direct_io_refused" in caplog.text
    assert np.array_equal(gather(store, [5, 2999]), table.stored_RB[[5, 2999]])
    store.close()


def test_a_truncated_file_is_refused_at_the_start(table):
    path = table.layout.paths[0]
    os.truncate(path, 3000 * 90)
    fds = open_fds()
    with pytest.raises(CheckpointMalformed, match=r"part0.bin ends before"):
        DiskRows(table.layout)
    assert open_fds() == fds


# ---- faults ------------------------------------------------------------------------------------


def test_an_error_of_the_disk_fails_its_gather_alone(store, table):
    rows = np.arange(0, 3000, 97)
    store.reader.inject(Fault(error=errno.EIO, after=5, count=1))
    with pytest.raises(ReadFailed, match=r"Input/output error, .*part0.bin at byte \d+. Check"):
        gather(store, rows)
    assert np.array_equal(gather(store, rows), table.stored_RB[rows])


def test_a_failing_gather_leaves_the_one_beside_it_alone(store, table):
    # one read fails, whichever comes to it first: one gather fails with it, the other must not
    store.reader.inject(Fault(error=errno.EIO, count=1))
    asked = [np.arange(0, 900, 90), np.arange(1000, 1900, 90)]
    tickets = [store.submit(rows) for rows in asked]
    outcomes = []
    for ticket, rows in zip(tickets, asked, strict=True):
        try:
            assert np.array_equal(as_asked(ticket.wait()), table.stored_RB[rows])
            outcomes.append("right")
        except ReadFailed:
            outcomes.append("failed")
    assert sorted(outcomes) == ["failed", "right"]


@pytest.mark.parametrize("short", [1, 100, 4095, 4096, 9000])
def test_short_answers_are_read_on(store, table, short):
    rows = np.arange(3000)
    for _ in range(2):  # one at a time: two may fall on one piece, and the same twice is the end
        store.reader.inject(Fault(short_bytes=short, count=1))
        assert np.array_equal(gather(store, rows), table.stored_RB)
    assert store.reader.stats()["retries"] >= 2


def test_answers_that_stay_short_are_the_end_of_the_file(store):
    for short in (0, 100):
        store.reader.inject(Fault(short_bytes=short, count=1 << 40))
        with pytest.raises(ReadFailed, match="ended too early"):
            gather(store, [1, 2, 1999])
    store.reader.inject(Fault(count=0))


def test_interruptions_are_repeated_but_not_for_ever(store, table):
    store.reader.inject(Fault(error=errno.EINTR, count=20))
    assert np.array_equal(gather(store, [7]), table.stored_RB[[7]])
    store.reader.inject(Fault(error=errno.EINTR, count=1 << 40))
    with pytest.raises(ReadFailed, match="Interrupted"):
        gather(store, [7])


def test_a_file_cut_while_in_use(store, table):
    """No SIGBUS, no zero rows: rows beyond the cut fail, and so does everything read after it."""
    gather(store, [0])
    os.truncate(table.layout.paths[0], 5000)
    for row in (2900, 0):
        with pytest.raises(ReadFailed, match=r"ended too early|was changed"):
            gather(store, [row])


def test_a_file_overwritten_while_in_use(store, table):
    with table.layout.paths[0].open("r+b") as file:
        file.seek(77)
        file.write(bytes(90))
    with pytest.raises(ReadFailed, match=r"part0.bin was changed while it was in use"):
        gather(store, [0])


@pytest.mark.parametrize("how", ["write", "mapping", "same bytes"])
def test_a_file_overwritten_with_its_old_time_put_back(store, table, how):
    """The time of change is the old one or another: a write shows in any case."""
    path = table.layout.paths[0]
    before = path.stat()
    if how == "mapping":  # the kernel does not tell of these; the bytes do
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[77 : 77 + 90] = bytes(90)
            memory.flush()
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    else:
        with path.open("r+b") as file:
            file.write(path.read_bytes() if how == "same bytes" else bytes(500))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ReadFailed, match=r"part0.bin was changed while it was in use"):
        gather(store, [0])


def test_a_file_that_was_touched_is_read_on(store, table, caplog):
    path = table.layout.paths[0]
    for _ in range(3):
        os.utime(path)
        path.chmod(0o600)
        assert np.array_equal(gather(store, [3, 2999]), table.stored_RB[[3, 2999]])
    assert caplog.text.count("ngram_file_touched") == 3
    assert np.array_equal(gather(store, [5]), table.stored_RB[[5]])
    assert caplog.text.count("ngram_file_touched") == 3


def test_rows_that_were_read_while_a_file_was_touched_are_read_again(store, table):
    rows = np.arange(0, 3000, 50)
    gather(store, rows)
    once = store.stats().reads
    ticket = store.submit(rows)
    os.utime(table.layout.paths[0])
    assert np.array_equal(as_asked(ticket.wait()), table.stored_RB[rows])
    assert store.stats().reads == 3 * once
    assert np.array_equal(gather(store, [1]), table.stored_RB[[1]])


def test_a_file_that_is_touched_for_ever_is_an_error(store, table, monkeypatch):
    verify, path = store.files.verify, table.layout.paths[0]

    def touched():
        os.utime(path)
        return verify()

    monkeypatch.setattr(store.files, "verify", touched)
    with pytest.raises(ReadFailed, match="touched again and again"):
        gather(store, [1])
    monkeypatch.undo()
    assert np.array_equal(gather(store, [1]), table.stored_RB[[1]])


def test_without_a_watch_a_touch_counts_as_a_change(table, kind, monkeypatch):
    monkeypatch.setattr("civetta.ngram.write_watch.WriteWatch.tells", property(lambda _: False))
    store = DiskRows(table.layout, reader=kind, cache_bytes=0)
    os.utime(table.layout.paths[0])
    with pytest.raises(ReadFailed, match="was changed while it was in use"):
        gather(store, [1])
    store.close()


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_file_replaced_or_removed_stays_the_old_one_and_the_log_says_so_once(
    store, table, caplog, monkeypatch, how
):
    monkeypatch.setattr("civetta.ngram.table_files.LOOK_S", 0.0)
    path, rows = table.layout.paths[0], [3, 2999]
    assert np.array_equal(gather(store, rows), table.stored_RB[rows])
    assert "ngram_file_" not in caplog.text
    if how == "replaced":
        other = path.with_suffix(".new")
        other.write_bytes(bytes(path.stat().st_size))
        other.replace(path)
    else:
        path.unlink()
    for _ in range(3):
        assert np.array_equal(gather(store, rows), table.stored_RB[rows])
    assert caplog.text.count(f"ngram_file_{how}") == 1
    assert "restart to serve what is there now" in caplog.text
    assert caplog.text.count("ngram_file_") == 1


def test_a_path_that_cannot_be_looked_at_is_not_called_gone(store, table, caplog, monkeypatch):
    monkeypatch.setattr("civetta.ngram.table_files.LOOK_S", 0.0)

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(type(table.layout.paths[0]), "stat", refused)
    assert np.array_equal(gather(store, [3]), table.stored_RB[[3]])
    assert "ngram_file_" not in caplog.text


def test_a_slow_disk_is_waited_for(store, table):
    rows = np.arange(0, 3000, 300)
    store.reader.inject(Fault(delay_us=10_000, count=1000))
    began = time.monotonic()
    assert np.array_equal(gather(store, rows), table.stored_RB[rows])
    assert time.monotonic() - began >= 0.01
    store.reader.inject(Fault(count=0))


def test_a_disk_that_stops_answering_is_an_error(table, kind):
    store = DiskRows(table.layout, reader=kind, cache_bytes=0, stall_s=0.5)
    store.reader.inject(Fault(delay_us=2_500_000, count=1))
    with pytest.raises(ReadFailed, match=r"has not answered for 0.5 seconds"):
        gather(store, [1])
    assert np.array_equal(gather(store, [2]), table.stored_RB[[2]])
    store.close()


def test_a_reader_that_dies_is_replaced(store, table):
    rows = np.arange(0, 3000, 50)
    for after in (0, 3, 9):
        store.reader.inject(Fault(die=True, after=after, count=1))
        with pytest.raises(ReadFailed, match="a reader thread ended"):
            gather(store, rows)
        assert np.array_equal(gather(store, rows), table.stored_RB[rows])
    assert store.reader.stats()["died"] == 3


def test_when_every_reader_dies_nobody_waits_for_ever(store, table):
    store.reader.inject(Fault(die=True, count=1 << 40))
    tickets = [store.submit(np.arange(n, 3000, 50)) for n in range(4)]
    for ticket in tickets:
        with pytest.raises(ReadFailed):
            ticket.wait()
    store.reader.inject(Fault(count=0))
    assert np.array_equal(gather(store, [9]), table.stored_RB[[9]])


def test_cancelling_ends_a_wait_in_another_thread(store, table):
    store.reader.inject(Fault(delay_us=300_000, count=1))
    ticket = store.submit(np.array([1]))
    timer = threading.Timer(0.05, ticket.cancel)
    timer.start()
    began = time.monotonic()
    with pytest.raises(ReadFailed, match="given up"):
        ticket.wait()
    assert time.monotonic() - began < 0.29
    timer.join()
    with pytest.raises(ReadFailed, match="given up"):
        ticket.wait()
    ticket.cancel()
    assert np.array_equal(gather(store, [1]), table.stored_RB[[1]])


def test_ten_thousand_cancelled_gathers_leave_nothing(store, table):
    rng = np.random.default_rng(0)
    native = store.reader.kind != "python"
    gather(store, np.arange(0, 3000, 46))
    gc.collect()
    if native:
        from civetta.ngram import _reader

        assert _reader.jobs_alive() == 0
    fds, threads, memory = open_fds(), os_threads(), resident_bytes()
    for n in range(10_000):
        ticket = store.submit(rng.integers(0, 3000, 4))
        if n % 3 == 0:
            del ticket  # forgotten
        else:
            ticket.cancel()
    rows = np.arange(3000)
    assert np.array_equal(gather(store, rows), table.stored_RB)
    gc.collect()
    assert open_fds() <= fds
    assert resident_bytes() - memory < 32 << 20
    assert os_threads() <= threads + DEPTHS[store.reader.kind]
    if native:
        deadline = time.monotonic() + 5
        while _reader.jobs_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _reader.jobs_alive() == 0
    else:
        assert not store.reader._queue


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_reads_with_readers_of_its_own(store, table):
    rows = np.arange(0, 3000, 11)
    gather(store, rows)
    store.reader.inject(Fault(delay_us=20_000, count=5))
    before = store.submit(rows)
    child = os.fork()
    if child == 0:
        try:
            right = np.array_equal(gather(store, rows), table.stored_RB[rows])
            try:
                before.wait()
                right = False
            except ReadFailed as error:
                right &= "forked" in str(error)
            before.cancel()
            del before
            store.close()
            os._exit(0 if right else 3)
        finally:
            os._exit(4)
    assert np.array_equal(as_asked(before.wait()), table.stored_RB[rows])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(gather(store, rows), table.stored_RB[rows])


def test_closing_ends_what_is_under_way(table, kind):
    store = DiskRows(table.layout, reader=kind, cache_bytes=0)
    fds = open_fds()
    store.reader.inject(Fault(delay_us=50_000, count=100))
    ticket = store.submit(np.arange(0, 3000, 46))
    store.close()
    store.close()
    with pytest.raises(ReadFailed):
        ticket.wait()
    assert open_fds() < fds
    assert not [t for t in threading.enumerate() if t.name == "civetta-ngram"]


def test_a_forgotten_store_ends_its_threads(table, kind):
    gc.collect()
    fds, threads = open_fds(), os_threads()
    for _ in range(3):
        gather(DiskRows(table.layout, reader=kind), [1, 2, 3])
    gc.collect()
    assert open_fds() == fds
    assert os_threads() == threads
