"""The disk tier: bytes survive, what is damaged goes, faults stay with the entry they struck."""

from __future__ import annotations

import errno
import os
import re

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.disk_states import (
    MODEL,
    OTHER,
    PAGE_BYTES,
    PAGE_TOKENS,
    FaultyFiles,
    assert_reads,
    key,
    opened,
    put,
    small,
    sources,
)
from civetta.cache import disk_format
from civetta.cache.disk import NoRoom, RunSource
from civetta.cache.disk_folder import FOLDER
from civetta.cache.disk_format import BadEntry, Run, decode_head, encode_entry
from civetta.cache.protocol import ImageMark
from civetta.cache.survey import survey, verify
from civetta.errors import CacheUnusable


def files_of(folder):
    return sorted(p for p in (folder / FOLDER).rglob("*") if p.is_file() and p.name != "LOCK")


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1024, 1025, 2100])
def test_bytes_come_back_after_a_restart(tmp_path, tokens):
    tier = opened(tmp_path)
    put(tier, key(1), tokens, images=(ImageMark(position=0, digest=b"x" * 32),))
    tier.check()
    assert_reads(tier, key(1), tokens)
    tier.close()
    tier = opened(tmp_path)
    assert_reads(tier, key(1), tokens)
    (record,) = tier.records()
    assert record.entry.head.marks == (ImageMark(position=0, digest=b"x" * 32),)
    assert (tier.ids(record) == np.arange(tokens)).all()
    assert next(verify(tmp_path))[1] is None
    tier.close()


def test_runs_are_shared_and_go_with_their_last_user(tmp_path):
    tier = opened(tmp_path)
    put(tier, key(1), 1024)
    first = tier.nbytes
    put(tier, key(2), 1030)
    assert len(list((tmp_path / FOLDER / "runs").iterdir())) == 2
    assert tier.freed_bytes(key(1)) < first
    tier.remove(key(1))
    tier.check()
    assert_reads(tier, key(2), 1030)
    tier.remove(key(2))
    tier.remove(key(2))
    assert (tier.nbytes, files_of(tmp_path), tier.take_gone()) == (0, [], [key(1), key(2)])
    tier.close()


def test_a_known_run_is_not_read_again(tmp_path):
    tier = opened(tmp_path)
    put(tier, key(1), 1030)

    def refuse():
        raise AssertionError("read pages that are on disk")

    again = [RunSource(known=b"0:", pages=16, read=refuse), *sources(1030)[1:]]
    tier.publish(key(2), small(1030), again, page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES)
    assert_reads(tier, key(2), 1030)
    tier.close()


def test_room_is_made_by_those_that_may_go(tmp_path):
    tier = opened(tmp_path)
    for n in range(4):
        put(tier, key(n), 100, seed=n, salt=b"%d" % n)
    one = tier.freed_bytes(key(0))
    tier.budget_bytes = 4 * one + one // 2
    assert tier.pin(key(2))
    put(tier, key(9), 100, seed=9, salt=b"9", victims=[key(2), key(1), key(0)])
    assert tier.take_gone() == [key(1)]
    with pytest.raises(NoRoom):
        put(tier, key(8), 100, seed=8, salt=b"8", victims=[key(2)])
    tier.unpin(key(2))
    put(tier, key(8), 100, seed=8, salt=b"8", victims=[key(2)])
    assert {r.key for r in tier.records()} == {key(0), key(3), key(8), key(9)}
    assert tier.nbytes <= tier.budget_bytes
    tier.check()
    tier.close()


def test_other_models_are_not_used_and_go_first(tmp_path):
    tier = opened(tmp_path, model=OTHER)
    put(tier, key(1))
    one = tier.nbytes
    tier.close()
    tier = opened(tmp_path)
    assert tier.records() == []
    assert len(tier.records(own=False)) == 1
    tier.budget_bytes = one + one // 2
    put(tier, key(2), salt=b"2")
    assert {r.key for r in tier.records(own=False)} == {key(2)}
    tier.close()


def test_one_process_a_folder(tmp_path):
    tier = opened(tmp_path)
    with pytest.raises(CacheUnusable, match="another civetta"):
        opened(tmp_path)
    tier.close()
    opened(tmp_path).close()


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheUnusable, match="--cache-disk"):
        opened(tmp_path / "file")


