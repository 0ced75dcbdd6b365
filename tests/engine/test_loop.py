"""The loop stepped by hand: no thread, every moment can be looked at."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from civetta.decode.history import TokenHistory
from civetta.decode.sampler import SampleRow, sample_row
from civetta.decode.stream import TokenText
from civetta.engine.loop import LoopLimits, StepLoop
from civetta.engine.outbox import OutboxStream
from civetta.engine.protocol import Finished, Progress, Started, TokenEvent
from civetta.engine.scheduler import Budget
from civetta.errors import (
    EngineBusy,
    EngineClosed,
    LogitsInvalid,
    OutputBackpressure,
    ReadFailed,
    RequestFailed,
)
from civetta.types import FinishReason, SamplingParams
from engine.fakes import (
    END_OF_TEXT,
    IM_END,
    VOCAB,
    ByteTokenizer,
    FakeModel,
    ManualClock,
    ask,
    babble,
    babbled,
    says,
    script,
)

pytestmark = pytest.mark.timeout(240)  # a schedule may share its processor with much else
TOKENIZER = ByteTokenizer()


class Bench:
    """A loop with a fake model, a manual clock and readers that keep what they got."""

    def __init__(self, model, *, sessions=1, batch=4, chunk=2, pending=16, **limits):
        self.model, self.clock = model, ManualClock()
        self.loop = StepLoop(
            model,
            LoopLimits(
                **{
                    "budget": Budget(sessions=sessions, prefill_batch=batch, prefill_chunk=chunk),
                    "max_pending": pending,
                    "context_tokens": 512,
                    "max_text_bytes": 10_000,
                    "max_unread": 10_000,
                    "end_ids": TOKENIZER.eog_ids,
                    **limits,
                }
            ),
            new_text=lambda stops: TokenText(TOKENIZER, stops),
            clock=self.clock,
        )

    def submit(self, *args, **fields):
        request, outbox = self.loop.submit(ask(*args, **fields))
        return request, outbox

    def step(self, n=1):
        for _ in range(n):
            self.loop.step()
            self.loop.check()

    def drain(self):
        for _ in range(10_000):
            stats = self.loop.stats()
            if not stats.running and not stats.waiting:
                assert self.model.open_sessions == 0
                return
            self.step()
        raise AssertionError("the loop does not come to an end")

    def reply(self, *args, **fields):
        _, outbox = self.submit(*args, **fields)
        self.drain()
        return list(OutboxStream(outbox, lambda: None))


def text_of(events):
    return "".join(e.text for e in events if isinstance(e, (TokenEvent, Finished)))


def tokens_of(events):
    return [e.token_id for e in events if isinstance(e, TokenEvent)]


def end_of(events):
    assert isinstance(events[-1], Finished)
    return events[-1]


# ---- the ordinary path -----------------------------------------------------------------------


def test_events_of_one_reply():
    bench = Bench(FakeModel(says(10, "hi")))
    events = bench.reply("0123456789")
    assert events == [
        Started(prompt_tokens=10, cached_tokens=0),
        Progress(processed_tokens=10, prompt_tokens=10),
        TokenEvent(token_id=ord("h"), text="h"),
        TokenEvent(token_id=ord("i"), text="i"),
        TokenEvent(token_id=IM_END, text=""),
        Finished(reason=FinishReason.STOP, usage=end_of(events).usage),
    ]
    assert (end_of(events).usage.prompt_tokens, end_of(events).usage.completion_tokens) == (10, 3)
    # three chunks of at most 4 tokens, only the last one with logits, then one token a call
    assert bench.model.calls == [(4, "none"), (4, "none"), (2, "last"), (1, "last"), (1, "last")]


def test_progress_after_every_chunk():
    bench = Bench(FakeModel(says(10, "")))
    _, outbox = bench.submit("0123456789")
    seen = []
    for _ in range(4):
        bench.step()
        seen.append([outbox.take(), outbox.take()][0])
    assert seen == [
        Started(prompt_tokens=10, cached_tokens=0),
        Progress(processed_tokens=4, prompt_tokens=10),
        Progress(processed_tokens=8, prompt_tokens=10),
        Progress(processed_tokens=10, prompt_tokens=10),
    ]


def test_the_model_is_told_what_comes_next_and_nothing_past_the_prompt():
    model = FakeModel(says(10, "ab"))
    Bench(model, batch=4).reply("0123456789")
    text = [*b"0123456789ab"]
    chunks = [(at, tuple(text[at : min(at + 4, 10)])) for at in (0, 4, 8)]
    assert model.expected == [*chunks, (10, (text[10],)), (11, (text[11],))]


@pytest.mark.parametrize("lengths", [(3,), (9,), (2, 2), (5, 1), (9, 9), (30, 3, 7)])
@pytest.mark.parametrize("busy", [False, True])
def test_a_first_launch_is_announced_at_admission_as_it_comes(lengths, busy):
    """With nobody, beside a reply, beside prefills: what was announced is the launch to the token."""
    first, seen = {}, []

    def on_forward(session, ids):
        if not session.ids:
            first[id(session)] = tuple(ids)

    model = FakeModel(lambda ids: 97, on_forward=on_forward)
    expect = model.expect

    def watched(session, ids):
        if not session.ids:
            seen.append((id(session), tuple(ids)))
        expect(session, ids)

    model.expect = watched
    bench = Bench(model, sessions=4)
    if busy:
        bench.submit([1] * 6, max_tokens=60, ignore_eos=True)
        bench.step(5)
        seen.clear()
    for number, length in enumerate(lengths):
        bench.submit([10 + number] * length, max_tokens=60, ignore_eos=True, client_id=str(number))
    bench.step()
    assert seen, "nothing is announced in the step of the admission"
    assert not set(first) & {key for key, _ in seen}, "announced behind the launch"
    bench.step(30)
    assert len(seen) == len(lengths)
    for key, ids in seen:
        assert first[key] == ids


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 64])
def test_chunk_size_never_changes_the_reply(batch):
    prompt = list(range(1, 30))
    events = Bench(FakeModel(babble), batch=batch).reply(prompt, max_tokens=50)
    assert tokens_of(events) == babbled(prompt, 50)


def test_a_sampled_reply_depends_on_seed_not_on_company():
    flat = FakeModel(lambda ids: 97 + ids[-1] % 3)
    params = [SamplingParams(temperature=2.0, seed=seed) for seed in (1, 2, 1)]

    def run(sessions):
        bench = Bench(flat, sessions=sessions)
        boxes = [bench.submit([5, 6, 7], sampling=p, max_tokens=20)[1] for p in params]
        bench.drain()
        return [tokens_of(list(OutboxStream(box, lambda: None))) for box in boxes]

    alone, together = run(1), run(3)
    assert alone == together
    assert alone[0] == alone[2]
    assert alone[0] != alone[1]


def test_sampling_position_is_the_index_of_the_new_token():
    """A prompt that contains a reply's beginning goes on as that reply did: same positions."""
    flat = FakeModel(lambda ids: 100)
    params = SamplingParams(temperature=2.0, seed=3)
    whole = tokens_of(Bench(flat).reply([5, 6], sampling=params, max_tokens=20, ignore_eos=True))
    longer = [5, 6, *whole[:7]]
    rest = Bench(flat).reply(longer, sampling=params, max_tokens=13, ignore_eos=True)
    assert tokens_of(rest) == whole[7:]


