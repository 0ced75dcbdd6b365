"""`Continuation`: the cache itself; which states there are, and the tiers that hold them.

One entry is one prefix: its snapshot is in RAM, its bytes are on disk, or both, or they are just
being written. The index says which entries help with a prompt, policy.py which are worth having.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from civetta.cache.activity import Activity
from civetta.cache.books import Totals
from civetta.cache.index import RadixIndex
from civetta.cache.keys import seen_images, symbols
from civetta.cache.misses import miss_of
from civetta.cache.off import NoRestore
from civetta.cache.policy import KeepPolicy, Kept, eviction_order, keep_points
from civetta.cache.protocol import CacheStats, MissReason, RestorePoint, Tier
from civetta.cache.ram import RamTier
from civetta.cache.restore import DiskRestore, RamRestore
from civetta.kernels.ops import PAGE_TOKENS
from civetta.log import log_event
from civetta.state.recurrent import REWIND_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from civetta.cache.behind import WriteBehind
    from civetta.cache.index import Match
    from civetta.cache.protocol import ImageMark, KeepKind, Restore
    from civetta.state.pages import PagePool
    from civetta.state.session import Session
    from civetta.state.snapshot import Snapshot

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Entry:
    """One kept prefix. `key` names it on disk; `used_s` by the cache's clock.

    `left`: its conversation stayed away while others came back in vain.
    """

    number: int
    depth: int
    images: tuple[ImageMark, ...]
    rewindable: int
    used_s: float
    hits: int = 0
    left: bool = False
    key: str = ""
    on_disk: bool = False
    writing: bool = False


class Continuation:
    """A `ContinuationCache` over RAM, and disk where `behind` is given. For the step thread."""

    def __init__(
        self,
        pool: PagePool,
        *,
        ram_budget_bytes: int,
        boundary_ids: Collection[int] = (),
        policy: KeepPolicy | None = None,
        behind: WriteBehind | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._clock = pool, clock
        self._policy = policy or KeepPolicy()
        self._boundary_ids = np.array(sorted(boundary_ids), dtype=np.int64)
        self._ram = RamTier(pool, budget_bytes=ram_budget_bytes)
        self._index = RadixIndex(reach=REWIND_ROWS)
        self._entries: dict[int, Entry] = {}
        self._next = 0
        self._totals = Totals()
        self._activity = Activity(self._policy)
        self._restores: set[DiskRestore] = set()
        self._behind = behind
        if behind is not None:
            behind.attach(self)

    # ---- lookup --------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int], images: Sequence[ImageMark] = ()) -> RestorePoint:
        """The deepest usable state, and where new ones are wanted; see the protocol."""
        self._collect()
        key = symbols(tokens, images)
        match = self._index.match(key)
        entry, cached = self._best(match, len(key), images)
        miss, miss_token = miss_of(match, cached, len(key), self._policy)
        if miss is MissReason.EVICTED and match.lost_s is not None:
            self._came_back(self._clock() - match.lost_s, tokens=match.common - cached)
        tier = Tier.NONE
        if entry is not None:
            tier = Tier.RAM if entry.number in self._ram else Tier.DISK
        return RestorePoint(
            cached_tokens=cached,
            tier=tier,
            keep_at=keep_points(
                prompt_tokens=len(key),
                cached_tokens=cached,
                boundaries=np.flatnonzero(np.isin(key, self._boundary_ids)).tolist(),
                parting=match.common,
                policy=self._policy,
            ),
            miss=miss,
            miss_token=miss_token,
            entry=None if entry is None else entry.number,
        )

    def _best(
        self, match: Match, prompt_tokens: int, images: Sequence[ImageMark]
    ) -> tuple[Entry | None, int]:
        """The entry that saves most and how many tokens; RAM unless disk saves clearly more."""
        best: tuple[int, Entry | None, int] = (0, None, 0)
        for number, shared in match.reachable:
            entry = self._entries[number]
            usable = min(shared, prompt_tokens - 1)
            in_ram = number in self._ram
            if not (in_ram or entry.on_disk) or entry.depth - usable > entry.rewindable:
                continue
            if seen_images(entry.images, usable) != seen_images(images, usable):
                continue  # different images whose symbols happen to agree
            gain = usable if in_ram else max(usable - self._policy.disk_gain_tokens, 1)
            if usable > 0 and gain > best[0]:
                best = (gain, entry, usable)
        return best[1], best[2]

    def begin(self, point: RestorePoint, session: Session) -> Restore:
        """Start to fill an empty session; see the protocol."""
        entry = None if point.entry is None else self._entries.get(point.entry)
        if entry is not None and entry.number in self._ram:
            session.restore(self._ram.get(entry.number), point.cached_tokens)
            self._used(entry)
            self._totals.hits_ram += 1
            return RamRestore(point.cached_tokens)
        if entry is not None and entry.on_disk and self._behind is not None:
            reading = self._behind.read(
                entry.key,
                session=session,
                tokens=point.cached_tokens,
                make_room=self.make_room,
                ended=lambda restore, snapshot: self._was_read(entry, restore, snapshot),
            )
            if reading is not None:
                self._restores.add(reading)
                return reading
        self._totals.misses += 1
        return NoRestore()

    def _was_read(self, entry: Entry, restore: DiskRestore, snapshot: Snapshot | None) -> None:
        """A restore from disk is over: what it read is in RAM from now on, if there is room."""
        assert self._behind is not None
        self._restores.discard(restore)
        self._behind.unpin(entry.key)
        if snapshot is None:
            self._totals.misses += 1
            self._totals.damaged += restore.miss is MissReason.DAMAGED
            self._collect()
            return
        self._totals.hits_disk += 1
        self._used(entry)
        if entry.number in self._ram or self._entries.get(entry.number) is not entry:
            snapshot.close()
        else:
            self._ram.put(entry.number, snapshot)
            self._fit(entry)

    def _used(self, entry: Entry) -> None:
        if not self._index.lineages(entry.number):
            self._activity.returned(entry.hits, self._clock() - entry.used_s)
        entry.used_s, entry.left = self._clock(), False
        entry.hits += 1

    def _came_back(self, absent_s: float, *, tokens: int) -> None:
        """A conversation came back in vain: others that are away for longer make room for it."""
        needed_bytes = self._pool.page_bytes * -(-tokens // PAGE_TOKENS)
        states = self._kept()
        for number in self._activity.left(states, absent_s=absent_s, needed_bytes=needed_bytes):
            self._entries[number].left = True

    # ---- keeping -------------------------------------------------------------------------------

    def keep(self, session: Session, kind: KeepKind, images: Sequence[ImageMark] = ()) -> bool:
        """Keep the session's state as it is now; see the protocol."""
        self._collect()
        if not session.position:
            return False
        seen = seen_images(images, session.position)
        key = symbols(session.ids, seen)
        there = self._index.at(key)
        entry = None if there is None else self._entries[there]
        if entry is None:
            entry = self._new_entry(key, session.position, seen, session.rewindable)
        entry.used_s = self._clock()
        if entry.number in self._ram:
            return True
        self._ram.put(entry.number, session.snapshot())
        entry.rewindable = min(entry.rewindable, session.rewindable)  # what both copies can do
        kept = self._fit(entry)
        self._totals.kept += kept
        self._totals.refused += not kept
        log_event(
            _log,
            logging.DEBUG,
            "cache_kept" if kept else "cache_refused",
            kind=kind,
            tokens=session.position,
            ram_bytes=self._ram.nbytes,
        )
        if kept and self._behind is not None:
            self._behind.offer(entry)
        return kept

    def _new_entry(
        self, key: NDArray[np.int64], depth: int, images: tuple[ImageMark, ...], rewindable: int
    ) -> Entry:
        entry = Entry(
            number=self._next,
            depth=depth,
            images=images,
            rewindable=rewindable,
            used_s=self._clock(),
        )
        self._next += 1
        self._index.insert(key, entry.number)
        self._entries[entry.number] = entry
        parent = self._index.parent_entry(entry.number)
        if parent is not None and self._index.lineages(parent) == 1:
            entry.hits = self._entries[parent].hits  # the same conversation, further on
        return entry

    # ---- room ----------------------------------------------------------------------------------

    def make_room(self, pages: int) -> bool:
        """Give states up until `pages` pages are free; see the protocol."""
        self._collect()
        if self._pool.free_pages >= pages:
            return True
        for number in eviction_order(self._kept(), self._policy, forced=True):
            self._drop(number)
            if self._pool.free_pages >= pages:
                return True
        if self._behind is not None:
            self._behind.give_up()
            self._collect()
        return self._pool.free_pages >= pages

    def _fit(self, newcomer: Entry) -> bool:
        """Keep the budget; whether the newcomer is still there."""
        alone_bytes = self._ram.all_bytes(newcomer.number)
        while self._ram.nbytes > self._ram.budget_bytes:
            states = self._kept(without=newcomer.number)
            order = eviction_order(states, self._activity.policy(states))
            if not order or alone_bytes > self._ram.budget_bytes:
                self._ram.drop(newcomer.number)
                self._forget_if_nowhere(newcomer)
                return False
            self._drop(order[0])
        return True

    def _kept(self, without: int | None = None) -> list[Kept]:
        now_s = self._clock()
        return [
            Kept(
                entry=number,
                depth=self._entries[number].depth,
                parent_depth=self.parent_depth(number, lambda entry: entry.number in self._ram),
                freed_bytes=self._ram.freed_bytes(number),
                idle_s=now_s - self._entries[number].used_s,
                hits=self._entries[number].hits,
                lineages=self._index.lineages(number),
                elsewhere=self._entries[number].on_disk,
                left=self._entries[number].left,
            )
            for number in self._ram.entries()
            if number != without
        ]

    def parent_depth(self, number: int, counts: Callable[[Entry], bool]) -> int:
        """Tokens of the deepest other entry on the way that counts; 0 without one."""
        parent = self._index.parent_entry(number)
        while parent is not None and not counts(self._entries[parent]):
            parent = self._index.parent_entry(parent)
        return 0 if parent is None else self._entries[parent].depth

    def _drop(self, number: int) -> None:
        entry = self._entries[number]
        if not (self._index.lineages(number) or entry.on_disk):
            self._activity.lost(entry.hits, self._clock() - entry.used_s)
        self._ram.drop(number)
        self._totals.evicted += 1
        self._forget_if_nowhere(entry)

    def _forget_if_nowhere(self, entry: Entry) -> None:
        if not (entry.number in self._ram or entry.on_disk or entry.writing):
            self._index.remove(entry.number, used_s=entry.used_s)
            del self._entries[entry.number]

    # ---- disk ----------------------------------------------------------------------------------

    def found_on_disk(
        self, key: NDArray[np.int64], name: str, images: tuple[ImageMark, ...],
        rewindable: int, idle_s: float,
    ) -> Entry:  # fmt: skip
        """Take an entry over that an earlier process wrote."""
        entry = self._new_entry(key, len(key), images, rewindable)
        entry.key, entry.on_disk = name, True
        entry.used_s -= max(idle_s, 0.0)
        return entry

    def written(self, entry: Entry, *, on_disk: bool) -> None:
        """A write ended, or an entry left the disk."""
        entry.writing, entry.on_disk = False, on_disk
        self._forget_if_nowhere(entry)

    def snapshot_of(self, entry: Entry) -> Snapshot | None:
        """What RAM has of an entry; it stays the cache's."""
        return self._ram.get(entry.number) if entry.number in self._ram else None

    def entries(self) -> list[Entry]:
        """All entries."""
        return list(self._entries.values())

    def lineages(self, entry: Entry) -> int:
        """Ways on from an entry to deeper ones."""
        return self._index.lineages(entry.number)

    def now_s(self) -> float:
        """The clock that entries' `used_s` is by."""
        return self._clock()

    def _collect(self) -> None:
        if self._behind is not None:
            self._behind.collect()

    # ---- books ---------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Counters now."""
        behind = self._behind
        return self._totals.stats(
            entries_ram=len(self._ram),
            ram_bytes=self._ram.nbytes,
            ram_budget_bytes=self._ram.budget_bytes,
            entries_disk=0 if behind is None else behind.entries,
            disk_bytes=0 if behind is None else behind.nbytes,
            disk_budget_bytes=0 if behind is None else behind.budget_bytes,
            disk_queue=0 if behind is None else behind.waiting,
        )

    def check(self) -> None:
        """Prove that the books balance."""
        self._ram.check()
        self._index.check()
        assert len(self._index) == len(self._entries), "index and entries differ"
        for number, entry in self._entries.items():
            assert number in self._index, "an entry is not in the index"
            assert self._index.depth(number) == entry.depth, "an entry has another depth"
            assert number in self._ram or entry.on_disk or entry.writing, "an entry is nowhere"
        assert set(self._ram.entries()) <= self._entries.keys(), "RAM holds what is no entry"
        assert self._ram.nbytes <= self._ram.budget_bytes, "over the budget"
        if self._behind is not None:
            self._behind.check()

    def close(self, *, drain_s: float = 0.0) -> None:
        """Write what is worth it for at most `drain_s` seconds, then let go of everything."""
        for restore in list(self._restores):
            restore.cancel()
            restore.join()
        if self._behind is not None:
            self._behind.close(drain_s=drain_s)
        for number in self._ram.entries():
            self._ram.drop(number)
            self._forget_if_nowhere(self._entries[number])
