"""`DiskTier`: states in a folder; they survive a restart, and kill -9 at any instruction.

    FOLDER/civetta-cache/LOCK              one process at a time
    FOLDER/civetta-cache/entries/*.entry   a state each (disk_format.py), named by its key
    FOLDER/civetta-cache/runs/*.run        pages, named by the digest of their bytes
    FOLDER/civetta-cache/tmp/              files that are being written

Runs are durable before the entry that needs them appears, and go after the last such entry went:
whatever a crash leaves is complete entries, perhaps runs that nobody needs and files in tmp/, and
the next start removes the last two. Every byte is checked when it is read; what does not pass goes
away with a line in the log. Entries of another model are not used, and are the first to go.

The lock of the tables is never held during reads and writes. Whoever changes files holds another,
for as long as that takes: `publish`, `remove` and `drop_damaged` are not for the step thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from civetta.cache.disk_files import Files
from civetta.cache.disk_folder import Layout, Record, claim, scan, tidy, try_remove
from civetta.cache.disk_format import (
    IDS,
    BadEntry,
    EntryHead,
    Run,
    decode_head,
    decode_ids,
    decode_small,
    digest_of,
    encode_entry,
)
from civetta.errors import CacheUnusable
from civetta.log import log_event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from civetta.cache.protocol import ImageMark
    from civetta.state.snapshot import SmallState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSource:
    """Consecutive pages to write. `known` names contents that `read` would give, or is None."""

    known: bytes | None
    pages: int
    read: Callable[[], bytes]


class NoRoom(Exception):
    """A state does not fit the budget even without all that may go."""


class DiskTier:
    """The folder's tables. `model` is the fingerprint, hexadecimal: other models' entries stay."""

    def __init__(
        self, folder: Path, *, budget_bytes: int, model: str, files: Files | None = None
    ) -> None:
        """Open the folder, made where it is missing. Raises CacheUnusable."""
        self.budget_bytes, self.model = budget_bytes, model
        self._files = files or Files()
        self._layout = Layout.of(folder)
        self._lock = threading.Lock()
        self._changing = threading.RLock()
        self._records: dict[str, Record] = {}
        self._run_bytes: dict[str, int] = {}
        self._run_users: Counter[str] = Counter()
        self._known: dict[bytes, Run] = {}  # contents by the key of what they follow from
        self._pins: Counter[str] = Counter()
        self._gone: list[str] = []
        self._serial = 0
        try:
            self._layout.make()
            for part in (folder, self._layout.root):
                self._files.sync_folder(part)
            self._handle = claim(self._layout.lock)
        except OSError as error:
            raise CacheUnusable(
                f"The cache folder {folder} cannot be used: {error.strerror}; name another with"
                " --cache-disk."
            ) from error
        try:
            self._scan()
        except OSError as error:
            os.close(self._handle)
            raise CacheUnusable(
                f"The cache folder {folder} cannot be read: {error.strerror}; name another with"
                " --cache-disk."
            ) from error

    def _scan(self) -> None:
        for record in scan(self._files, self._layout):
            self._records[record.key] = record
            for run in record.entry.head.runs:
                self._run_users[run.digest] += 1
                self._run_bytes[run.digest] = run.nbytes
        tidy(self._files, self._layout, self._run_users)

    # ---- any thread ----------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all entries and runs."""
        with self._lock:
            files = sum(record.file_bytes for record in self._records.values())
            return files + sum(self._run_bytes.values())

    def records(self, *, own: bool = True) -> list[Record]:
        """Entries of this model, or with own False of all."""
        with self._lock:
            found = list(self._records.values())
        return [r for r in found if not own or r.entry.head.model == self.model]

    def take_gone(self) -> list[str]:
        """Entries that were removed since the last call."""
        with self._lock:
            gone, self._gone = self._gone, []
            return gone

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._records

    def freed_bytes(self, key: str) -> int:
        """What removing this entry alone would free; 0 for one that is gone."""
        with self._lock:
            record = self._records.get(key)
            if record is None:
                return 0
            alone = (run for run in record.entry.head.runs if self._run_users[run.digest] == 1)
            return record.file_bytes + sum(run.nbytes for run in alone)

    def ids(self, record: Record) -> NDArray[np.int32]:
        """Token ids of an entry, read from its file. Raises OSError or BadEntry."""
        blob = record.entry.head.blobs[0]
        assert blob.name == IDS, "a head that was not checked"
        path = self._layout.entry(record.key)
        return decode_ids(blob, self._files.read(path, record.entry.body_start, blob.nbytes))

    def learn(self, known: bytes, run: Run) -> None:
        """Tell that a run has the contents that `known` names, so that it need not be read."""
        with self._lock:
            if run.digest in self._run_users:
                self._known[known] = run

    def pin(self, key: str) -> bool:
        """Keep an entry from being removed to make room; False when it is gone."""
        with self._lock:
            if key not in self._records:
                return False
            self._pins[key] += 1
            return True

    def unpin(self, key: str) -> None:
        """Undo one `pin`."""
        with self._lock:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def read_small(self, key: str) -> tuple[EntryHead, SmallState]:
        """The checked small state of an entry. Raises OSError or BadEntry."""
        data = self._files.read(self._layout.entry(key))
        entry = decode_head(data)
        self._files.touch(self._layout.entry(key))
        return entry, decode_small(entry, data[entry.body_start :])

    def read_run(self, run: Run) -> bytes:
        """The checked bytes of a run. Raises OSError or BadEntry."""
        data = self._files.read(self._layout.run(run.digest))
        if digest_of(data) != run.digest:
            raise BadEntry("the checksum of its pages does not match")
        return data

    def close(self) -> None:
        """Let another process have the folder."""
        os.close(self._handle)

    # ---- threads that may wait for the disk ----------------------------------------------------

    def publish(
        self,
        key: str,
        small: SmallState,
        sources: Sequence[RunSource],
        images: Sequence[ImageMark] = (),
        *,
        page_tokens: int,
        page_bytes: int,
        victims: Sequence[str] = (),
    ) -> None:
        """Write a state; of `victims`, in their order, as many go as make room for it.

        Raises OSError or NoRoom, with nothing published.
        """
        with self._changing:
            if key not in self:
                candidates = iter(self._victims(key, victims))
                self._publish(key, small, sources, images, page_tokens, page_bytes, candidates)

    def _publish(
        self,
        key: str,
        small: SmallState,
        sources: Sequence[RunSource],
        images: Sequence[ImageMark],
        page_tokens: int,
        page_bytes: int,
        candidates: Iterator[str],
    ) -> None:
        runs: list[Run] = []
        try:
            for source in sources:
                runs.append(self._put_run(source, candidates))
            self._files.sync_folder(self._layout.runs)
            chunks = encode_entry(
                small,
                runs,
                model=self.model,
                images=images,
                page_tokens=page_tokens,
                page_bytes=page_bytes,
            )
            size = sum(len(chunk) for chunk in chunks)
            self._make_room(size, candidates)
            self._write(self._layout.entry(key), chunks)
            self._files.sync_folder(self._layout.entries)
        except BaseException:
            try_remove(self._files, self._layout.entry(key))
            self._release(runs)
            raise
        entry = decode_head(b"".join(bytes(chunk) for chunk in chunks[:2]))
        with self._lock:
            self._records[key] = Record(key=key, entry=entry, file_bytes=size, used_s=time.time())

    def remove(self, key: str) -> None:
        """Remove an entry, and the runs that nobody else needs; a bad disk is only logged."""
        with self._changing:
            with self._lock:
                record = self._records.pop(key, None)
                if record is not None:
                    self._gone.append(key)
            if record is not None:
                try_remove(self._files, self._layout.entry(key))
                self._release(record.entry.head.runs)

    def drop_damaged(self, key: str, why: object) -> None:
        """Remove an entry that could not be read, with a line in the log."""
        log_event(_log, logging.WARNING, "cache_entry_dropped", entry=key[:16], reason=str(why))
        with self._changing:
            with self._lock:
                record = self._records.get(key)
            if record is not None:
                self._forget_damaged_runs(record)
            self.remove(key)

    # ---- inside --------------------------------------------------------------------------------

    def _put_run(self, source: RunSource, candidates: Iterator[str]) -> Run:
        """Have a run on disk, written where it is not there yet; it counts as used once more."""
        with self._lock:
            run = None if source.known is None else self._known.get(source.known)
            if run is not None:
                self._run_users[run.digest] += 1
                return run
        data = source.read()
        run = Run(digest=digest_of(data), pages=source.pages, nbytes=len(data))
        with self._lock:
            present = run.digest in self._run_users
        if not present:
            self._make_room(run.nbytes, candidates)
            self._write(self._layout.run(run.digest), [data])
        with self._lock:
            self._run_users[run.digest] += 1
            self._run_bytes[run.digest] = run.nbytes
            if source.known is not None:
                self._known[source.known] = run
        return run

    def _write(self, path: Path, chunks: Sequence[bytes | memoryview]) -> None:
        self._serial += 1
        temporary = self._layout.tmp / f"{self._serial}.tmp"
        try:
            self._files.write(temporary, chunks)
            self._files.rename(temporary, path)
        except BaseException:
            try_remove(self._files, temporary)
            raise

    def _victims(self, key: str, victims: Sequence[str]) -> list[str]:
        """Other models' entries, longest unused first, then those that the caller names."""
        with self._lock:
            foreign = [r for r in self._records.values() if r.entry.head.model != self.model]
        foreign.sort(key=lambda record: record.used_s)
        return [k for k in (*(r.key for r in foreign), *victims) if k != key]

    def _make_room(self, nbytes: int, candidates: Iterator[str]) -> None:
        while self.nbytes + nbytes > self.budget_bytes:
            key = next(candidates, None)
            if key is None:
                raise NoRoom
            with self._lock:
                pinned = key in self._pins
            if not pinned:
                self.remove(key)

    def _release(self, runs: Iterable[Run]) -> None:
        unused = []
        with self._lock:
            for run in runs:
                self._run_users[run.digest] -= 1
                if not self._run_users[run.digest]:
                    del self._run_users[run.digest]
                    del self._run_bytes[run.digest]
                    unused.append(run.digest)
            if unused:
                gone = set(unused)
                self._known = {k: r for k, r in self._known.items() if r.digest not in gone}
        for digest in unused:
            try_remove(self._files, self._layout.run(digest))

    def _forget_damaged_runs(self, record: Record) -> None:
        """Drop the other entries that share a run which cannot be read, and the run with them."""
        for run in record.entry.head.runs:
            try:
                self.read_run(run)
            except (OSError, BadEntry):
                with self._lock:
                    sharing = [r.key for r in self._records.values() if run in r.entry.head.runs]
                for key in sharing:
                    self.remove(key)

    def check(self) -> None:
        """Prove that the books balance; waits for a write that is under way."""
        with self._changing, self._lock:
            users: Counter[str] = Counter()
            for record in self._records.values():
                users.update(run.digest for run in record.entry.head.runs)
            assert users == self._run_users, "users of runs do not add up"
            assert users.keys() == self._run_bytes.keys(), "sizes of runs do not add up"
            assert all(run.digest in users for run in self._known.values()), "knows a lost run"