def test_foreign_files_are_left_alone(tmp_path, caplog):
    opened(tmp_path).close()
    mine = [tmp_path / FOLDER / part / "notes.txt" for part in ("entries", "runs")]
    for path in mine:
        path.write_text("mine")
    tier = opened(tmp_path)
    assert (tier.records(own=False), [path.read_text() for path in mine]) == ([], ["mine"] * 2)
    assert caplog.text.count("cache_foreign_file") == 2
    tier.close()


def test_what_a_crash_leaves_is_cleaned_up(tmp_path):
    tier = opened(tmp_path)
    put(tier, key(1))
    tier.close()
    root = tmp_path / FOLDER
    (root / "tmp" / "3.tmp").write_bytes(b"half")
    (root / "runs" / f"{key(77)}.run").write_bytes(b"nobody needs it")
    before = files_of(tmp_path)
    tier = opened(tmp_path)
    assert len(files_of(tmp_path)) == len(before) - 2
    assert_reads(tier, key(1), 100)
    tier.close()


@pytest.mark.parametrize("suffix", [".entry", ".run"])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty", "gone"])
def test_any_damage_is_found(tmp_path, suffix, damage, caplog):
    """Each byte position of the head, and samples of the rest."""
    tier = opened(tmp_path)
    put(tier, key(1))
    tier.close()
    (path,) = [p for p in files_of(tmp_path) if p.suffix == suffix]
    whole = path.read_bytes()
    step = 7 if damage == "flip" else len(whole)
    for at in range(0, len(whole), step):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        bad = {
            "flip": bytes(flipped), "cut": whole[:-1], "grow": whole + b"\0", "empty": b"",
            "gone": None,
        }[damage]  # fmt: skip
        path.unlink()
        if bad is not None:
            path.write_bytes(bad)
        problems = [problem for _, problem in verify(tmp_path)]
        assert (damage == "gone" and suffix == ".entry") or all(problems)
        tier = opened(tmp_path)
        if key(1) in tier:
            with pytest.raises(BadEntry):  # noqa: PT012 - either read may find it
                entry, _ = tier.read_small(key(1))
                for run in entry.head.runs:
                    tier.read_run(run)
            tier.drop_damaged(key(1), "test")
        assert key(1) not in tier
        tier.check()
        assert [p for p in files_of(tmp_path) if p.stem == key(1)] == []
        put(tier, key(1))
        tier.close()
        assert path.read_bytes() == whole
    assert damage == "gone" or "cache_entry_dropped" in caplog.text


def test_a_damaged_run_takes_all_its_users_along(tmp_path):
    tier = opened(tmp_path)
    put(tier, key(1), 1030)
    put(tier, key(2), 1040)
    put(tier, key(3), 1030, salt=b"3")
    (entry, _) = tier.read_small(key(1))
    path = tmp_path / FOLDER / "runs" / f"{entry.head.runs[0].digest}.run"
    path.write_bytes(path.read_bytes()[::-1])
    tier.drop_damaged(key(2), "found out")
    assert {r.key for r in tier.records()} == {key(3)}
    assert not path.exists()
    tier.check()
    put(tier, key(2), 1040)
    assert_reads(tier, key(2), 1040)
    tier.close()


def test_other_versions_are_refused(tmp_path):
    chunks = encode_entry(
        small(3), [Run(digest="00" * 32, pages=1, nbytes=PAGE_BYTES)],
        model=MODEL, images=(), page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES,
    )  # fmt: skip
    data = bytearray(b"".join(bytes(chunk) for chunk in chunks))
    assert decode_head(bytes(data)).head.tokens == 3
    data[8] = disk_format.FORMAT_VERSION + 1
    with pytest.raises(BadEntry, match="version 2, this version reads 1"):
        decode_head(bytes(data))
    with pytest.raises(BadEntry, match="not an entry"):
        decode_head(b"x" * 200)