def test_the_first_token_after_n_tokens_has_position_n():
    flat, params = np.zeros(VOCAB, dtype=np.float32), SamplingParams(temperature=2.0, seed=3)
    flat[100] = 8.0
    expected = [
        sample_row(
            flat,
            SampleRow(params=params, position=n, history=TokenHistory([], repeat_last_n=0)),
        ).token_id
        for n in range(4, 12)
    ]
    reply = Bench(FakeModel(lambda ids: 100)).reply(
        [1] * 4, sampling=params, max_tokens=8, ignore_eos=True
    )
    assert tokens_of(reply) == expected
    assert len(set(expected)) > 2


def test_logprobs_run_along_the_text():
    params = SamplingParams(temperature=0, logprobs=2)
    events = Bench(FakeModel(says(2, "ab"))).reply("xy", sampling=params)
    first, second, end = (e for e in events if isinstance(e, TokenEvent))
    assert first.logprob.token_id == ord("a")
    assert first.logprob.top[0] == (ord("a"), first.logprob.logprob)
    assert len(second.logprob.top) == 2
    assert end.logprob is None


def test_penalties_see_the_reply_as_it_grows():
    model = FakeModel(lambda ids: 65)
    params = SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    events = Bench(model).reply([65, 65], sampling=params, max_tokens=6)
    # logit 8 for "A": after three times it is 8 - 2 - 6 = 0, level with all others but token 0
    assert tokens_of(events) == [65, 65, 65, 0, 1, 2]


