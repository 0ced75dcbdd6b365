"""Edits, rewinds, forks, branches, restarts, evictions in any order; replies equal cold ones."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache.worlds import SMALL_STEPS, World, assert_turn, random_ids

BOUNDARY = 255


class Conversations(RuleBasedStateMachine):
    """Edits, rewinds, forks, branches, restarts, evictions; each reply against a cold session."""

    trunk = None
    tmp = None

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=self.tmp))
        self.world = self.opened()
        self.talks = [random_ids(100, 1)]

    def opened(self):
        return World(
            self.trunk, folder=self.folder, policy=SMALL_STEPS, boundary_ids=(BOUNDARY,),
            ram_bytes=1_500_000, disk_bytes=4_000_000,
        )  # fmt: skip

    def say(self, prompt, reply):
        assert_turn(self.world, prompt, reply)
        self.world.clock.now_s += 30
        talk = [*prompt, *reply]
        if talk not in self.talks:
            self.talks = [*self.talks[-4:], talk]

    @rule(data=st.data(), more=st.integers(1, 70), seed=st.integers(0, 3))
    def go_on(self, data, more, seed):
        talk = data.draw(st.sampled_from(self.talks))
        prompt = [*talk, BOUNDARY, *random_ids(more, seed)]
        if len(prompt) < 500:
            self.say(prompt, random_ids(4, seed + 10))

    @rule(data=st.data(), seed=st.integers(0, 9))
    def branch_or_rewind(self, data, seed):
        talk = data.draw(st.sampled_from(self.talks))
        cut = data.draw(st.integers(1, len(talk)))
        self.say([*talk[:cut], *random_ids(10, seed)], [seed])

    @rule(data=st.data())
    def edit(self, data):
        talk = list(data.draw(st.sampled_from(self.talks)))
        at = data.draw(st.integers(0, len(talk) - 1))
        talk[at] = (talk[at] + 1) % 255
        self.say(talk, [3])

    @rule(data=st.data())
    def repeat(self, data):
        talk = data.draw(st.sampled_from(self.talks))
        self.say(talk, [1, 2])
        assert self.world.cache.find(talk).cached_tokens in (len(talk) - 1, 0)

    @rule()
    def restart(self):
        self.world.settle()
        self.world.close(drain_s=10)
        self.world = self.opened()

    @rule(pages=st.integers(1, 40))
    def shortage(self, pages):
        pool = self.world.store.pool
        self.world.cache.make_room(min(pool.free_pages + pages, pool.pages))

    @precondition(lambda self: self.talks)
    @rule(seconds=st.integers(1, 4000))
    def wait(self, seconds):
        self.world.clock.now_s += seconds

    @invariant()
    def balanced(self):
        self.world.cache.check()
        self.world.store.pool.check()

    def teardown(self):
        self.world.close()


def test_random_conversations(tiny_trunk, tmp_path):
    machine = type("Here", (Conversations,), {"trunk": tiny_trunk, "tmp": tmp_path})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=8, stateful_step_count=12, deadline=None)
    )
