"""The engine with its real thread, read from threads and coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from civetta.engine.engine import Engine
from civetta.engine.protocol import Finished, Started, TokenEvent
from civetta.errors import (
    CivettaError,
    ContextOverflow,
    EngineBusy,
    EngineClosed,
    OutputBackpressure,
    RequestFailed,
    RequestInvalid,
    TemplateError,
    TokenizerError,
)
from civetta.options import EngineOptions
from civetta.types import FinishReason, SamplingParams
from engine.fakes import (
    IM_END,
    VOCAB,
    ByteTokenizer,
    FakeModel,
    ask,
    babble,
    babbled,
    info,
    says,
    wait_until,
)

pytestmark = pytest.mark.timeout(60)
BUSY = EngineOptions(max_pending=1000, prefill_batch=4, prefill_chunk=2)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) <= before)


def engine_of(model, *, options=BUSY, context_tokens=512, **more):
    return Engine(
        model,
        info(context_tokens),
        **{"tokenizer": ByteTokenizer(), "template": None, "options": options, **more},
    )


def tokens_of(events):
    return [e.token_id for e in events if isinstance(e, TokenEvent)]


def text_of(events):
    return "".join(e.text for e in events if isinstance(e, (TokenEvent, Finished)))


async def read(stream):
    return [event async for event in stream]


class Gate:
    """Holds the model inside a forward until it is opened."""

    def __init__(self):
        self.inside = threading.Event()
        self.open = threading.Event()

    def __call__(self, session, ids):
        self.inside.set()
        assert self.open.wait(30)


def test_threads_and_coroutines_read_the_same():
    with engine_of(FakeModel(says(5, "answer"))) as engine:
        by_thread = list(engine.submit(ask("hello")))
        by_coroutine = asyncio.run(read(engine.submit(ask("hello"))))
    assert text_of(by_thread) == "answer"
    assert tokens_of(by_thread) == tokens_of(by_coroutine)
    assert by_thread[-1].reason is FinishReason.STOP


def test_one_thread_uses_the_model():
    model = FakeModel(says(5, "answer"))
    with engine_of(model) as engine, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: list(engine.submit(ask("hello"))), range(8)))
    assert len(model.threads) == 1
    assert threading.get_ident() not in model.threads


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt": ""}, RequestInvalid),
        ({"prompt": [VOCAB]}, RequestInvalid),
        ({"prompt": [1] * 512}, ContextOverflow),
        ({"max_tokens": -1}, RequestInvalid),
        ({"stop": ("",)}, RequestInvalid),
        ({"sampling": SamplingParams(temperature=3.0)}, RequestInvalid),
        ({"sampling": SamplingParams(seed=2**64)}, RequestInvalid),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(fields, error):
    model = FakeModel(says(5, "a"))
    with engine_of(model) as engine:
        with pytest.raises(error):
            engine.submit(ask(**fields))
        assert engine.stats().requests_total == 0
    assert not model.calls


def test_end_tokens_come_from_the_tokenizer_or_the_caller():
    model = FakeModel(says(5, "ab"))
    with engine_of(model, end_ids=[ord("b")]) as engine:
        assert text_of(list(engine.submit(ask("hello")))) == "a"
    with engine_of(model) as engine:
        assert text_of(list(engine.submit(ask("hello")))) == "ab"


def test_a_model_without_tokenizer_generates_tokens():
    with engine_of(FakeModel(says(5, "ab")), tokenizer=None, end_ids=[IM_END]) as engine:
        events = list(engine.submit(ask("hello")))
        assert tokens_of(events) == [97, 98, IM_END]
        assert text_of(events) == ""
        with pytest.raises(TokenizerError, match=r"fake\.gguf has no tokenizer"):
            _ = engine.tokenizer
        with pytest.raises(TemplateError):
            _ = engine.template
        with pytest.raises(RequestInvalid, match="Stop strings need a tokenizer"):
            engine.submit(ask("hello", stop=("a",)))


def test_queue_bound_and_stats():
    gate = Gate()
    options = EngineOptions(sessions=1, max_pending=2)
    with engine_of(FakeModel(says(1, "a"), on_forward=gate), options=options) as engine:
        streams = [engine.submit(ask("x"))]
        assert gate.inside.wait(20)
        streams += [engine.submit(ask("x")) for _ in range(2)]
        assert (engine.stats().running, engine.stats().waiting) == (1, 2)
        with pytest.raises(EngineBusy):
            engine.submit(ask("x"))
        gate.open.set()
        assert [text_of(list(stream)) for stream in streams] == ["a"] * 3
        stats = engine.stats()
    assert (stats.running, stats.waiting, stats.requests_total) == (0, 0, 3)
    assert (stats.prompt_tokens_total, stats.generated_tokens_total) == (3, 6)


def test_the_last_event_comes_after_the_place_is_free():
    with engine_of(FakeModel(says(1, "a")), options=EngineOptions(max_pending=0)) as engine:
        for _ in range(200):
            assert text_of(list(engine.submit(ask("x")))) == "a"


@pytest.mark.parametrize("way", ["close", "forget", "break", "task"])
def test_a_reader_that_leaves_frees_the_engine(way):
    model = FakeModel(lambda ids: 97 + len(ids) % 26)
    with engine_of(model, context_tokens=10**9) as engine:
        stream = engine.submit(ask("x"))
        if way == "close":
            stream.cancel()
            events = list(stream)
            assert events[-1].reason is FinishReason.CANCELLED
        elif way == "break":
            for event in stream:
                if isinstance(event, TokenEvent):
                    break
        elif way == "task":

            async def leave(stream=stream):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(read(stream), 0.05)

            asyncio.run(leave())
        del stream
        gc.collect()
        wait_until(lambda: engine.stats().requests_cancelled_total == 1)
        wait_until(lambda: engine.stats().running == 0)
        assert model.open_sessions == 0


def test_cancelling_in_a_long_prefill_takes_one_chunk():
    gate = Gate()
    model = FakeModel(says(400, "a"), on_forward=gate)
    with engine_of(model) as engine:
        stream = engine.submit(ask([1] * 400))
        assert gate.inside.wait(20)
        stream.cancel()
        gate.open.set()
        assert list(stream)[-1].reason is FinishReason.CANCELLED
        assert len(model.calls) == 1


def test_a_request_cancelled_in_the_queue_never_starts():
    gate = Gate()
    model = FakeModel(says(1, "a"), on_forward=gate)
    with engine_of(model) as engine:
        first = engine.submit(ask("x"))
        assert gate.inside.wait(20)
        second = engine.submit(ask("y"))
        second.cancel()
        gate.open.set()
        assert [type(event) for event in second] == [Finished]
        assert text_of(list(first)) == "a"
    assert model.most_sessions == 1
    assert all(n == 1 for n, _ in model.calls)


def test_default_deadline_comes_from_the_options():
    options = EngineOptions(request_timeout_ms=30)
    model = FakeModel(lambda ids: 97)
    with engine_of(model, options=options, context_tokens=10**9, max_unread=10**9) as engine:
        assert list(engine.submit(ask("x")))[-1].reason is FinishReason.CANCELLED


def test_a_reader_that_sleeps_blocks_nobody_and_is_cut_off():
    model = FakeModel(lambda ids: 97)
    options = EngineOptions(sessions=2)
    with engine_of(model, options=options, max_unread=50) as engine:
        sleeper = engine.submit(ask("x", max_tokens=400))
        assert text_of(list(engine.submit(ask("y", max_tokens=20)))) == "a" * 20
        wait_until(lambda: engine.stats().requests_failed_total == 1)
        with pytest.raises(OutputBackpressure):
            list(sleeper)
    assert model.open_sessions == 0


def test_the_thread_survives_faults():
    faults = iter([RuntimeError("bug"), MemoryError(), AssertionError("ours"), ZeroDivisionError()])

    def on_forward(session, ids):
        error = next(faults, None)
        if error is not None:
            raise error

    with engine_of(FakeModel(says(1, "ok"), on_forward=on_forward)) as engine:
        for _ in range(4):
            with pytest.raises(RequestFailed):
                list(engine.submit(ask("x")))
        assert text_of(list(engine.submit(ask("x")))) == "ok"
        assert engine.stats().requests_failed_total == 4


def test_even_the_thread_s_death_leaves_nobody_waiting(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def on_forward(session, ids):
        raise SystemExit

    engine = engine_of(FakeModel(says(1, "ok"), on_forward=on_forward))
    streams = [engine.submit(ask("x")) for _ in range(2)]
    for stream in streams:
        with contextlib.suppress(EngineClosed):
            assert list(stream)[-1].reason is FinishReason.CANCELLED
    wait_until(lambda: not engine._thread.is_alive())
    with pytest.raises(EngineClosed):
        engine.submit(ask("x"))
    engine.close()


def test_close_ends_what_runs_and_refuses_what_waits():
    model = FakeModel(lambda ids: 97)
    alone = EngineOptions(sessions=1)
    engine = engine_of(model, context_tokens=10**9, max_unread=10**9, options=alone)
    running = engine.submit(ask("x"))
    events = iter(running)
    assert isinstance(next(events), Started)
    waiting = engine.submit(ask("y"))
    closers = [threading.Thread(target=engine.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(20)
    assert list(events)[-1].reason is FinishReason.CANCELLED
    with pytest.raises(EngineClosed):
        list(waiting)
    with pytest.raises(EngineClosed):
        engine.submit(ask("x"))
    engine.close()
    assert model.open_sessions == 0


@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from(["cancel", "leave"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_cancellation_at_any_moment(at_first, at_second, how, use_asyncio):
    """Two readers stop after some events; what they saw is right, and the next reply is whole."""

    def stop_after(stream, count):
        seen = []
        for event in stream:
            seen.append(event)
            if len(seen) == count + 1:
                if how == "leave":
                    break
                stream.cancel()
        return seen

    async def stop_after_async(stream, count):
        seen = []
        async for event in stream:
            seen.append(event)
            if len(seen) == count + 1:
                if how == "leave":
                    break
                stream.cancel()
        return seen

    model, expected = FakeModel(babble), babbled(b"prompt", 40)
    with engine_of(model) as engine:
        streams = [engine.submit(ask("prompt", max_tokens=40)) for _ in range(3)]
        for stream, count in zip(streams, (at_first, at_second), strict=False):
            if use_asyncio:
                seen = asyncio.run(stop_after_async(stream, count))
            else:
                seen = stop_after(stream, count)
            assert tokens_of(seen) == expected[: len(tokens_of(seen))]
        assert tokens_of(list(streams[2])) == expected
    assert model.open_sessions == 0


def test_soak_of_two_hundred_requests():
    """Eight threads, random prompts, cancels and faults: exact replies, nothing left behind."""
    dice = random.Random(5)
    strikes = threading.Semaphore(0)

    def on_forward(session, ids):
        if strikes.acquire(blocking=False):
            raise RuntimeError("injected")

    model = FakeModel(babble, on_forward=on_forward)
    jobs = [
        (
            [dice.randrange(VOCAB) for _ in range(dice.randint(1, 40))],
            dice.randint(1, 40),
            dice.choice([None, None, None, dice.randint(0, 20)]),
            dice.random() < 0.05,
        )
        for _ in range(200)
    ]

    def serve(job):
        prompt, limit, cancel_at, strike = job
        if strike:
            strikes.release()
        stream = engine.submit(ask(prompt, max_tokens=limit))
        seen = []
        try:
            for event in stream:
                seen.append(event)
                if len(seen) == cancel_at:
                    stream.cancel()
        except CivettaError:
            return "failed"
        expected = babbled(prompt, limit)
        got = tokens_of(seen)
        assert got == expected[: len(got)]
        if seen[-1].reason is FinishReason.CANCELLED:
            return "cancelled"
        assert got == expected
        return "finished"

    options = EngineOptions(sessions=3, max_pending=300, prefill_batch=8, prefill_chunk=4)
    with engine_of(model, options=options) as engine, ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(serve, jobs))
        stats = engine.stats()
    assert ends.count("finished") > 100
    assert ends.count("failed") > 0
    assert (stats.requests_total, stats.running, stats.waiting) == (200, 0, 0)
    assert stats.requests_failed_total == ends.count("failed")
    assert stats.requests_cancelled_total == ends.count("cancelled")
    assert model.open_sessions == 0
    assert model.most_sessions == 3


def test_many_coroutines_at_once():
    async def scene(engine):
        prompts = [[i + 1] * (i % 7 + 1) for i in range(40)]
        streams = [engine.submit(ask(prompt, max_tokens=30)) for prompt in prompts]
        replies = await asyncio.gather(*(read(stream) for stream in streams))
        for prompt, reply in zip(prompts, replies, strict=True):
            assert tokens_of(reply) == babbled(prompt, 30)

    with engine_of(FakeModel(babble)) as engine:
        asyncio.run(scene(engine))


def test_a_forgotten_engine_ends_its_thread():
    model = FakeModel(lambda ids: 97)
    engine = engine_of(model, context_tokens=10**9)
    events, thread = iter(engine.submit(ask("x"))), engine._thread
    assert isinstance(next(events), Started)
    del engine
    gc.collect()
    assert not thread.is_alive()
    assert list(events)[-1].reason is FinishReason.CANCELLED
    assert model.open_sessions == 0


def test_an_engine_that_was_not_closed_does_not_hold_the_process():
    code = (
        "from engine.fakes import *; from civetta.engine.engine import Engine\n"
        "e = Engine(FakeModel(lambda ids: 97), info(10**9), tokenizer=ByteTokenizer(),"
        " template=None)\n"
        "s = iter(e.submit(ask('x'))); next(s); print('left')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"left\n"), done.stderr
