"""The engine with its cache on the tiny real model: replies are those of a cold engine."""

from __future__ import annotations

import pytest

from civetta.engine.load import load_engine
from civetta.engine.protocol import Finished, TokenEvent
from civetta.model.tiny import write_tiny
from civetta.options import CacheOptions, EngineOptions, ModelOptions, Settings
from civetta.types import SamplingParams
from engine.fakes import ask

pytestmark = pytest.mark.timeout(120)
PROMPT = list(range(1, 151))
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    model = ModelOptions(model=str(write_tiny(tmp_path_factory.mktemp("tiny"))), threads=1)

    def load(sessions=1, **cache):
        options = EngineOptions(sessions=sessions)
        cache = {"cache_ram_bytes": 1 << 27, **cache}
        return load_engine(Settings(model=model, engine=options, cache=CacheOptions(**cache)))

    return load


def reply_of(stream):
    events = list(stream)
    assert isinstance(events[-1], Finished)
    tokens = [event.token_id for event in events if isinstance(event, TokenEvent)]
    return tokens, events[-1].usage


def asked(engine, prompt, tokens=12, **fields):
    return reply_of(engine.submit(ask(prompt, sampling=SEEDED, max_tokens=tokens, **fields)))


@pytest.fixture(scope="module")
def cold(engine_of):
    def reply(prompt, tokens=12):
        with engine_of(cache="off") as engine:
            return asked(engine, prompt, tokens)[0]

    return reply


def test_a_second_turn_reuses_the_first(engine_of, cold):
    with engine_of() as engine:
        first, usage = asked(engine, PROMPT)
        assert (usage.cached_tokens, usage.cache.miss) == (0, "cold")
        second = [*PROMPT, *first, 9, 8, 7]
        reply, usage = asked(engine, second)
        assert reply == cold(second)
        assert usage.cached_tokens >= len(PROMPT) + len(first) - 1
        assert usage.cache.source == "ram"
        again, usage = asked(engine, second)
        assert (again, usage.cached_tokens) == (reply, len(second) - 1)
        passed, usage = asked(engine, second, use_cache=False)
        assert (passed, usage.cached_tokens, usage.cache.miss) == (reply, 0, "disabled")


def test_hits_and_misses_are_counted_once_a_request(engine_of, tmp_path):
    """Two cold prompts, one known, one that passes the cache; then from disk, and cold again."""

    def counts(engine):
        cache = engine.stats().cache
        return cache.hits_ram_total, cache.hits_disk_total, cache.misses_total

    with engine_of(cache_disk=str(tmp_path)) as engine:
        asked(engine, PROMPT, 2)
        asked(engine, PROMPT[::-1], 2)
        assert counts(engine) == (0, 0, 2)
        asked(engine, PROMPT, 2)
        asked(engine, PROMPT, 2, use_cache=False)
        assert counts(engine) == (1, 0, 2)
    with engine_of(cache_disk=str(tmp_path)) as engine:
        asked(engine, PROMPT, 2)
        asked(engine, [5, *PROMPT], 2)
        assert counts(engine) == (0, 1, 1)


def test_a_restart_reuses_what_is_on_disk(engine_of, cold, tmp_path):
    with engine_of(cache_disk=str(tmp_path)) as engine:
        first, _ = asked(engine, PROMPT)
    second = [*PROMPT, *first, 9, 8, 7]
    with engine_of(cache_disk=str(tmp_path)) as engine:
        reply, usage = asked(engine, second)
    assert (reply, usage.cache.source) == (cold(second), "disk")
    assert usage.cached_tokens >= len(PROMPT)


def test_four_at_once_share_a_prefix(engine_of, cold):
    prompts = [[*PROMPT, *PROMPT, n] for n in range(4)]
    with engine_of(sessions=4) as engine:
        streams = [engine.submit(ask(prompt, sampling=SEEDED, max_tokens=6)) for prompt in prompts]
        found = [reply_of(stream) for stream in streams]
    assert [tokens for tokens, _ in found] == [cold(prompt, 6) for prompt in prompts]
    assert sum(usage.cached_tokens >= 300 for _, usage in found) == 3
