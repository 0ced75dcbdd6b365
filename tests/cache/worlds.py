"""A model small enough for thousands of states, and what a cold session of it says."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import torch

from civetta.cache.behind import WriteBehind
from civetta.cache.continuation import Continuation
from civetta.cache.disk import DiskTier
from civetta.cache.policy import KeepPolicy
from civetta.cache.protocol import KeepKind
from civetta.model.trunk import state_shape
from civetta.state.session import SessionStore

if TYPE_CHECKING:
    from civetta.model.trunk import Trunk

MODEL = "ab" * 32
CONTEXT = 1024
SMALL_STEPS = KeepPolicy(min_gap_tokens=24, grid_tokens=128, learn_tokens=8)


class Clock:
    """Time that moves when told."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class World:
    """A trunk with a cache, used as the step loop uses it."""

    def __init__(self, trunk: Trunk, *, folder=None, files=None, sessions=4, spare=400, **options):
        self.trunk = trunk
        self.clock = Clock()
        self.store = SessionStore(
            state_shape(trunk.config, has_head=trunk.head is not None),
            sessions=sessions,
            context_tokens=CONTEXT,
            dtype=trunk.dtype,
            spare_pages=spare,
        )
        behind = None
        if folder is not None:
            budget = options.pop("disk_bytes", 1 << 30)
            disk = DiskTier(folder, budget_bytes=budget, model=MODEL, files=files)
            behind = WriteBehind(disk, queue_limit=options.pop("queue_limit", 64))
        self.behind = behind
        self.cache = Continuation(
            self.store.pool,
            ram_budget_bytes=options.pop("ram_bytes", 1 << 28),
            behind=behind,
            clock=self.clock,
            **options,
        )

    def prefill(self, prompt, *, images=()):
        """Restore, prefill, keep: the session, its last row of logits, the restore point."""
        point = self.cache.find(prompt, images)
        session = self.store.open()
        restore = self.cache.begin(point, session)
        while not restore.advance():
            restore.wait(10)
        assert session.position == restore.tokens <= point.cached_tokens < len(prompt)
        logits = None
        for stop in point.keep_at:
            if stop > session.position:
                logits = self.trunk.forward(session, prompt[session.position : stop], "last")
            self.cache.keep(session, KeepKind.PROMPT, images)
        return session, logits, point

    def turn(self, prompt, reply, *, images=()):
        """A whole request; logits of the prompt's end and of every reply token, the point."""
        session, first, point = self.prefill(prompt, images=images)
        rows = [first]
        rows += [self.trunk.forward(session, [token], "last") for token in reply]
        self.cache.keep(session, KeepKind.REPLY, images)
        session.close()
        self.cache.check()
        return torch.cat(rows), point

    def settle(self):
        """Wait until everything that was offered is on disk."""
        until_s = time.monotonic() + 30
        while self.behind.waiting:
            assert time.monotonic() < until_s, "the writer does not get on"
            time.sleep(0.001)
            self.behind.collect()

    def close(self, **how):
        self.cache.close(**how)
        self.store.pool.check()
        assert self.store.pool.free_pages == self.store.pool.pages


def cold(trunk, prompt, reply):
    """The same from a session that has never seen a cache, in one launch."""
    session = trunk.store(sessions=1, context_tokens=CONTEXT).open()
    rows = trunk.forward(session, [*prompt, *reply], "all")
    session.close()
    return rows[len(prompt) - 1 :]


def random_ids(count, seed):
    chosen = random.Random(seed)
    return [chosen.randrange(255) for _ in range(count)]


def finish(restore):
    while not restore.advance():
        restore.wait(10)


def assert_turn(world, prompt, reply, **how):
    rows, point = world.turn(prompt, reply, **how)
    assert torch.equal(rows, cold(world.trunk, prompt, reply))
    return point