# ---- ends ------------------------------------------------------------------------------------


def test_either_end_token_ends_the_reply():
    for end in (IM_END, END_OF_TEXT):
        events = Bench(FakeModel(says(2, "a", end))).reply("xy")
        assert text_of(events) == "a"
        assert end_of(events).reason is FinishReason.STOP


def test_ignore_eos_generates_on():
    model = FakeModel(script(2, [97, IM_END, 98, END_OF_TEXT, 99]))
    events = Bench(model).reply("xy", ignore_eos=True, max_tokens=5)
    assert tokens_of(events) == [97, IM_END, 98, END_OF_TEXT, 99]
    assert text_of(events) == "abc"
    assert end_of(events).reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("budget", "reason"),
    [(1, FinishReason.LENGTH), (2, FinishReason.LENGTH), (3, FinishReason.STOP)],
)
def test_budget_counts_the_end_token(budget, reason):
    events = Bench(FakeModel(says(2, "ab"))).reply("xy", max_tokens=budget)
    assert end_of(events).reason is reason
    assert end_of(events).usage.completion_tokens == budget == len(tokens_of(events))


@pytest.mark.parametrize("budget", [None, 10**9])
def test_a_full_context_ends_with_length(budget):
    bench = Bench(FakeModel(lambda ids: 97), context_tokens=16)
    events = bench.reply("0123456789", max_tokens=budget)
    assert text_of(events) == "a" * 6
    assert end_of(events).reason is FinishReason.LENGTH
    assert sum(n for n, _ in bench.model.calls) == 15  # the last token is not computed further


def test_too_much_text_ends_with_length():
    events = Bench(FakeModel(lambda ids: 97), max_text_bytes=7).reply("x")
    assert text_of(events) == "a" * 7
    assert end_of(events).reason is FinishReason.LENGTH


def test_stop_string_over_tokens():
    bench = Bench(FakeModel(says(1, "alpha beta gamma delta")))
    events = bench.reply("x", stop=("beta gamma", "zzz"))
    assert text_of(events) == "alpha "
    assert end_of(events).reason is FinishReason.STOP
    assert end_of(events).stop == "beta gamma"
    assert end_of(events).usage.completion_tokens == len("alpha beta gamma")


@pytest.mark.parametrize("max_tokens", [None, 8])
def test_a_prefix_of_a_stop_string_comes_out_at_the_end(max_tokens):
    events = Bench(FakeModel(says(1, "alpha be"))).reply("x", stop=("beta",), max_tokens=max_tokens)
    assert text_of(events) == "alpha be"
    assert end_of(events).text == "be"
    assert end_of(events).stop is None


def test_characters_come_whole():
    text = "é漢😀\U0001f469\u200d\U0001f52c"
    events = Bench(FakeModel(says(1, text))).reply("x")
    assert text_of(events) == text
    assert all("\ufffd" not in e.text for e in events if isinstance(e, TokenEvent))


def test_a_character_cut_by_length_becomes_a_replacement():
    events = Bench(FakeModel(says(1, "漢"))).reply("x", max_tokens=2)
    assert text_of(events) == "\ufffd"
    assert end_of(events).text == "\ufffd"


def test_bytes_held_back_may_complete_a_stop_string():
    events = Bench(FakeModel(says(1, "a漢"))).reply("x", max_tokens=3, stop=("\ufffd",))
    assert text_of(events) == "a"
    assert end_of(events).reason is FinishReason.STOP
    assert end_of(events).stop == "\ufffd"


