"""`RamTier`: snapshots in memory and what they take; a page that several share counts once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from civetta.state.pages import PagePool
    from civetta.state.snapshot import Snapshot


class RamTier:
    """Owns one snapshot an entry. Used by the step thread alone."""

    def __init__(self, pool: PagePool, *, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._pool = pool
        self._snapshots: dict[int, Snapshot] = {}
        self._holders = np.zeros(pool.pages, dtype=np.int32)  # snapshots that hold a page
        self._pages = 0
        self._small_bytes = 0

    def __contains__(self, entry: int) -> bool:
        return entry in self._snapshots

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    def nbytes(self) -> int:
        """Bytes held: small states, and each page once."""
        return self._small_bytes + self._pages * self._pool.page_bytes

    def entries(self) -> list[int]:
        """Entries with a snapshot."""
        return list(self._snapshots)

    def get(self, entry: int) -> Snapshot:
        """The snapshot of an entry; still owned by the tier."""
        return self._snapshots[entry]

    def put(self, entry: int, snapshot: Snapshot) -> None:
        """Take over a snapshot."""
        assert entry not in self._snapshots, "an entry has one snapshot"
        self._snapshots[entry] = snapshot
        self._count(snapshot, 1)

    def drop(self, entry: int) -> None:
        """Close an entry's snapshot."""
        snapshot = self._snapshots.pop(entry)
        self._count(snapshot, -1)
        snapshot.close()

    def freed_bytes(self, entry: int) -> int:
        """What dropping this entry alone takes off `nbytes`."""
        snapshot = self._snapshots[entry]
        alone = int((self._holders[list(snapshot.pages)] == 1).sum())
        return snapshot.small.nbytes + alone * self._pool.page_bytes

    def all_bytes(self, entry: int) -> int:
        """What an entry would take if it were the only one."""
        snapshot = self._snapshots[entry]
        return snapshot.small.nbytes + len(snapshot.pages) * self._pool.page_bytes

    def check(self) -> None:
        """Prove that the books balance."""
        holders = np.zeros_like(self._holders)
        for snapshot in self._snapshots.values():
            assert not snapshot.closed, "holds a closed snapshot"
            snapshot.check()
            holders[list(snapshot.pages)] += 1
        assert (holders == self._holders).all(), "page holders do not add up"
        assert int((holders > 0).sum()) == self._pages, "pages do not add up"
        assert self._small_bytes == sum(s.small.nbytes for s in self._snapshots.values())

    def _count(self, snapshot: Snapshot, sign: int) -> None:
        pages = list(snapshot.pages)  # each once
        before = int((self._holders[pages] > 0).sum())
        self._holders[pages] += sign
        self._pages += int((self._holders[pages] > 0).sum()) - before
        self._small_bytes += sign * snapshot.small.nbytes