# ---- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("forever", [False, True])
def test_a_fault_at_any_operation_of_a_write(tmp_path, code, forever):
    files = FaultyFiles()
    tier = opened(tmp_path / "x", files=files)
    put(tier, key(1), 1030)
    files.arm(None, code)
    put(tier, key(2), 1100)
    operations = files.count
    tier.close()
    assert operations >= 6
    for at in range(1, operations + 1):
        folder = tmp_path / str(at)
        tier = opened(folder, files=files)
        files.arm(None, code)
        put(tier, key(1), 1030)
        files.arm(at, code, forever=forever)
        with pytest.raises(OSError, match=re.escape(os.strerror(code))):
            put(tier, key(2), 1100)
        files.arm(None, code)
        tier.check()
        assert_reads(tier, key(1), 1030)
        assert key(2) not in tier
        put(tier, key(2), 1100)
        assert_reads(tier, key(2), 1100)
        tier.close()
        tier = opened(folder)
        assert_reads(tier, key(1), 1030)
        assert_reads(tier, key(2), 1100)
        tier.check()
        tier.close()


class Tier(RuleBasedStateMachine):
    """Publish, remove, restart, damage, faults in any order against a dictionary."""

    @initialize()
    def start(self):
        import tempfile
        from pathlib import Path

        self.folder = Path(tempfile.mkdtemp())
        self.files = FaultyFiles()
        self.tier = opened(self.folder, files=self.files)
        self.wanted = {}
        self.left_over = set()

    @rule(n=st.integers(0, 5), tokens=st.sampled_from([5, 70, 1024, 1030]), salt=st.booleans())
    def publish(self, n, tokens, salt):
        if key(n) not in self.wanted:
            facts = {"seed": n, "salt": b"s" if salt else b""}
            put(self.tier, key(n), tokens, **facts)
            self.wanted[key(n)] = (tokens, facts)

    @rule(n=st.integers(0, 5), at=st.integers(1, 8), forever=st.booleans())
    def fail(self, n, at, forever):
        if key(n) in self.wanted:
            return
        self.files.arm(at, errno.EIO, forever=forever)
        try:
            put(self.tier, key(n), 1030, seed=n)
        except OSError:
            assert key(n) not in self.tier
            self.left_over.add(key(n))
        else:
            self.wanted[key(n)] = (1030, {"seed": n})
        finally:
            self.files.arm(None, 0)

    @rule(n=st.integers(0, 5))
    def remove(self, n):
        self.tier.remove(key(n))
        self.wanted.pop(key(n), None)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def damage_entry(self, data):
        victim = data.draw(st.sampled_from(sorted(self.wanted)))
        path = self.folder / FOLDER / "entries" / f"{victim}.entry"
        raw = bytearray(path.read_bytes())
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 255
        path.write_bytes(bytes(raw))
        with pytest.raises(BadEntry):
            self.tier.read_small(victim)
        self.tier.drop_damaged(victim, "test")
        del self.wanted[victim]

    @rule()
    def restart(self):
        self.tier.close()
        self.tier = opened(self.folder, files=self.files)
        # Where the last fsync failed and removing did too, a whole state may be there after all.
        for record in self.tier.records():
            if record.key not in self.wanted:
                assert record.key in self.left_over
                self.wanted[record.key] = (1030, {"seed": int(record.key, 16)})
        self.left_over.clear()

    @invariant()
    def all_there(self):
        if not hasattr(self, "tier"):
            return
        self.tier.check()
        assert {r.key for r in self.tier.records()} == self.wanted.keys()
        for name, (tokens, facts) in self.wanted.items():
            assert_reads(self.tier, name, tokens, **facts)
        runs = (self.folder / FOLDER / "runs").glob("*.run")
        entries = (self.folder / FOLDER / "entries").glob("*.entry")
        assert {p.stem for p in entries} >= self.wanted.keys()
        assert sum(1 for _ in runs) >= len(self.tier._run_users)

    def teardown(self):
        import shutil

        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.folder)


Tier.TestCase.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
TestTier = Tier.TestCase


def test_survey_names_what_is_wrong(tmp_path):
    with pytest.raises(CacheUnusable, match="no cache"):
        survey(tmp_path)
    tier = opened(tmp_path)
    put(tier, key(1))
    (item,) = survey(tmp_path)
    assert (item.entry.head.tokens, item.problem) == (100, None)
    (tmp_path / FOLDER / "entries" / f"{key(2)}.entry").write_bytes(b"junk")
    assert {item.problem for item in survey(tmp_path)} == {None, "shorter than a head"}
    tier.close()