# ---- queue, cancellation, deadlines ----------------------------------------------------------


def test_first_come_first_served():
    order = []
    model = FakeModel(says(3, "ab"), on_forward=lambda session, ids: order.append(ids[0]))
    bench = Bench(model)
    for first in (1, 2, 3):
        bench.submit([first, 50, 51])
    bench.drain()
    assert [token for token in order if token < 10] == [1, 2, 3]
    assert model.most_sessions == 1


def test_the_queue_is_bounded():
    bench = Bench(FakeModel(says(1, "a")), pending=2)
    boxes = [bench.submit("x") for _ in range(3)]
    with pytest.raises(EngineBusy, match="0 requests run and 3 wait"):
        bench.submit("x")
    bench.step()
    with pytest.raises(EngineBusy, match="1 requests run and 2 wait"):
        bench.submit("x")
    boxes[2][0].cancel()
    bench.step()
    bench.submit("x")
    bench.drain()


def test_no_queue_at_all_still_serves_one():
    bench = Bench(FakeModel(says(1, "a")), pending=0)
    for _ in range(3):
        assert text_of(bench.reply("x")) == "a"


def test_a_cancelled_request_in_the_queue_never_starts():
    bench = Bench(FakeModel(says(1, "abc")))
    bench.submit("x")
    request, outbox = bench.submit("y")
    bench.step(2)
    request.cancel()
    bench.step()
    (end,) = OutboxStream(outbox, lambda: None)
    assert end.reason is FinishReason.CANCELLED
    assert end.usage.completion_tokens == 0
    assert bench.model.most_sessions == 1
    bench.drain()


def test_cancelling_ends_a_prefill_within_one_chunk():
    bench = Bench(FakeModel(says(100, "a")), batch=10)
    request, outbox = bench.submit([1] * 100)
    bench.step(4)  # admission and three chunks
    request.cancel()
    bench.step()
    assert bench.model.calls == [(10, "none")] * 3
    assert bench.model.open_sessions == 0
    events = list(OutboxStream(outbox, lambda: None))
    assert events[1] == Progress(processed_tokens=30, prompt_tokens=100)
    assert end_of(events).reason is FinishReason.CANCELLED


def test_cancelling_a_reply_gives_out_what_was_held_back():
    bench = Bench(FakeModel(says(1, "abc def")))
    request, outbox = bench.submit("x", stop=("cd",))
    bench.step(4)
    request.cancel()
    bench.step()
    events = list(OutboxStream(outbox, lambda: None))
    assert text_of(events) == "abc"
    assert end_of(events).reason is FinishReason.CANCELLED
    assert bench.model.open_sessions == 0


def test_a_deadline_covers_queue_and_generation():
    bench = Bench(FakeModel(lambda ids: 97))
    _, first = bench.submit("x", timeout_s=5.0)
    _, second = bench.submit("y", timeout_s=5.0)
    _, third = bench.submit("z", max_tokens=2)
    bench.step(3)
    bench.clock.now_s += 5.0
    bench.step()
    one = list(OutboxStream(first, lambda: None))
    assert end_of(one).reason is FinishReason.CANCELLED
    assert text_of(one) == "aa"
    (queued,) = OutboxStream(second, lambda: None)
    assert queued.reason is FinishReason.CANCELLED
    assert queued.usage.queue_s == 5.0
    bench.drain()
    assert end_of(list(OutboxStream(third, lambda: None))).reason is FinishReason.LENGTH


def test_usage_has_the_times():
    clock_steps = iter([1.0, 2.0, 4.0] + [0.5] * 10)
    model = FakeModel(says(8, "ab"))
    bench = Bench(model)
    model.on_forward = lambda s, ids: setattr(
        bench.clock, "now_s", bench.clock.now_s + next(clock_steps)
    )
    _, outbox = bench.submit([1] * 8)
    bench.clock.now_s += 7.0
    bench.drain()
    usage = end_of(list(OutboxStream(outbox, lambda: None))).usage
    assert (usage.queue_s, usage.prefill_s, usage.decode_s) == (7.0, 3.0, 4.5)
    stats = bench.loop.stats()
    assert (stats.prefill_s_total, stats.decode_s_total) == (3.0, 4.5)


