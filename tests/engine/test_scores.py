"""Log-probabilities of prompt tokens: those that the same tokens have when they are generated."""

from __future__ import annotations

import numpy as np
import pytest

from civetta.engine.protocol import Finished, GenerateRequest, Progress, PromptLogprobs, TokenEvent
from civetta.model.tiny import write_tiny
from civetta.types import FinishReason, SamplingParams
from engine.drafting import Bench
from engine.snapshot_cache import SnapshotCache

pytestmark = pytest.mark.timeout(120)
PROMPT = tuple(int(i) for i in np.random.default_rng(3).integers(0, 256, 150))
GREEDY = SamplingParams(temperature=0, logprobs=2)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(write_tiny(tmp_path_factory.mktemp("tiny")))


def asked(prompt=PROMPT, **fields):
    more = {"max_tokens": 0, "prompt_logprobs": 2, **fields}
    return GenerateRequest(request_id="r", prompt_ids=tuple(prompt), sampling=GREEDY, **more)


def scores(events):
    return [
        entry for event in events if isinstance(event, PromptLogprobs) for entry in event.logprobs
    ]


def test_each_prompt_token_but_the_first_is_scored_as_if_it_were_generated(bench):
    with bench.engine() as engine:
        generated = list(
            engine.submit(asked(PROMPT[:60], max_tokens=30, prompt_logprobs=None, ignore_eos=True))
        )
        reply = [event for event in generated if isinstance(event, TokenEvent)]
        whole = (*PROMPT[:60], *[event.token_id for event in reply])
        events = list(engine.submit(asked(whole)))
    found = scores(events)
    assert [entry.token_id for entry in found] == list(whole[1:])
    assert found[59:] == [event.logprob for event in reply]
    assert all(len(entry.top) == 2 for entry in found)
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.LENGTH
    assert events[-1].usage.completion_tokens == 0


def test_a_reply_follows_as_it_always_does(bench):
    with bench.engine() as engine:
        plain = list(engine.submit(asked(prompt_logprobs=None, max_tokens=5)))
        events = list(engine.submit(asked(max_tokens=5)))
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert tokens == [event for event in plain if isinstance(event, TokenEvent)]
    first = events.index(tokens[0])
    assert all(not isinstance(event, PromptLogprobs) for event in events[first:])
    assert len(scores(events)) == len(PROMPT) - 1
    assert [e for e in events if isinstance(e, Progress)][-1].processed_tokens == len(PROMPT)


def test_company_and_cache_change_no_score_and_the_cache_is_not_read(bench):
    with bench.engine() as engine:
        wanted = scores(engine.submit(asked()))
    with bench.engine(sessions=4, cache=SnapshotCache(every=20)) as engine:
        list(engine.submit(asked(max_tokens=8, prompt_logprobs=None)))
        streams = [
            engine.submit(one)
            for one in (asked(), asked(PROMPT[:70], max_tokens=20, prompt_logprobs=None), asked())
        ]
        first, _, last = (list(stream) for stream in streams)
    assert scores(first) == scores(last) == wanted
    assert first[-1].usage.cached_tokens == 0


def test_reading_a_prompt_only_ends_without_a_token(bench):
    with bench.engine() as engine:
        events = list(engine.submit(asked(prompt_logprobs=None)))
    assert not [event for event in events if isinstance(event, (TokenEvent, PromptLogprobs))]
    assert events[-1].reason is FinishReason.LENGTH
