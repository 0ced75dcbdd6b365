"""`WriteBehind`: keeps the disk tier in step with what the cache holds in RAM.

It decides what is written and what goes from the disk (by policy.py), hands states to the writer's
thread, and tells the cache what came of it. Used by the step thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from civetta.cache.disk_format import RUN_PAGES, BadEntry
from civetta.cache.keys import page_keys, state_key, symbols
from civetta.cache.policy import KeepPolicy, Kept, eviction_order, wanted_on_disk
from civetta.cache.restore import DiskRestore
from civetta.cache.writer import DiskWriter, WriteJob
from civetta.kernels.ops import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from civetta.cache.continuation import Continuation, Entry
    from civetta.cache.disk import DiskTier
    from civetta.cache.disk_folder import Record
    from civetta.cache.protocol import ImageMark
    from civetta.state.session import Session
    from civetta.state.snapshot import Snapshot


class WriteBehind:
    """Owns the disk tier and its writer."""

    def __init__(
        self,
        disk: DiskTier,
        *,
        policy: KeepPolicy | None = None,
        queue_limit: int = 4,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._disk, self._policy = disk, policy or KeepPolicy()
        self._writer = DiskWriter(disk, limit=queue_limit)
        self._clock = clock
        self._seed = bytes.fromhex(disk.model)
        self._by_key: dict[str, Entry] = {}
        self._offered: dict[int, Entry] = {}  # to be written when the queue has room, in order
        self._cache: Continuation | None = None

    # ---- the start -----------------------------------------------------------------------------

    def attach(self, cache: Continuation) -> None:
        """Serve this cache; it learns of the states that the folder has."""
        self._cache = cache
        for record in self._disk.records():
            try:
                ids_T = self._disk.ids(record)
            except (OSError, BadEntry) as error:
                self._disk.drop_damaged(record.key, error)
                continue
            self._take_over(cache, record, ids_T)
        self._disk.take_gone()

    def _take_over(self, cache: Continuation, record: Record, ids_T: NDArray[np.int32]) -> None:
        head = record.entry.head
        images = head.marks
        if state_key(ids_T, images, self._seed).hex() != record.key:
            self._disk.drop_damaged(record.key, "its name is not the one of its tokens")
            return
        entry = cache.found_on_disk(
            symbols(ids_T, images),
            record.key,
            images,
            head.rewindable,
            self._clock() - record.used_s,
        )
        self._by_key[record.key] = entry
        for name, run in zip(self._known(ids_T, images), head.runs, strict=True):
            if name is not None:
                self._disk.learn(name, run)

    # ---- reading -------------------------------------------------------------------------------

    def read(
        self,
        key: str,
        *,
        session: Session,
        tokens: int,
        make_room: Callable[[int], bool],
        ended: Callable[[DiskRestore, Snapshot | None], None],
    ) -> DiskRestore | None:
        """Start a restore; None when the entry is gone. Its end must `unpin` the key."""
        if not self._disk.pin(key):
            return None
        return DiskRestore(
            self._disk, key, session=session, tokens=tokens, make_room=make_room, ended=ended
        )

    def unpin(self, key: str) -> None:
        """Let an entry go that was being read."""
        self._disk.unpin(key)

    # ---- writing -------------------------------------------------------------------------------

    def offer(self, entry: Entry) -> None:
        """Have a state written when it is worth it."""
        if not (entry.on_disk or entry.writing) and self._is_wanted(entry):
            self._offered[entry.number] = entry
            self._pump()

    def collect(self) -> None:
        """Take notice of what the writer did, and give it more."""
        cache = self._attached
        for job, written in self._writer.finished():
            job.snapshot.close()
            entry = self._by_key.get(job.key)
            if entry is not None:
                if not written:
                    del self._by_key[job.key]
                cache.written(entry, on_disk=written)
        for key in self._disk.take_gone():
            entry = self._by_key.get(key)
            if entry is not None and not entry.writing:
                del self._by_key[key]
                cache.written(entry, on_disk=False)
        self._pump()

    def give_up(self) -> None:
        """Write nothing of what waits: its pages are needed."""
        self._offered.clear()
        self._writer.give_up()

    def _pump(self) -> None:
        while self._offered:
            entry = next(iter(self._offered.values()))
            snapshot = self._attached.snapshot_of(entry)
            if snapshot is not None and not entry.writing and not self._submit(entry, snapshot):
                return
            self._offered.pop(entry.number)

    def _submit(self, entry: Entry, snapshot: Snapshot) -> bool:
        ids_T = snapshot.small.ids_T
        key = state_key(ids_T, entry.images, self._seed).hex()
        job = WriteJob(
            entry=entry.number,
            key=key,
            snapshot=snapshot.share(),
            images=entry.images,
            known=tuple(self._known(ids_T, entry.images)),
            victims=tuple(self._victims()),
        )
        if not self._writer.submit(job):
            job.snapshot.close()
            return False
        entry.key, entry.writing = key, True
        self._by_key[key] = entry
        return True

    def _known(self, ids_T: NDArray[np.int32], images: tuple[ImageMark, ...]) -> list[bytes | None]:
        """By run: what names its contents, where they are full and no later token changes them."""
        keys = page_keys(ids_T, images, PAGE_TOKENS, self._seed)
        pages = -(-len(ids_T) // PAGE_TOKENS)
        ends = [min(start + RUN_PAGES, pages) for start in range(0, pages, RUN_PAGES)]
        return [
            keys[end - 1] if end % RUN_PAGES == 0 and end * PAGE_TOKENS < len(ids_T) else None
            for end in ends
        ]

    def _is_wanted(self, entry: Entry) -> bool:
        snapshot = self._attached.snapshot_of(entry)
        if snapshot is None:
            return False
        depth = self._attached.parent_depth(
            entry.number, lambda other: other.on_disk or other.writing
        )
        return wanted_on_disk(
            depth=entry.depth,
            parent_depth=depth or None,
            token_bytes=snapshot.pool.page_bytes // PAGE_TOKENS,
            state_bytes=snapshot.small.nbytes,
            policy=self._policy,
        )

    def _victims(self) -> list[str]:
        """Entries of this model that may go from the disk, the least valuable first."""
        cache, now_s = self._attached, self._attached.now_s()
        by_number = {entry.number: entry for entry in self._by_key.values() if entry.on_disk}
        kept = [
            Kept(
                entry=entry.number,
                depth=entry.depth,
                parent_depth=cache.parent_depth(entry.number, lambda other: other.on_disk),
                freed_bytes=self._disk.freed_bytes(entry.key),
                idle_s=now_s - entry.used_s,
                hits=entry.hits,
                lineages=cache.lineages(entry),
                elsewhere=cache.snapshot_of(entry) is not None,
            )
            for entry in by_number.values()
        ]
        # Forced: what is on disk only is the older part, and a newer state must find room.
        return [by_number[n].key for n in eviction_order(kept, self._policy, forced=True)]

    # ---- the end, and the books ----------------------------------------------------------------

    def close(self, *, drain_s: float) -> None:
        """Write the ends of conversations that are in RAM only, while time is left; then stop."""
        until_s = time.monotonic() + drain_s
        if drain_s > 0:
            for entry in self._attached.entries():
                if not (entry.on_disk or entry.writing or self._attached.lineages(entry)):
                    self._offered[entry.number] = entry
        while drain_s > 0 and self._writer.wait(until_s):
            self.collect()
            if not self._writer.waiting:
                break
        self._offered.clear()
        self._writer.close()
        self.collect()
        self._disk.close()

    @property
    def entries(self) -> int:
        """Entries of this model on disk."""
        return len(self._disk.records())

    @property
    def nbytes(self) -> int:
        """Bytes on disk, other models' too."""
        return self._disk.nbytes

    @property
    def budget_bytes(self) -> int:
        """Bytes that may be on disk."""
        return self._disk.budget_bytes

    @property
    def waiting(self) -> int:
        """States offered, queued, or being written."""
        return len(self._offered) + self._writer.waiting

    def check(self) -> None:
        """Prove that the books balance."""
        self._disk.check()
        for key, entry in self._by_key.items():
            assert entry.key == key, "an entry under another key"
            assert entry.on_disk or entry.writing, "an entry that is not on disk"

    @property
    def _attached(self) -> Continuation:
        assert self._cache is not None, "attach comes first"
        return self._cache
