"""The plainest continuation cache over real sessions: keeps whole snapshots, finds by comparison."""

from __future__ import annotations

from civetta.cache.off import NoRestore
from civetta.cache.protocol import CacheStats, MissReason, RestorePoint, Tier


class SnapshotRestore:
    def __init__(self, session, snapshot):
        self.session, self.snapshot = session, snapshot
        self.tokens, self.miss = 0, None

    def advance(self):
        self.session.restore(self.snapshot)
        self.tokens = self.session.position
        return True

    def cancel(self):
        pass


class SnapshotCache:
    """At most `most` snapshots, the oldest go first; asks for states at `every` tokens and the end."""

    def __init__(self, *, most=60, every=100):
        self.most, self.every = most, every
        self.held = {}  # tokens: snapshot
        self.hits = self.misses = 0

    def find(self, tokens, images=()):
        ids = tuple(tokens)
        fits = [key for key in self.held if len(key) < len(ids) and ids[: len(key)] == key]
        depth = max(map(len, fits), default=0)
        wanted = {*range(self.every, len(ids), self.every), len(ids) - 1, len(ids)}
        self.hits, self.misses = self.hits + bool(depth), self.misses + (not depth)
        self.asked = ids
        return RestorePoint(
            cached_tokens=depth,
            tier=Tier.RAM if depth else Tier.NONE,
            keep_at=tuple(sorted(at for at in wanted if at > depth)),
            miss=None if depth else MissReason.COLD,
        )

    def begin(self, point, session):
        if point.tier is Tier.NONE:
            return NoRestore()
        return SnapshotRestore(session, self.held[self.asked[: point.cached_tokens]])

    def keep(self, session, kind, images=()):
        key = tuple(session.ids)
        if key not in self.held:
            self.held[key] = session.snapshot()
            while len(self.held) > self.most:
                self.held.pop(next(iter(self.held))).close()
        return True

    def make_room(self, pages):
        if not self.held:
            return False
        self.held.pop(next(iter(self.held))).close()
        return True

    def stats(self):
        return CacheStats(entries_ram=len(self.held))

    def check(self):
        for key, snapshot in self.held.items():
            assert snapshot.position == len(key)
            assert not snapshot.closed

    def close(self, *, drain_s=0.0):
        while self.held:
            self.held.popitem()[1].close()
