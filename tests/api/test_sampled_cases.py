"""Reports about seeds and log-probabilities (cases.md E), over HTTP, on a small model that drafts."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from api.serving import app_of, drafting_always, http, request
from civetta.engine.load import load_engine
from civetta.model.tiny import write_tiny
from civetta.options import DraftingOptions, EngineOptions, ModelOptions, Settings

pytestmark = pytest.mark.timeout(120)
USER = {"role": "user", "content": "Say it."}
TOKENS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelOptions(model=str(write_tiny(tmp_path_factory.mktemp("tiny"))), threads=1)


def serving(model, drafting):
    return load_engine(Settings(model=model, engine=EngineOptions(sessions=8), drafting=drafting))


@pytest.fixture(scope="module")
def plain(model):
    with serving(model, DraftingOptions()) as engine:
        yield app_of(engine)


@pytest.fixture(scope="module")
def drafting(model):
    with pytest.MonkeyPatch.context() as patch:
        drafting_always(patch)
        with serving(model, DraftingOptions(speculative="mtp", draft_tokens=3)) as engine:
            yield app_of(engine)


def body_of(**fields):
    return {
        "messages": [USER],
        "max_tokens": TOKENS,
        "reasoning_effort": "none",
        "cache_prompt": False,
        **fields,
    }


def ask(app, **fields):
    return request(app, "POST", "/v1/chat/completions", body=body_of(**fields))


def plain_body(seed):
    """Of a reply that no end cuts short: two of them are equal by their seed or not at all."""
    return {
        "prompt": "Say it.",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "cache_prompt": False,
        "seed": seed,
    }


def said(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def alone(app, seed):
    return said(request(app, "POST", "/v1/completions", body=plain_body(seed)))


def together(app, seeds):
    """The replies to requests that are under way at the same time."""

    async def run():
        async with http(app) as client:
            posts = [
                client.post("/v1/completions", json=plain_body(seed), timeout=100) for seed in seeds
            ]
            return [said(reply) for reply in await asyncio.gather(*posts)]

    return asyncio.run(run())


def test_case_47_a_seed_gives_its_reply_alone_among_eight_and_with_drafts(plain, drafting):
    seeds = range(1, 9)
    wanted = [alone(plain, seed) for seed in seeds]
    assert len(set(wanted)) == len(seeds), "each request has its own draw"
    assert [alone(plain, seed) for seed in seeds] == wanted
    for app in (plain, drafting):
        assert together(app, seeds) == wanted
        assert together(app, [5] * 8) == [wanted[4]] * 8


def test_case_47_without_a_seed_replies_differ(plain, drafting):
    for app in (plain, drafting):
        assert len({alone(app, None) for _ in range(3)} | set(together(app, [None] * 4))) == 7


def logprobs_of(app, *, stream):
    fields = {"seed": 3, "logprobs": True, "top_logprobs": 5, "stream": stream}
    reply = ask(app, **fields)
    assert reply.status_code == 200, reply.text
    if not stream:
        choice = reply.json()["choices"][0]
        return choice["message"]["content"], choice["logprobs"]["content"], reply.json()["timings"]
    lines = [line[6:] for line in reply.text.split("\n\n") if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    entries = [(choice.get("logprobs") or {}).get("content") or [] for choice in choices]
    timings = [chunk["timings"] for chunk in chunks if "timings" in chunk]
    return text, list(itertools.chain.from_iterable(entries)), timings[-1]


def test_case_49_logprobs_are_those_without_drafts_in_stream_and_buffer(plain, drafting):
    text, entries, _ = logprobs_of(plain, stream=False)
    assert len(entries) == TOKENS
    for entry in entries:
        rivals = [rival["logprob"] for rival in entry["top_logprobs"]]
        assert len(rivals) == 5
        assert rivals == sorted(rivals, reverse=True)
        assert entry["logprob"] in rivals or entry["logprob"] <= rivals[-1]
    for app, stream in ((plain, True), (drafting, False), (drafting, True)):
        again, same, timings = logprobs_of(app, stream=stream)
        assert (again, same) == (text, entries)
        assert (timings.get("draft_n", 0) > 0) == (app is drafting)