def test_decoders_go_on_while_another_prefills():
    bench = Bench(FakeModel(lambda ids: 97), sessions=2, batch=50, chunk=10)
    _, talker = bench.submit("x", max_tokens=30)
    bench.step(3)
    bench.submit([1] * 100, max_tokens=1)
    bench.model.calls.clear()
    bench.step(8)
    # after admission: one decoded token, then at most ten prompt tokens, in turns
    assert bench.model.calls[1:7] == [(1, "last"), (10, "none")] * 3
    bench.drain()
    assert text_of(list(OutboxStream(talker, lambda: None))) == "a" * 30


# ---- faults ----------------------------------------------------------------------------------


def failing(when, error):
    def on_forward(session, ids):
        if when(session, ids):
            raise error

    return on_forward


@pytest.mark.parametrize("error", [ReadFailed("no disk"), RuntimeError("bug"), MemoryError()])
@pytest.mark.parametrize("at", [0, 4, 8, 10, 12])
def test_a_fault_ends_one_request_and_no_other(error, at):
    model = FakeModel(says(10, "abcd"))
    bad = [200] * 10
    model.on_forward = failing(
        lambda s, ids: s.position <= at < s.position + len(ids) and 200 in s.ids + ids, error
    )
    bench = Bench(model, sessions=2)
    _, before = bench.submit([1] * 10)
    _, struck = bench.submit(bad)
    _, after = bench.submit([2] * 10)
    bench.drain()
    for box in (before, after):
        assert text_of(list(OutboxStream(box, lambda: None))) == "abcd"
    expected = ReadFailed if isinstance(error, ReadFailed) else RequestFailed
    with pytest.raises(expected):
        list(OutboxStream(struck, lambda: None))
    stats = bench.loop.stats()
    assert (stats.requests_failed_total, stats.requests_total) == (1, 3)


def test_a_bug_is_logged_with_its_traceback(caplog):
    model = FakeModel(says(1, "a"), on_forward=failing(lambda s, ids: True, ValueError("inside")))
    with caplog.at_level(logging.ERROR, "civetta"), pytest.raises(RequestFailed):
        Bench(model).reply("x")
    assert any(record.exc_info and "inside" in caplog.text for record in caplog.records)


def test_bad_logits_end_the_request():
    model = FakeModel(says(1, "a"))
    forward = model.forward

    def spoiled(session, ids, rows):
        logits = forward(session, ids, rows)
        logits[..., 3] = float("nan")
        return logits

    model.forward = spoiled
    with pytest.raises(LogitsInvalid):
        Bench(model).reply("x")


@pytest.mark.parametrize("error", [EngineBusy("no pages"), RuntimeError("bug")])
def test_no_room_for_a_session(error):
    model = FakeModel(says(1, "ab"))
    failures = [error]

    def on_open():
        if failures:
            raise failures.pop()

    model.on_open = on_open
    bench = Bench(model)
    with pytest.raises(EngineBusy if isinstance(error, EngineBusy) else RequestFailed):
        bench.reply("x")
    assert text_of(bench.reply("x")) == "ab"


def test_a_session_that_does_not_close_hurts_nobody():
    model = FakeModel(says(1, "ab"))
    model.fail_close = True
    bench = Bench(model)
    assert text_of(bench.reply("x")) == "ab"
    model.fail_close = False
    assert text_of(bench.reply("x")) == "ab"


def test_a_broken_plan_ends_everything_and_the_loop_lives(monkeypatch):
    bench = Bench(FakeModel(says(1, "ab")))
    boxes = [bench.submit("x")[1] for _ in range(3)]
    bench.step(2)
    with monkeypatch.context() as patch:
        patch.setattr("civetta.engine.loop.scheduler.plan", lambda *a: 1 / 0)
        bench.step()
    for box in boxes:
        with pytest.raises(RequestFailed):
            list(OutboxStream(box, lambda: None))
    assert bench.model.open_sessions == 0
    assert text_of(bench.reply("x")) == "ab"


