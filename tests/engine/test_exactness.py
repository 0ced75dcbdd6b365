"""Conversations with company, cache and scarce pages give the bytes of a cold engine's replies."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest

from civetta.engine.engine import Engine
from civetta.engine.memory import MARGIN_BYTES, MemoryNeeds, StateSizes, plan_memory
from civetta.engine.protocol import Finished, TokenEvent
from civetta.engine.trunk_model import TrunkModel
from civetta.model.build import load_trunk
from civetta.model.tiny import write_tiny
from civetta.options import EngineOptions
from civetta.types import SamplingParams
from engine.fakes import ask, info
from engine.snapshot_cache import SnapshotCache

pytestmark = pytest.mark.timeout(120)
CONTEXT = 640


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    return load_trunk(write_tiny(tmp_path_factory.mktemp("tiny")))


def engine_of(trunk, *, pages=None, cache=None, **options):
    options = EngineOptions(max_pending=64, **options)
    needs = MemoryNeeds(
        sizes=StateSizes(session_bytes=0, page_bytes=1),
        sessions=options.sessions,
        context_tokens=CONTEXT,
    )
    available = MARGIN_BYTES + (pages or needs.whole_pages)
    plan = plan_memory(needs, available_bytes=available)
    store = trunk.store(sessions=options.sessions, context_tokens=CONTEXT, pages=plan.pages)
    return Engine(
        TrunkModel(trunk, store),
        replace(info(CONTEXT), vocab_size=trunk.config.vocab),
        tokenizer=None,
        template=None,
        end_ids=[1],
        options=options,
        cache=cache,
    )


def read(stream):
    return [event.token_id for event in stream if isinstance(event, TokenEvent)]


def conversations(seed):
    """Scripts of turns: what is said, and how the history is changed before it."""
    rng = random.Random(seed)
    openings = [[rng.randrange(2, 250) for _ in range(n)] for n in (90, 300)]
    for user in range(4):
        turns = []
        for _ in range(4):
            change = rng.choice(["go on", "go on", "go on", "rewind", "edit", "again", "fork"])
            said = [rng.randrange(2, 250) for _ in range(rng.choice((1, 7, 40)))]
            turns.append((change, said, rng.randrange(4, 14), rng.choice((0.0, 1.0))))
        yield openings[user % 2], turns


def changed(history, change, said, rng):
    if change == "rewind":
        return history[: max(1, 2 * len(history) // 3)]
    if change == "edit":
        at = rng.randrange(len(history))
        return [*history[:at], 5, *history[at + 1 :]]
    if change == "again":
        return history[: -len(said)] if len(said) < len(history) else history
    return history


def converse(submit, opening, turns, seed, log):
    rng, history = random.Random(seed), list(opening)
    for turn, (change, said, budget, temperature) in enumerate(turns):
        history = [*changed(history, change, said, rng), *said][-(CONTEXT - 40) :]
        params = SamplingParams(temperature=temperature, seed=seed * 100 + turn)
        request = ask(history, sampling=params, max_tokens=budget, client_id=str(seed % 3))
        reply = read(submit(request))
        log.append((tuple(history), params, budget, tuple(reply)))
        history = [*history, *reply]


@pytest.mark.parametrize(
    ("seed", "pages"), [(1, None), (2, None), (3, 14)], ids=["mixed", "other", "few pages"]
)
def test_random_conversations_equal_a_cold_engine(trunk, seed, pages):
    log = []
    cache = SnapshotCache()
    options = {"sessions": 3, "prefill_batch": 96, "prefill_chunk": 64}
    with engine_of(trunk, pages=pages, cache=cache, **options) as engine:
        users = [
            threading.Thread(target=converse, args=(engine.submit, *script, number, log))
            for number, script in enumerate(conversations(seed))
        ]
        for user in users:
            user.start()
        for user in users:
            user.join()
        # with few pages it is the users' timing that says whether any of them finds a state
        history, params, budget, reply = min(log, key=lambda turn: len(turn[0]))
        for _ in range(2):
            again = engine.submit(ask(history, sampling=params, max_tokens=budget))
            assert tuple(read(again)) == reply
        stats = engine.stats()
    assert len(log) == 16
    assert stats.cached_tokens_total > 0
    assert cache.hits >= (5 if pages is None else 1)
    with engine_of(trunk) as cold:
        for history, params, budget, reply in log:
            assert (
                tuple(read(cold.submit(ask(history, sampling=params, max_tokens=budget)))) == reply
            )
    after = engine.stats()
    assert after.pages_free == after.pages_total


def test_identical_prompts_at_once_are_computed_once(trunk):
    prompt = list(range(2, 250)) * 2
    with engine_of(trunk, cache=SnapshotCache(), sessions=4, prefill_batch=128) as engine:
        streams = [engine.submit(ask(prompt, max_tokens=6)) for _ in range(4)]
        events = [list(stream) for stream in streams]
        stats = engine.stats()
    assert len({tuple(read(event)) for event in events}) == 1
    ends = [event[-1] for event in events]
    assert all(isinstance(end, Finished) for end in ends)
    assert sorted(end.usage.cached_tokens for end in ends) == [0, *[len(prompt) - 1] * 3]
    assert stats.prompt_tokens_total == len(prompt) + 3


def test_replies_that_were_cut_off_leave_exact_state(trunk):
    prompt = list(range(2, 200))
    with engine_of(trunk) as cold:
        whole = read(cold.submit(ask(prompt, max_tokens=20)))
    with engine_of(trunk, cache=SnapshotCache(), sessions=2) as engine:
        stream, got = engine.submit(ask(prompt)), []
        for event in stream:
            if isinstance(event, TokenEvent):
                got.append(event.token_id)
            if len(got) == 5:
                stream.cancel()
        assert got[:5] == whole[:5]
        longer = [*prompt, *got]
        events = list(engine.submit(ask(longer, max_tokens=6)))
        assert events[-1].usage.cached_tokens >= len(longer) - 2
        with engine_of(trunk) as cold:
            assert read(events) == read(cold.submit(ask(longer, max_tokens=6)))
