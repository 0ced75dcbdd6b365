"""The loop with a continuation cache: what is restored, kept, shared and given up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from civetta.cache.off import NoCache
from civetta.cache.protocol import KeepKind
from civetta.decode.stream import TokenText
from civetta.engine.loop import HEADROOM_TOKENS, LoopLimits, StepLoop
from civetta.engine.outbox import OutboxStream
from civetta.engine.protocol import Finished, Started, TokenEvent
from civetta.engine.scheduler import Budget
from civetta.engine.sharing import SHARE_TOKENS, common_prefix
from civetta.errors import EngineBusy, ReadFailed, RequestFailed
from civetta.kernels.ops import PAGE_TOKENS
from civetta.types import CacheSaving, CancelCause
from engine.fakes import (
    ByteTokenizer,
    FakeCache,
    FakeModel,
    ManualClock,
    ask,
    babble,
    babbled,
    says,
)

pytestmark = pytest.mark.timeout(240)  # a schedule may share its processor with much else
TOKENIZER = ByteTokenizer()
LONG = [1 + i % 200 for i in range(600)]


class Bench:
    """A loop with fake model, cache and clock, whose pages are counted when `pages` is given."""

    def __init__(self, model, *, sessions=4, batch=64, chunk=16, pages=None, cache=None):
        self.model, self.clock = model, ManualClock()
        self.cache = FakeCache() if cache is None else cache
        self.pages = pages
        if pages is not None:
            model.pages_total = pages
            model.on_reserve = self.reserve
        self.loop = StepLoop(
            model,
            LoopLimits(
                budget=Budget(
                    sessions=sessions,
                    prefill_batch=batch,
                    prefill_chunk=chunk,
                    pages=model.pages_total,
                ),
                max_pending=64,
                context_tokens=4096,
                max_text_bytes=10_000,
                max_unread=10_000,
                end_ids=TOKENIZER.eog_ids,
                cache_drain_s=3.0,
            ),
            new_text=lambda stops: TokenText(TOKENIZER, stops),
            cache=self.cache,
            clock=self.clock,
        )

    def reserve(self, session, tokens):
        live = [job.session for job in self.loop._roster.running() if job.session is not session]
        held = sum(-(-s.position // PAGE_TOKENS) for s in live)
        wanted = -(-(session.position + tokens) // PAGE_TOKENS)
        if held + wanted > self.pages:
            raise EngineBusy("no pages")

    def submit(self, *args, **fields):
        return self.loop.submit(ask(*args, **fields))

    def step(self, n=1):
        for _ in range(n):
            self.loop.step()
            self.loop.check()

    def drain(self, most=10_000):
        for _ in range(most):
            stats = self.loop.stats()
            if not stats.running and not stats.waiting:
                assert self.model.open_sessions == 0
                return
            self.step()
        raise AssertionError("the loop does not come to an end")

    def reply(self, *args, **fields):
        _, outbox = self.submit(*args, **fields)
        self.drain()
        return read(outbox)


def read(outbox):
    return list(OutboxStream(outbox, lambda: None))


def tokens_of(events):
    return [e.token_id for e in events if isinstance(e, TokenEvent)]


def usage_of(events):
    assert isinstance(events[-1], Finished)
    return events[-1].usage


# ---- find, restore, keep ---------------------------------------------------------------------


def test_a_cold_prompt_is_kept_where_the_cache_asks_and_at_the_reply_s_end():
    bench = Bench(FakeModel(says(10, "hi")))
    events = bench.reply([7] * 10)
    assert bench.cache.kept == [
        (5, KeepKind.PROMPT),
        (9, KeepKind.PROMPT),
        (10, KeepKind.PROMPT),
        (12, KeepKind.REPLY),
    ]
    # launches end where states are kept; the end token was chosen and never computed
    assert bench.model.calls == [(5, "none"), (4, "none"), (1, "last"), (1, "last"), (1, "last")]
    assert usage_of(events).cached_tokens == 0
    assert usage_of(events).cache == CacheSaving(source="none", miss="cold")


def test_an_identical_prompt_computes_one_row():
    bench = Bench(FakeModel(babble))
    first = bench.reply(LONG, max_tokens=9)
    bench.model.calls.clear()
    again = bench.reply(LONG, max_tokens=9)
    assert bench.model.calls[0] == (1, "last")
    assert tokens_of(again) == tokens_of(first) == babbled(LONG, 9)
    assert again[0] == Started(prompt_tokens=600, cached_tokens=599)
    assert usage_of(again).cached_tokens == 599
    assert usage_of(again).cache.source == "ram"
    assert usage_of(again).cache.miss is None
    assert bench.loop.stats().cached_tokens_total == 599


def test_a_second_turn_begins_where_the_first_reply_ended():
    bench = Bench(FakeModel(babble))
    reply = tokens_of(bench.reply(LONG, max_tokens=9))
    turn = [*LONG, *reply, 5, 6, 7, 8]
    bench.model.calls.clear()
    events = bench.reply(turn, max_tokens=4)
    assert usage_of(events).cached_tokens == len(LONG) + len(reply) - 1
    assert sum(n for n, _ in bench.model.calls) == 4 + 1 + 3
    assert tokens_of(events) == babbled(turn, 4)


def test_a_prompt_that_is_exactly_a_kept_state_still_gets_its_own_logits():
    bench = Bench(FakeModel(babble))
    bench.reply(LONG[:300], max_tokens=3)
    events = bench.reply(LONG[:150], max_tokens=5)  # 150 is a kept middle
    assert tokens_of(events) == babbled(LONG[:150], 5)
    assert usage_of(events).cached_tokens < 150


def test_the_request_may_pass_the_cache():
    bench = Bench(FakeModel(babble))
    bench.reply(LONG, max_tokens=2)
    events = bench.reply(LONG, max_tokens=2, use_cache=False)
    assert usage_of(events).cached_tokens == 0
    assert usage_of(events).cache.miss == "disabled"


def test_a_restore_from_disk_holds_up_nobody():
    bench = Bench(FakeModel(babble))
    bench.reply(LONG, max_tokens=2)
    bench.cache.next_restore = (50, "none")
    request, outbox = bench.submit(LONG, max_tokens=5)
    bench.step()
    assert request.state == "restoring"
    assert bench.loop.stats().restoring == 1
    bench.cache.next_restore = (0, "none")
    _, other = bench.submit([3] * 20, max_tokens=10)
    bench.step(20)
    assert tokens_of(read(other)) == babbled([3] * 20, 10)
    assert request.state == "restoring"
    bench.drain()
    assert usage_of(read(outbox)).cached_tokens == 599


@pytest.mark.parametrize(("fault", "miss"), [("damaged", "damaged"), ("busy", "evicted")])
def test_a_restore_that_fails_costs_time_and_nothing_else(fault, miss):
    bench = Bench(FakeModel(babble))
    bench.reply(LONG, max_tokens=2)
    bench.cache.next_restore = (2, fault)
    events = bench.reply(LONG, max_tokens=6)
    assert tokens_of(events) == babbled(LONG, 6)
    assert (usage_of(events).cached_tokens, usage_of(events).cache.miss) == (0, miss)
    assert usage_of(events).cache.source == "none"


def test_cancelling_a_restore_stops_it():
    bench = Bench(FakeModel(babble))
    bench.reply(LONG, max_tokens=2)
    bench.cache.next_restore = (50, "none")
    request, outbox = bench.submit(LONG)
    bench.step(3)
    request.cancel()
    bench.step()
    assert bench.cache.restores[-1].over
    assert bench.model.open_sessions == 0
    assert read(outbox)[-1].cause is CancelCause.CLIENT


def test_a_prefill_that_was_called_off_leaves_what_it_computed():
    bench = Bench(FakeModel(babble), batch=100)
    request, _ = bench.submit(LONG)
    bench.step(4)
    done = request.prefilled_tokens
    assert done >= 200
    request.cancel()
    bench.step()
    assert bench.cache.kept[-1] == (done, KeepKind.REPLY)
    assert usage_of(bench.reply(LONG, max_tokens=1)).cached_tokens == done


def test_state_that_a_fault_may_have_torn_is_not_kept():
    def strike(session, ids):
        if session.position >= 128:
            raise ReadFailed("no disk")

    bench = Bench(FakeModel(babble, on_forward=strike))
    _, outbox = bench.submit([9] * 200)
    bench.drain()
    with pytest.raises(ReadFailed):
        read(outbox)
    assert all(kind is not KeepKind.REPLY for _, kind in bench.cache.kept)


def test_abort_ends_a_request_by_its_id():
    bench = Bench(FakeModel(lambda ids: 97))
    _, outbox = bench.submit("x", request_id="r7")
    bench.step(3)
    assert bench.loop.abort("r7")
    assert not bench.loop.abort("r8")
    bench.step()
    assert read(outbox)[-1].cause is CancelCause.ABORTED
    assert not bench.loop.abort("r7")


def test_the_cache_is_closed_at_the_end_and_gets_its_time():
    bench = Bench(FakeModel(lambda ids: 97))
    _, outbox = bench.submit([5] * 30)
    bench.step(4)
    bench.loop.stop()
    bench.loop.run()
    assert read(outbox)[-1].cause is CancelCause.SHUTDOWN
    assert bench.cache.closed_with == 3.0
    assert bench.cache.kept[-1][1] is KeepKind.REPLY


# ---- one prefix, several requests ------------------------------------------------------------


def test_common_prefix():
    assert common_prefix((), (1,)) == 0
    assert common_prefix((1, 2, 3), (1, 2, 3)) == 3
    assert common_prefix((1, 2, 3), (1, 2, 4, 5)) == 2


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_common_prefix_is_what_it_says(a, b):
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n in (len(a), len(b)) or a[n] != b[n]


def test_identical_cold_prompts_are_computed_once():
    bench = Bench(FakeModel(babble))
    boxes = [bench.submit(LONG, max_tokens=5)[1] for _ in range(4)]
    bench.drain()
    replies = [read(box) for box in boxes]
    assert {tuple(tokens_of(reply)) for reply in replies} == {tuple(babbled(LONG, 5))}
    assert [usage_of(reply).cached_tokens for reply in replies] == [0, 599, 599, 599]
    assert bench.loop.stats().prompt_tokens_total == 603


def test_prompts_that_part_share_what_they_have_in_common():
    shared, bench = LONG[:400], Bench(FakeModel(babble))
    prompts = [[*shared, *[token] * 100] for token in (201, 202, 203)]
    boxes = [bench.submit(prompt, max_tokens=5)[1] for prompt in prompts]
    bench.drain()
    for prompt, box in zip(prompts, boxes, strict=True):
        assert tokens_of(read(box)) == babbled(prompt, 5)
    assert bench.loop.stats().prompt_tokens_total == 400 + 3 * 100
    assert (400, KeepKind.SHARED) in bench.cache.kept


def test_a_follower_tells_how_long_it_waited():
    def forward(session, ids):
        bench.clock.now_s += 1.0

    bench = Bench(FakeModel(babble, on_forward=forward))
    bench.submit(LONG, max_tokens=1)
    _, follower = bench.submit(LONG, max_tokens=1)
    bench.drain()
    assert usage_of(read(follower)).cache.wait_s >= 600 // 64


def test_short_prefixes_are_not_waited_for():
    bench = Bench(FakeModel(babble))
    for token in (201, 202):
        bench.submit([*LONG[: SHARE_TOKENS - 1], *[token] * 50], max_tokens=1)
    bench.step()
    assert bench.loop.stats().running == 2


@pytest.mark.parametrize("way", ["cancel", "fault", "refused"])
def test_followers_of_a_leader_that_does_not_deliver_go_on_alone(way):
    def strike(session, ids):
        if way == "fault" and session is leaders[0]:
            raise ReadFailed("no disk")

    leaders = []
    model = FakeModel(babble, on_forward=strike)
    bench = Bench(model)
    opened = model.open_session
    model.open_session = lambda: leaders.append(opened()) or leaders[-1]
    if way == "refused":
        bench.cache.keep = lambda session, kind, images=(): False
    leader, first = bench.submit(LONG, max_tokens=5)
    boxes = [bench.submit(LONG, max_tokens=5)[1] for _ in range(3)]
    bench.step(3)
    if way == "cancel":
        leader.cancel()
    bench.drain()
    for box in boxes:
        assert tokens_of(read(box)) == babbled(LONG, 5)
    if way == "fault":
        with pytest.raises(ReadFailed):
            read(first)


# ---- launches --------------------------------------------------------------------------------


def test_replies_under_way_share_one_launch():
    bench = Bench(FakeModel(lambda ids: 97), cache=NoCache())
    for token in (1, 2, 3):
        bench.submit([token], max_tokens=50)
    bench.step(2)
    bench.model.launches.clear()
    bench.step(5)
    assert bench.model.launches == [[1, 1, 1]] * 5


def test_short_prompts_share_one_launch_and_a_long_one_gets_the_rest():
    bench = Bench(FakeModel(lambda ids: 97), batch=100, cache=NoCache())
    for token, length in ((1, 20), (2, 300), (3, 30)):
        bench.submit([token] * length, max_tokens=9, client_id=str(token))
    bench.step(2)
    assert bench.model.launches == [[20, 30, 50]]


def test_a_step_never_takes_more_than_its_budget_whatever_is_kept():
    taken = []
    bench = Bench(FakeModel(babble), batch=64, chunk=16)
    bench.submit([5], max_tokens=200, ignore_eos=True)
    bench.step(2)
    bench.submit(LONG, max_tokens=2)
    for _ in range(60):
        before = len(bench.model.launches)
        bench.step()
        rows = [n for launch in bench.model.launches[before:] for n in launch if n > 1]
        taken.append(sum(rows))
    assert 12 <= max(taken) <= 16


# ---- pages -----------------------------------------------------------------------------------


def test_cached_states_go_before_requests_do():
    bench = Bench(FakeModel(babble), pages=8)
    bench.cache.spare = 3
    room = bench.reserve

    def reserve(session, tokens):
        if bench.cache.spare:
            raise EngineBusy("cached states hold pages")
        room(session, tokens)

    bench.model.on_reserve = reserve
    bench.cache.make_room = lambda pages: (
        bool(bench.cache.spare) and not setattr(bench.cache, "spare", bench.cache.spare - 1)
    )
    assert tokens_of(bench.reply([3] * 40, max_tokens=5)) == babbled([3] * 40, 5)
    assert bench.cache.spare == 0
    assert bench.loop.stats().put_back_total == 0


def test_who_came_last_gives_way_and_says_the_same_in_the_end():
    bench = Bench(FakeModel(lambda ids: 97 + len(ids) % 26), pages=12, batch=256)
    bench.cache.find = FakeCache().find  # nothing is ever found again
    boxes = [bench.submit([token] * 60, max_tokens=400)[1] for token in (1, 2)]
    bench.drain()
    for box in boxes:
        events = read(box)
        assert tokens_of(events) == [97 + (60 + i) % 26 for i in range(400)]
        assert sum(isinstance(event, Started) for event in events) == 1
        assert usage_of(events).cached_tokens == 0
    assert bench.loop.stats().put_back_total >= 1


def test_a_request_that_needs_more_than_there_is_fails_alone():
    bench = Bench(FakeModel(babble), pages=4)
    _, big = bench.submit([5] * 300, max_tokens=2)
    _, small = bench.submit([6] * 20, max_tokens=5)
    bench.drain()
    with pytest.raises(EngineBusy):
        read(big)
    assert tokens_of(read(small)) == babbled([6] * 20, 5)


def test_admission_waits_for_pages():
    bench = Bench(FakeModel(lambda ids: 97), pages=10)
    bench.submit([1] * 200, max_tokens=100)
    _, second = bench.submit([2] * 200, max_tokens=3)
    bench.step(3)
    assert (bench.loop.stats().running, bench.loop.stats().waiting) == (1, 1)
    assert HEADROOM_TOKENS + 400 > 10 * PAGE_TOKENS
    bench.drain()
    assert tokens_of(read(second)) == [97] * 3
    assert bench.loop.stats().put_back_total == 0


# ---- any order of things ---------------------------------------------------------------------


class Play(Bench):
    """Carries out drawn moves over prompts that share prefixes, with faults and scarce pages."""

    def __init__(self, sessions, pages):
        model = FakeModel(babble, on_forward=self.strike)
        super().__init__(model, sessions=sessions, batch=200, chunk=50, pages=pages)
        self.fault = False
        self.jobs = []

    def strike(self, session, ids):
        if self.fault:
            self.fault = False
            raise RuntimeError("injected")

    def move(self, kind, first, second):
        if kind == "submit":
            prompt = [*LONG[: 100 * (first % 6)], *[200 + second] * first]
            job = self.submit(prompt, max_tokens=8 * second, client_id="abc"[second % 3])
            self.jobs.append((prompt, *job))
        elif kind == "cancel" and self.jobs:
            self.jobs[first % len(self.jobs)][1].cancel()
        elif kind == "fault":
            self.fault = True
        elif kind == "restore":
            self.cache.next_restore = (first, ("none", "damaged", "busy")[second % 3])
        else:
            self.step(second)

    def settle(self, prompt, request, outbox):
        expected, got = babbled(prompt, request.spec.max_tokens), []
        try:
            got.extend(iter(OutboxStream(outbox, lambda: None)))
        except (RequestFailed, EngineBusy):
            assert request.state == "failed"
        seen = tokens_of(got)
        assert seen == expected[: len(seen)]
        assert request.state != "finished" or seen == expected


moves = st.tuples(
    st.sampled_from(
        ["submit", "submit", "submit", "step", "step", "step", "cancel", "fault", "restore"]
    ),
    st.integers(1, 9),
    st.integers(1, 9),
)


@pytest.mark.timeout(240)  # 13 s of processor time, which may be one of many beside it
@given(st.lists(moves, min_size=4, max_size=40), st.integers(1, 4), st.integers(12, 40))
@settings(max_examples=400, deadline=None)
def test_replies_depend_on_the_prompt_alone(steps, sessions, pages):
    """Cache hits, shared prefixes, faults, evictions, cancellations: every token is as if alone."""
    play = Play(sessions, pages)
    for step in steps:
        play.move(*step)
    play.fault = False
    play.drain()
    for job in play.jobs:
        play.settle(*job)
    stats = play.loop.stats()
    assert stats.requests_total == len(play.jobs)
    assert (stats.running, stats.waiting, stats.restoring) == (0, 0, 0)