def test_a_slow_reader_ends_only_its_own_request():
    bench = Bench(FakeModel(says(1, "abcdefghij")), sessions=2, max_unread=6)
    _, slow = bench.submit("x")
    _, quick = bench.submit("y")
    got = []
    while bench.loop.stats().running or bench.loop.stats().waiting:
        bench.step()
        while (event := quick.take()) is not None:
            got.append(event)
    assert text_of(got) == "abcdefghij"
    with pytest.raises(OutputBackpressure):
        list(OutboxStream(slow, lambda: None))
    assert bench.model.open_sessions == 0


def test_shutdown_breaks_off_everything():
    bench = Bench(FakeModel(lambda ids: 97), sessions=2)
    boxes = [bench.submit("x")[1] for _ in range(4)]
    bench.step(3)
    bench.loop.stop()
    bench.loop.run()
    for box in boxes[:2]:
        assert end_of(list(OutboxStream(box, lambda: None))).reason is FinishReason.CANCELLED
    for box in boxes[2:]:
        with pytest.raises(EngineClosed):
            list(OutboxStream(box, lambda: None))
    assert bench.model.open_sessions == 0
    with pytest.raises(EngineClosed):
        bench.submit("x")


def test_shutdown_gets_through_sessions_that_do_not_close():
    model = FakeModel(lambda ids: 97)
    model.fail_close = True
    bench = Bench(model, sessions=3)
    boxes = [bench.submit("x")[1] for _ in range(3)]
    bench.step(2)
    bench.loop.stop()
    bench.loop.run()
    assert [end_of(list(OutboxStream(box, lambda: None))).reason for box in boxes] == [
        FinishReason.CANCELLED
    ] * 3


# ---- any order of things ---------------------------------------------------------------------


class Play(Bench):
    """A bench that carries out drawn moves and remembers its requests."""

    def __init__(self, sessions):
        super().__init__(
            FakeModel(babble, on_forward=self.strike), sessions=sessions, batch=3, pending=4
        )
        self.room = 4 + sessions
        self.fault = False
        self.jobs = []

    def strike(self, session, ids):
        if self.fault:
            self.fault = False
            raise RuntimeError("injected")

    def move(self, kind, first, second):
        if kind == "submit":
            prompt = [first] * first
            try:
                job = self.submit(prompt, max_tokens=second, timeout_s=20.0)
            except EngineBusy:
                stats = self.loop.stats()
                assert stats.waiting + stats.running == self.room
            else:
                self.jobs.append((prompt, *job))
        elif kind == "cancel" and self.jobs:
            self.jobs[first % len(self.jobs)][1].cancel()
        elif kind == "step":
            self.step(second)
        elif kind == "wait":
            self.clock.now_s += first
        elif kind == "fault":
            self.fault = True

    def settle(self, prompt, request, outbox):
        """Read one reply to its end and compare it with what the model says."""
        expected, got = babbled(prompt, request.spec.max_tokens), []
        try:
            got.extend(iter(OutboxStream(outbox, lambda: None)))
        except RequestFailed:
            assert request.state == "failed"
        else:
            assert request.state in ("finished", "cancelled")
            assert end_of(got).usage.completion_tokens == len(tokens_of(got))
        seen = tokens_of(got)
        assert seen == expected[: len(seen)]
        assert request.state != "finished" or seen == expected
        request.check()


moves = st.tuples(
    st.sampled_from(["submit", "submit", "step", "step", "step", "cancel", "wait", "fault"]),
    st.integers(1, 9),
    st.integers(1, 9),
)


@given(st.lists(moves, min_size=4, max_size=40), st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_whatever_happens_every_reader_gets_one_end(steps, sessions):
    """Submit, cancel, time out and fail at random moments: books balance, replies are exact."""
    play = Play(sessions)
    for step in steps:
        play.move(*step)
    play.fault = False
    play.drain()
    for job in play.jobs:
        play.settle(*job)
    states = [request.state for _, request, _ in play.jobs]
    stats = play.loop.stats()
    assert stats.requests_cancelled_total == states.count("cancelled")
    assert stats.requests_failed_total == states.count("failed")
    assert stats.requests_total == len(states)
