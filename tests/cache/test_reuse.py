"""How much of what could be reused is: cached tokens against the longest known prefix."""

from __future__ import annotations

import random

import numpy as np

from cache.worlds import World, random_ids
from civetta.cache.keys import common_prefix

BOUNDARY = 255
OPENING = [BOUNDARY, 3, 4]  # an assistant's turn begins
THOUGHT_END = [5, 6]


class Trace:
    """Plays requests against a cache; prefills with a model, replies come from the trace."""

    def __init__(self, trunk, **options):
        self.trunk, self.options = trunk, options
        self.world = self.opened()
        self.seen = []
        self.cached = self.ideal = 0

    def opened(self):
        return World(self.trunk, boundary_ids=(BOUNDARY,), **self.options)

    def ask(self, prompt, reply, *, pause_s=5.0):
        _, point = self.world.turn(prompt, reply)
        best = max((common_prefix(prompt, other) for other in self.seen), default=0)
        self.cached += point.cached_tokens
        self.ideal += min(best, len(prompt) - 1)
        self.seen.append([*prompt, *reply])
        self.world.clock.now_s += pause_s
        return [*prompt, *reply]

    def restart(self, *, drain_s):
        self.world.close(drain_s=drain_s)
        self.world = self.opened()

    @property
    def ratio(self):
        return self.cached / self.ideal


def message(count, seed):
    return [BOUNDARY, 1, *random_ids(count, seed)]


def test_an_agent_of_30_turns(tiny_trunk):
    """Tool cycles whose thoughts are dropped once the user speaks again; some edits and retries."""
    trace = Trace(tiny_trunk)
    history = [BOUNDARY, 2, *random_ids(150, 0)]
    for turn in range(30):
        if turn % 6 == 0:  # the user speaks: thoughts of the last cycle leave the history
            history = [*history, *message(12, turn)]
            plain = list(history)
        prompt = [*history, *OPENING]
        thought, action = random_ids(6, turn + 100), random_ids(8, turn + 200)
        trace.ask(prompt, [*thought, *THOUGHT_END, *action])
        if turn % 11 == 5:
            trace.ask(prompt, random_ids(5, turn + 300))  # the same again, another reply
        result = message(10, turn + 400)
        history = [*prompt, *thought, *THOUGHT_END, *action, *result]
        plain = [*plain, *OPENING, *action, *result]
        if turn % 6 == 5:
            history = plain
    assert trace.ideal > 9_000
    assert trace.ratio >= 0.95, trace.ratio


def test_many_users_with_one_system_prompt(tiny_trunk):
    trace = Trace(tiny_trunk)
    system = [BOUNDARY, 2, *random_ids(200, 0)]
    chosen = random.Random(3)
    talks = [list(system) for _ in range(6)]
    for turn in range(30):
        user = chosen.randrange(6)
        prompt = [*talks[user], *message(25, turn + 50 * user), *OPENING]
        talks[user] = trace.ask(prompt, random_ids(10, turn))
    assert trace.ratio >= 0.9, trace.ratio


def test_restarts_in_between(tiny_trunk, tmp_path):
    """A drained stop, and one in which only what was written behind survives."""
    trace = Trace(tiny_trunk, folder=tmp_path)
    talks = [[BOUNDARY, 2, *random_ids(150, n)] for n in range(3)]
    for turn in range(16):
        for n, talk in enumerate(talks):
            prompt = [*talk, *message(20, turn * 3 + n), *OPENING]
            talks[n] = trace.ask(prompt, random_ids(8, turn))
        if turn % 5 == 2:
            trace.world.settle()
            trace.restart(drain_s=0 if turn == 7 else 30)
    assert np.isfinite(trace.ratio)
    assert trace.ratio >= 0.9, trace.ratio


def test_more_conversations_than_room(tiny_trunk):
    """Round robin over a budget for some of them: those stay, instead of none."""
    probe = Trace(tiny_trunk)
    talk = probe.ask(random_ids(150, 0), [1])
    one_bytes = probe.world.cache.stats().ram_bytes
    assert len(talk) == 151
    trace = Trace(tiny_trunk, ram_bytes=4 * one_bytes)
    talks = [random_ids(150, n) for n in range(8)]
    for _ in range(5):
        talks = [trace.ask([*talk, *OPENING], [7]) for talk in talks]
    assert trace.ratio >= 0.25, trace.ratio


def test_a_user_who_leaves_a_long_conversation_for_a_new_one(tiny_trunk):
    """The old one was reused and counts as active for half an hour: the new one gets its place."""
    probe = Trace(tiny_trunk)
    probe.ask(random_ids(400, 0), [1])
    trace = Trace(tiny_trunk, ram_bytes=int(1.2 * probe.world.cache.stats().ram_bytes))
    old = random_ids(300, 1)
    for turn in range(3):
        old = trace.ask([*old, *message(20, turn)], [1])
    trace.world.clock.now_s += 60
    talk, cached = random_ids(300, 2), []
    for turn in range(6):
        talk = trace.ask([*talk, *message(10, turn)], [1], pause_s=20)
        cached.append(trace.world.cache.stats().hits_ram_total)
    assert cached[-1] - cached[1] >= 3, "the new conversation is never kept"


def test_many_who_never_come_back(tiny_trunk):
    """Visitors with one or two quick turns fill the cache: the next ones are reused all the same."""
    probe = Trace(tiny_trunk)
    probe.ask(random_ids(100, 0), [1])
    trace = Trace(tiny_trunk, ram_bytes=30 * probe.world.cache.stats().ram_bytes)
    for visitor in range(150):
        talk = trace.ask(random_ids(90, visitor), [1], pause_s=1)
        if visitor % 2:
            trace.ask([*talk, *message(10, visitor)], [1], pause_s=1)
        if visitor == 99:
            trace.cached = trace.ideal = 0
    assert trace.ratio >= 0.9, trace.ratio
