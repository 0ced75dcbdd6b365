"""Several choices and several prompts in one request; prompts that are echoed with their scores."""

from __future__ import annotations

import asyncio
import threading

import pytest

from api.serving import RawClient, app_of, error_of, events_of, request, sdk
from civetta.errors import EngineBusy, RequestFailed
from fake_engine import FakeEngine

USER = {"role": "user", "content": "Hi"}


def by_seed(asked):
    """Each choice has a reply of its own."""
    return f"seed {asked.sampling.seed}"


def chat(engine, **body):
    body = {"messages": [USER], "enable_thinking": False, "seed": 7, **body}
    return request(app_of(engine), "POST", "/v1/chat/completions", body=body)


def complete(engine, **body):
    return request(app_of(engine), "POST", "/v1/completions", body={"prompt": "Hi", **body})


def test_case_50_n_choices_have_derived_seeds_and_one_prompt():
    engine = FakeEngine(by_seed)
    done = chat(engine, n=3).json()
    assert [choice["index"] for choice in done["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in done["choices"]]
    assert texts == ["seed 7", "seed 8", "seed 9"]
    assert len({asked.prompt_ids for asked in engine.requests}) == 1
    prompt = len(engine.requests[0].prompt_ids)
    assert done["usage"]["prompt_tokens"] == prompt
    assert done["usage"]["completion_tokens"] == 3 * len("seed 7")
    alone = chat(FakeEngine(by_seed), seed=9).json()
    assert alone["choices"][0]["message"]["content"] == texts[2]


def test_the_largest_seed_is_followed_by_the_smallest():
    engine = FakeEngine(by_seed)
    chat(engine, n=2, seed=2**64 - 1)
    assert [asked.sampling.seed for asked in engine.requests] == [2**64 - 1, 0]


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_of_choices_equals_the_buffer(usage):
    body = {"n": 3, "stream": True, "stream_options": {"include_usage": usage}}
    events = events_of(chat(FakeEngine(by_seed), **body).text)
    texts, ends = {}, {}
    for item in events:
        for choice in item["choices"]:
            index = choice["index"]
            assert index not in ends
            texts[index] = texts.get(index, "") + (choice["delta"].get("content") or "")
            if choice["finish_reason"]:
                ends[index] = choice["finish_reason"]
    assert texts == {0: "seed 7", 1: "seed 8", 2: "seed 9"}
    assert ends == dict.fromkeys(range(3), "stop")
    assert len({item["id"] for item in events}) == 1
    told = [item["usage"] for item in events if item.get("usage")]
    assert len(told) == usage
    if usage:
        assert events[-1]["choices"] == []
        assert told[0]["completion_tokens"] == 3 * len("seed 7")


def test_openai_sdk_reads_choices():
    async def run():
        async with sdk(app_of(FakeEngine(by_seed))) as client:
            chats = await client.chat.completions.create(
                model="fake-model", messages=[USER], n=2, seed=1, reasoning_effort="none"
            )
            plain = await client.completions.create(
                model="fake-model", prompt=["a", "b"], n=2, best_of=2, seed=1, max_tokens=20
            )
            return chats, plain

    chats, plain = asyncio.run(run())
    assert [choice.message.content for choice in chats.choices] == ["seed 1", "seed 2"]
    assert [choice.text for choice in plain.choices] == ["seed 1", "seed 2"] * 2
    assert plain.usage.prompt_tokens == 2


def test_several_prompts_in_one_request():
    engine = FakeEngine(lambda asked: f"after {len(asked.prompt_ids)}")
    prompts = ["a", "bc", [5, 6, 7]]
    done = complete(engine, prompt=prompts).json()
    assert [choice["text"] for choice in done["choices"]] == ["after 1", "after 2", "after 3"]
    assert done["usage"]["prompt_tokens"] == 6
    events = events_of(complete(engine, prompt=prompts, stream=True).text)
    assert {choice["index"] for item in events for choice in item["choices"]} == {0, 1, 2}


def test_too_many_choices_together_are_refused():
    response = complete(FakeEngine(), prompt=["a"] * 50, n=3)
    assert error_of(response)["param"] == "n"


def test_one_choice_that_fails_ends_all():
    def broken(asked):
        if asked.sampling.seed == 8:
            raise RequestFailed("broken")
        return "x" * 50

    engine = FakeEngine(broken)
    assert chat(engine, n=3).status_code == 500
    text = chat(FakeEngine(broken), n=3, stream=True).text
    assert "broken" in text


def test_a_full_queue_refuses_all_choices_and_cancels_those_that_were_taken():
    engine = FakeEngine()
    taken, submit = [], engine.submit

    def crowded(asked):
        if len(taken) == 2:
            raise EngineBusy("full")
        taken.append(submit(asked))
        return taken[-1]

    engine.submit = crowded
    assert chat(engine, n=3).status_code == 429


def test_a_client_that_leaves_ends_every_choice():
    go_on = threading.Event()
    engine = FakeEngine("abc" * 30, before_token=lambda index: index < 3 or go_on.wait(10))

    async def run():
        body = {"messages": [USER], "n": 2, "stream": True, "enable_thinking": False}
        client = RawClient(app_of(engine), "/v1/chat/completions", body)
        task = asyncio.create_task(client.run())
        await client.until(lambda c: "content" in c.text)
        await client.disconnect()
        await task
        go_on.set()

    asyncio.run(run())
    for _ in range(2):
        assert engine.ended.acquire(timeout=10)
    assert {end.reason.value for end in engine.finished} == {"cancelled"}


def test_echo_gives_the_prompt_back():
    done = complete(FakeEngine("!"), prompt="Wörld 🌍", echo=True).json()
    assert done["choices"][0]["text"] == "Wörld 🌍!"
    assert done["choices"][0]["logprobs"] is None
    only = complete(FakeEngine("!"), prompt="Hi", echo=True, max_tokens=0).json()
    assert only["choices"][0]["text"] == "Hi"
    assert only["choices"][0]["finish_reason"] == "length"
    assert only["usage"]["completion_tokens"] == 0
    assert error_of(complete(FakeEngine(), max_tokens=0))["param"] == "max_tokens"


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_is_what_evaluations_read(max_tokens):
    """Parallel lists over prompt and reply; the first token follows nothing."""
    engine = FakeEngine("!")
    body = {
        "prompt": engine.tokenizer.encode("Hey ö"),
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
    }
    (choice,) = complete(engine, max_tokens=max_tokens, **body).json()["choices"]
    told = choice["logprobs"]
    count = 6 + max_tokens
    assert {len(told[name]) for name in told} == {count}
    assert told["tokens"][:4] == ["H", "e", "y", " "]
    assert told["token_logprobs"] == [None, *[-0.5] * (count - 1)]
    assert told["top_logprobs"][0] is None
    assert all(len(top) == 1 for top in told["top_logprobs"][1:])
    assert told["text_offset"] == [0, 1, 2, 3, 4, 4, *[5] * max_tokens]
    assert choice["text"] == "Hey ö" + "!" * max_tokens
    events = events_of(complete(engine, max_tokens=max_tokens, stream=True, **body).text)
    parts = [item["choices"][0] for item in events]
    assert "".join(part["text"] for part in parts) == choice["text"]
    streamed = [part["logprobs"] for part in parts if part["logprobs"]]
    joined = {name: [value for part in streamed for value in part[name]] for name in told}
    assert joined == told


def test_without_echo_the_prompt_is_not_scored():
    engine = FakeEngine("!")
    complete(engine, logprobs=2)
    assert engine.requests[0].prompt_logprobs is None
    complete(engine, logprobs=2, echo=True)
    assert engine.requests[1].prompt_logprobs == 2
