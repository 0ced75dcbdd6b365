"""The commands and the API over the real engine with the tiny model: nothing is faked here."""

from __future__ import annotations

import asyncio
import io
import json
import sys

import pytest

from api.serving import RawClient, sdk
from civetta.api.app import build_app
from civetta.cli.engine_setup import build_engine
from civetta.config import load_settings
from civetta.model.tiny import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def served(model):
    settings = load_settings({"model": model, "max_tokens": 12}, env={})
    engine = build_engine(settings)
    yield build_app(engine, settings), engine
    engine.close()


def test_a_seed_repeats_a_prompt_in_another_chunk_size(civetta, model):
    def once(*flags):
        result = civetta("prompt", "Hi " * 60, "-m", model, "-n", "6", "--json", *flags)
        assert result.status == 0
        report = json.loads(result.out)
        return report["token_sha256"], report["completion_tokens"]

    first = once("--seed", "3")
    assert first == once("--seed", "3", "--prefill-batch", "64")
    assert first != once("--seed", "4")
    assert 0 < first[1] <= 6


def test_chat_over_a_pipe(civetta, model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/think off\nHello\nAnd?\n/stats\n"))
    result = civetta("chat", "-m", model, "-n", "4", "--seed", "1")
    assert result.status == 0
    assert "reply 4 tokens" in result.err or "ended by stop" in result.err


def test_sdk_completes_and_streams_the_same(served):
    app, _ = served
    question = {"messages": [{"role": "user", "content": "Hello"}], "seed": 9}

    async def run():
        async with sdk(app) as client:
            name = (await client.models.list()).data[0].id
            whole = await client.chat.completions.create(model=name, **question)
            stream = await client.chat.completions.create(
                model=name, stream=True, stream_options={"include_usage": True}, **question
            )
            chunks = [chunk async for chunk in stream]
            raw = await client.completions.create(model=name, prompt="Once", seed=1, logprobs=2)
        return whole, chunks, raw

    whole, chunks, raw = asyncio.run(run())
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == (getattr(whole.choices[0].message, "reasoning_content", None) or "")
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens <= 12
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert len(raw.choices[0].logprobs.tokens) == raw.usage.completion_tokens
    assert all(value <= 0 for value in raw.choices[0].logprobs.token_logprobs)


def test_a_disconnect_frees_the_engine(served):
    app, engine = served
    before = engine.stats().requests_cancelled_total
    body = {"prompt": "Once", "stream": True, "max_tokens": 3000, "ignore_eos": True}

    async def run():
        client = RawClient(app, "/v1/completions", body)
        task = asyncio.create_task(client.run())
        await client.until(lambda self: len(self.sent) > 3)
        await client.disconnect()
        await asyncio.wait_for(task, 20)
        async with asyncio.timeout(20):
            while engine.stats().running:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert engine.stats().requests_cancelled_total == before + 1


def test_context_overflow_is_a_400_with_both_sizes(served):
    app, engine = served

    async def run():
        client = RawClient(app, "/v1/completions", {"prompt": "x" * 5000, "stream": True})
        await client.run()
        return client

    client = asyncio.run(run())
    error = json.loads(client.text)["error"]
    assert client.sent[0]["status"] == 400
    assert error["code"] == "context_length_exceeded"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (5000, engine.info.context_tokens)


def test_drafting_does_not_change_a_prompts_tokens(civetta, model):
    def once(*flags):
        result = civetta(
            "prompt", "Hi " * 30, "-m", model, "-n", "8", "--seed", "3", "--json", *flags
        )
        assert result.status == 0, result.err
        told = json.loads(result.out)
        depths = told["draft_depths"]
        assert sum(drafted for drafted, _ in depths) == told["draft_tokens"]
        assert sum(accepted for _, accepted in depths) == told["draft_tokens_accepted"]
        return told["token_sha256"], len([depth for depth in depths if depth[0]])

    plain, depths = once("--speculative", "off")
    assert depths == 0
    assert once("--speculative", "lookup")[0] == plain
    tokens, depths = once("--speculative", "mtp", "-d", "3")
    assert tokens == plain
    assert 1 <= depths <= 3
