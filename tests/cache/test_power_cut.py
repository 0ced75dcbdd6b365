"""A power cut after any step of a write, simulated: what the disk had promised is all that is left.

`Recorder` notes every system call of `Files`. `Disk` replays the first k of them on a disk that
keeps its promises and not one bit more: bytes are there once their file was synced, names once their
folder was; of everything else any part may be there, each on its own, with zeros or nothing in
unsynced bytes. Whatever is left must open, hold every state whose `publish` had returned, and
offer no state that does not pass its checksums.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cache.disk_states import assert_reads, key, opened, put
from civetta.cache import disk_files
from civetta.cache.disk_files import Files


class Recorder(Files):
    """Real files, and a log of what was asked of the system; also stands in for module os there."""

    def __init__(self):
        self.log, self.real, self.names = [], disk_files.os, {}

    def __getattr__(self, name):
        return getattr(self.real, name)

    def open(self, path, flags, mode=0o777):
        handle = self.real.open(path, flags, mode)
        self.names[handle] = Path(path)
        if flags & self.real.O_CREAT:
            self.log.append(("create", Path(path)))
        return handle

    def write_call(self, handle, view):
        written = self.real.write(handle, view)
        self.log.append(("data", self.names[handle], bytes(view[:written])))
        return written

    def fsync(self, handle):
        self.real.fsync(handle)
        self.log.append(("sync", self.names[handle]))

    def rename(self, source, target):
        super().rename(source, target)
        self.log.append(("rename", source, target))

    def remove(self, path):
        there = path.exists()
        super().remove(path)
        if there:
            self.log.append(("remove", path))


class SystemCalls:
    """Module os for disk_files, with the recorder's own `write` beside `Files.write`."""

    def __init__(self, recorder):
        self.recorder, self.write = recorder, recorder.write_call

    def __getattr__(self, name):
        return getattr(self.recorder, name)


class Disk:
    """A disk after the first calls of a log."""

    def __init__(self, calls):
        self.files = []  # [bytes now, bytes promised]
        self.now, self.promised = {}, {}  # path: place in files
        self.pending = {}  # folder: changes of names since it was synced
        for call in calls:
            getattr(self, call[0])(*call[1:])

    def skip(self):
        pass

    def create(self, path):
        self.files.append([b"", b""])
        self._name(path, len(self.files) - 1)

    def data(self, path, more):
        self.files[self.now[path]][0] += more

    def sync(self, path):
        if path in self.now:
            file = self.files[self.now[path]]
            file[1] = file[0]
            return
        for name, file in self.pending.pop(path, []):
            self._settle(self.promised, name, file)

    def rename(self, source, target):
        file = self.now[source]
        self._name(target, file)
        self._name(source, None)

    def remove(self, path):
        self._name(path, None)

    def _name(self, path, file):
        self._settle(self.now, path, file)
        self.pending.setdefault(path.parent, []).append((path, file))

    @staticmethod
    def _settle(names, path, file):
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file

    def cut(self, chance, target, root):
        """Make `target` what is left of `root`; `chance(what)` says whether something made it."""
        names = dict(self.promised)
        for changes in self.pending.values():
            for name, file in changes:
                if chance("name"):
                    self._settle(names, name, file)
        for name, file in names.items():
            now, promised = self.files[file]
            kept = promised
            if now != promised:
                more = len(now) - len(promised)
                kept = now if chance("bytes") else promised + bytes(more if chance("size") else 0)
            path = target / name.relative_to(root)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(kept)


class Unsynced(Files):
    """Folders that need not last."""

    def sync_folder(self, folder):
        pass


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """States that share pages come and go, one replaced by its like, one for want of room.

    The log, and (calls so far, what has to be there from then on until it is taken away).
    """
    recorder, root = Recorder(), tmp_path / "real"
    monkeypatch.setattr(disk_files, "os", SystemCalls(recorder))
    tier, marks = opened(root, files=recorder), []

    def mark(**there):
        marks.append((len(recorder.log), there))

    wanted = {}
    for n, tokens, salt in ((1, 1030, b""), (2, 1100, b""), (3, 70, b"x"), (4, 2100, b"")):
        put(tier, key(n), tokens, seed=n, salt=salt)
        wanted[key(n)] = (tokens, n, salt)
        mark(**wanted)
    for n in (2, 3):
        tokens, seed, salt = wanted.pop(key(n))
        mark(**wanted)
        tier.remove(key(n))
        put(tier, key(n), tokens, seed=seed, salt=salt)
        wanted[key(n)] = (tokens, seed, salt)
        mark(**wanted)
    tier.budget_bytes = tier.nbytes
    gone = wanted.pop(key(1))
    assert gone
    mark(**wanted)
    put(tier, key(5), 70, seed=5, salt=b"5", victims=[key(1)])
    wanted[key(5)] = (70, 5, b"5")
    mark(**wanted)
    tier.close()
    monkeypatch.undo()
    return recorder.log, marks, root


CHANCES = ("nothing", "all", "names", "names and sizes", *range(4))


def chance_of(kind, k):
    if isinstance(kind, int):
        rng = random.Random(f"{kind}/{k}")
        return lambda _: rng.random() < 0.5
    made_it = {
        "nothing": (),
        "all": ("name", "bytes", "size"),
        "names": ("name",),
        "names and sizes": ("name", "size"),
    }
    return lambda what: what in made_it[kind]


def losses(recorded, calls, folder):
    """What is wrong after cuts at every place of a log."""
    _, marks, root = recorded
    found = []
    for k in range(len(calls) + 1):
        due = {}
        for at, there in marks:
            due = there if at <= k else due
        for kind in CHANCES:
            left = folder / f"{k}-{kind}"
            left.mkdir(parents=True)
            Disk(calls[:k]).cut(chance_of(kind, k), left, root)
            tier = opened(left, files=Unsynced())
            tier.check()
            records = {record.key for record in tier.records()}
            found += [f"{k} {kind}: lost" for name in due if name not in records]
            for name in records:
                try:
                    entry, small = tier.read_small(name)
                    for run in entry.head.runs:
                        tier.read_run(run)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                    found.append(f"{k} {kind}: {error}")
                else:
                    assert small.ids_T.size
                    if name in due and kind == "nothing":
                        tokens, seed, salt = due[name]
                        assert_reads(tier, name, tokens, seed=seed, salt=salt)
            tier.close()
    return found


@pytest.mark.timeout(240)
def test_a_power_cut_after_any_step_loses_nothing_that_was_published(recorded, tmp_path):
    assert len(recorded[0]) > 60
    assert losses(recorded, recorded[0], tmp_path / "cut") == []


@pytest.mark.timeout(240)
@pytest.mark.parametrize("left_out", ["runs", "entries", ".tmp"])
def test_the_simulation_misses_each_kind_of_sync(recorded, tmp_path, left_out):
    """The log without the syncs of one folder, or of files: marks stay where they were."""
    calls = [
        ("skip",) if call[0] == "sync" and call[1].name.endswith(left_out) else call
        for call in recorded[0]
    ]
    assert calls != recorded[0]
    assert losses(recorded, calls, tmp_path / "cut")
