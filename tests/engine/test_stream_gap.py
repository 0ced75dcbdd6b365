"""Between two tokens of a reply at most one chunk of prompt tokens is computed; by counts, not time.

A real loop over a scripted model, stepped by hand: whatever the prompts' length, however many users
prefill, with states kept in the middle of chunks, restores and shared prefixes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from civetta.decode.stream import TokenText
from civetta.engine.loop import LoopLimits, StepLoop
from civetta.engine.scheduler import Budget
from engine.fakes import ByteTokenizer, FakeCache, FakeModel, ManualClock, ask

pytestmark = pytest.mark.timeout(240)


class Watched:
    """A loop that notes, for every token of every reply, the prompt tokens since its last one."""

    def __init__(self, *, sessions, batch, chunk, cache=None):
        self.gaps: list[int] = []
        self.steps = 0
        self.booked = 0  # prompt tokens that clients were given, by the loop's account
        self.computed_of = Counter()  # prompt tokens computed, by the token that a prompt repeats
        self._computed, self._in_round, self._last = 0, False, {}
        tokenizer = ByteTokenizer()
        self.loop = StepLoop(
            FakeModel(lambda ids: 97, on_forward=self._count),
            LoopLimits(
                budget=Budget(sessions=sessions, prefill_batch=batch, prefill_chunk=chunk),
                max_pending=64,
                context_tokens=10**6,
                max_text_bytes=10**6,
                max_unread=10**6,
                end_ids=tokenizer.eog_ids,
            ),
            new_text=lambda stops: TokenText(tokenizer, stops),
            cache=cache or FakeCache(),
            clock=ManualClock(),
        )
        decode, accept = self.loop._decoding.run, self.loop._replies.accept
        give = self.loop._shares.give

        def booked(client_id, n_tokens):
            self.booked += n_tokens
            give(client_id, n_tokens)

        def round_of(jobs):
            self._in_round = True
            decode(jobs)
            self._in_round = False

        def accepted(job, sampled):
            if job.key in self._last:
                self.gaps.append(self._computed - self._last[job.key])
            self._last[job.key] = self._computed
            return accept(job, sampled)

        self.loop._decoding.run, self.loop._replies.accept = round_of, accepted
        self.loop._shares.give = booked

    def submit(self, prompt, *, reply, client):
        self.loop.submit(ask(prompt, max_tokens=reply, ignore_eos=True, client_id=client))

    def drain(self):
        while self.loop.stats().running or self.loop.stats().waiting:
            self.step()

    def step(self):
        self.loop.step()
        self.loop.check()
        self.steps += 1
        assert self.steps < 20_000, "the loop does not come to an end"
        assert self.booked == self._computed, "a client pays for tokens that it did not get"

    def _count(self, session, ids):
        if not self._in_round:
            self._computed += len(ids)
            self.computed_of[ids[0]] += len(ids)


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("length", [700, 26_000, 250_000])
def test_one_chunk_between_two_tokens_at_any_prompt_length(length, readers):
    watched = Watched(sessions=readers + 1, batch=4096, chunk=512)
    watched.submit([1], reply=length // 2, client="talker")
    watched.step()
    for reader in range(readers):
        watched.submit([2 + reader] * length, reply=2, client=f"reader{reader}")
    while watched.loop.stats().running > 1 or watched.loop.stats().waiting:
        watched.step()
    assert max(watched.gaps) == 512
    assert sum(watched.gaps) >= readers * (length - 512)  # the talker had its tokens all along


PROMPTS = st.tuples(
    st.integers(1, 900), st.sampled_from([1, 2, 3]), st.integers(1, 30), st.integers(0, 4)
)


@given(
    st.integers(1, 6),
    st.integers(1, 120),
    st.integers(0, 400),
    st.lists(PROMPTS, min_size=2, max_size=10),
)
# A reply begins in the first of a step's two launches, which nobody's decoding bounded yet.
@example(2, 1, 38, [(150, 2, 2, 0), (40, 2, 2, 1)])
@example(3, 7, 44, [(100, 2, 2, 0), (40, 2, 2, 2), (40, 2, 2, 1)])
@settings(max_examples=60, deadline=None)
def test_no_schedule_makes_a_reply_wait_for_more_than_a_chunk(sessions, chunk, more, prompts):
    """Prompts that share beginnings (three kinds of token), some longer than a batch."""
    watched = Watched(sessions=sessions, batch=chunk + more, chunk=chunk)
    for number, (length, token, reply, pause) in enumerate(prompts):
        watched.submit([token] * length, reply=reply, client=str(number % 3))
        for _ in range(pause):
            watched.step()
    watched.drain()
    assert max(watched.gaps, default=0) <= chunk


class Grid(FakeCache):
    """Wants a state each 100 tokens, so that no launch has more of a prompt."""

    def find(self, tokens, images=()):
        places = [*range(100, len(tokens), 100), len(tokens)]
        point = super().find(tokens, images)
        return replace(point, keep_at=tuple(at for at in places if at > point.cached_tokens))


def test_a_step_that_ends_early_costs_its_clients_what_they_got_only():
    """The second is dealt 900 tokens of a step that ends after 100: the third does not get 800."""
    watched = Watched(sessions=3, batch=1000, chunk=50, cache=Grid())
    for token, length in ((1, 100), (2, 900), (3, 2000)):
        watched.submit([token] * length, reply=10**4, client=str(token))
    watched.step()  # admits them
    watched.step()
    assert watched.computed_of == {1: 100, 2: 100}
    for _ in range(24):
        watched.step()
        assert abs(watched.computed_of[2] - watched.computed_of[3]) <= 100
    assert watched.computed_of[2] + watched.computed_of[3] == 100 + 24 * 50
