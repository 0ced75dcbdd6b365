"""Reports about prefix caches (cases.md A), over HTTP, on a small real model: reuse and exactness.

Each reply is compared with the one of a server without a cache.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

import pytest

from api.serving import RawClient, app_of, drafting_always, http, request
from civetta.engine.load import load_engine
from civetta.model.tiny import write_tiny
from civetta.options import CacheOptions, DraftingOptions, EngineOptions, ModelOptions, Settings

pytestmark = pytest.mark.timeout(120)
SYSTEM = {"role": "system", "content": "You are careful. " * 12}
FACTS = "One fact after another is told here, and none of them matters. "


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelOptions(model=str(write_tiny(tmp_path_factory.mktemp("tiny"))), threads=1)


@contextmanager
def serving(model, **topics):
    with load_engine(Settings(model=model, **topics)) as engine:
        yield app_of(engine)


@pytest.fixture
def warm(model):
    with serving(model, engine=EngineOptions(sessions=4)) as app:
        yield app


@pytest.fixture(scope="module")
def cold(model):
    with serving(model, cache=CacheOptions(cache="off")) as app:
        yield app


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def body_of(messages, **fields):
    return {
        "messages": messages,
        "max_tokens": 12,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
        **fields,
    }


def chat(app, messages, **fields):
    response = request(app, "POST", "/v1/chat/completions", body=body_of(messages, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def text_of(reply):
    return reply["choices"][0]["message"]["content"]


def cached(reply):
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def prompt_tokens(reply):
    return reply["usage"]["prompt_tokens"]


def assert_as_cold(reply, cold, messages, **fields):
    assert text_of(reply) == text_of(chat(cold, messages, **fields))


def test_case_1_a_second_turn_reuses_all_of_the_first(warm, cold):
    messages = [SYSTEM, user("First question.")]
    first = chat(warm, messages)
    turn = [*messages, assistant(text_of(first)), user("And now?")]
    second = chat(warm, turn)
    # the prompt's last tokens open the assistant's turn; all before them is the same text
    assert cached(second) >= prompt_tokens(first) - 8
    assert second["timings"]["cache_source"] == "ram"
    assert second["timings"]["prompt_n"] == prompt_tokens(second) - cached(second)
    assert_as_cold(second, cold, turn)


def test_case_2_short_prompts_are_reused_too(warm, cold):
    messages = [user("Hi")]
    first = chat(warm, messages)
    assert prompt_tokens(first) < 64
    turn = [*messages, assistant(text_of(first)), user("Yes?")]
    second = chat(warm, turn)
    assert cached(second) >= prompt_tokens(first) - 8
    assert_as_cold(second, cold, turn)


def test_case_4_an_inserted_block_keeps_what_is_before_it(warm, cold):
    blocks = [user(f"{letter} " + FACTS * 4) for letter in "AB"]
    inserted = user("C " + FACTS * 4)
    before = [SYSTEM, blocks[0], assistant("ok")]
    chat(warm, [*before, blocks[1]])
    messages = [*before, inserted, assistant("ok"), blocks[1]]
    reply = chat(warm, messages)
    # a state was kept where the message begins that was B and is C
    assert cached(reply) >= prompt_tokens(chat(warm, before, max_tokens=1)) - 24
    assert reply["timings"]["cache_miss_reason"] == "diverged"
    assert cached(reply) <= reply["timings"]["cache_miss_token"] <= cached(reply) + 24
    assert_as_cold(reply, cold, messages)


def test_case_4_a_block_of_tokens_amid_a_prompt_without_messages(warm, cold):
    """AAAABB, then AAAACBB, then AAAADBB, in blocks of 512 tokens."""
    a, b, c, d = ([token, *[token + 1] * 511] for token in (65, 67, 69, 71))
    fields = {"max_tokens": 4, "temperature": 0, "logprobs": 1}

    def complete(app, *blocks):
        body = {"prompt": [token for block in blocks for token in block], **fields}
        return request(app, "POST", "/v1/completions", body=body).json()

    complete(warm, a, a, a, a, b, b)
    for inserted in (c, d):
        found = complete(warm, a, a, a, a, inserted, b, b)
        wanted = complete(cold, a, a, a, a, inserted, b, b)
        assert cached(found) == 4 * 512
        assert found["choices"] == wanted["choices"]


def test_case_5_the_same_prompt_twice_and_a_prompt_that_ends_at_a_kept_state(warm, cold):
    messages = [SYSTEM, user("Twice.")]
    first = chat(warm, messages, logprobs=True, top_logprobs=3)
    again = chat(warm, messages, logprobs=True, top_logprobs=3)
    assert again["timings"]["prompt_n"] == 1
    assert cached(again) == prompt_tokens(again) - 1
    assert first["choices"] == again["choices"]
    assert first["choices"] == chat(cold, messages, logprobs=True, top_logprobs=3)["choices"]
    ids = list(range(1, 181))
    fields = {"max_tokens": 6, "temperature": 0, "logprobs": 2}
    request(warm, "POST", "/v1/completions", body={"prompt": ids, **fields})
    for length in (180, 179, 128, 64, 1):
        body = {"prompt": ids[:length], **fields}
        got = request(warm, "POST", "/v1/completions", body=body).json()
        want = request(cold, "POST", "/v1/completions", body=body).json()
        assert got["choices"] == want["choices"]
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] < length


def test_case_6_the_first_repeat_hits_with_a_draft_head_as_without(model, cold):
    messages = [SYSTEM, user(FACTS * 12)]
    mtp = DraftingOptions(speculative="mtp", draft_tokens=3)
    with serving(model) as plain, serving(model, drafting=mtp) as drafting:
        found = []
        for app in (plain, drafting):
            first, again = (chat(app, messages, max_tokens=24) for _ in range(2))
            assert cached(first) == 0
            assert prompt_tokens(again) > 700
            assert text_of(first) == text_of(again)
            found.append((text_of(first), cached(again)))
        assert found[0] == found[1]
        assert found[0][1] == prompt_tokens(again) - 1
        assert_as_cold(first, cold, messages, max_tokens=24)


def test_case_7_tools_a_long_prompt_and_a_hit_with_drafts_say_what_a_cold_server_says(
    model, cold, monkeypatch
):
    drafting_always(monkeypatch)
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    fields = {"tools": [{"type": "function", "function": function}], "max_tokens": 40}
    start = [SYSTEM, user(FACTS * 8 + "The word is plum. " + FACTS * 8)]
    drafting = DraftingOptions(speculative="mtp", draft_tokens=3)
    with serving(model, drafting=drafting) as app:
        first = chat(app, start, **fields)
        turn = [*start, assistant(text_of(first) or "."), user("What is the word?")]
        second = chat(app, turn, **fields)
    assert cached(second) >= prompt_tokens(first) - 8
    assert second["timings"]["draft_n"] > 0
    for reply, messages in ((first, start), (second, turn)):
        assert reply["choices"] == chat(cold, messages, **fields)["choices"]


@pytest.mark.parametrize("damaged", [False, True])
def test_case_9_a_restart_reuses_what_the_server_before_it_did(model, cold, tmp_path, damaged):
    messages = [SYSTEM, user("First question.")]
    disk = CacheOptions(cache_disk=str(tmp_path))
    with serving(model, cache=disk) as app:
        turn = [*messages, assistant(text_of(chat(app, messages))), user("And now?")]
    with serving(model) as app:  # what the next turn reuses without a restart
        chat(app, messages)
        wanted = cached(chat(app, turn))
    if damaged:
        for path in (tmp_path / "civetta-cache").rglob("*.run"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    with serving(model, cache=disk) as app:
        reply = chat(app, turn)
        again = chat(app, turn)
    assert wanted > 0
    assert cached(reply) == (0 if damaged else wanted)
    assert reply["timings"]["cache_source"] == ("none" if damaged else "disk")
    assert cached(again) == prompt_tokens(again) - 1
    assert_as_cold(reply, cold, turn)


@pytest.mark.parametrize("way", ["dropped", "dot"])
def test_case_10_an_interrupted_answer_keeps_the_state_before_it(way):
    """With the embedded model's tokens: its opening of an answer is as short as the release's."""
    messages = [user("Tell me a long story about a river.")]

    async def interrupt(app):
        # the hottest sampling there is: the story would go on for thousands of tokens
        body = body_of(messages, stream=True, max_tokens=8000, temperature=2, seed=1)
        client = RawClient(app, "/v1/chat/completions", body)
        task = asyncio.create_task(client.run())
        await client.until(lambda c: c.text.count('"content"') > 4, timeout_s=100)
        await client.disconnect()
        await task
        assert "[DONE]" not in client.text

    part = {"dropped": [], "dot": [assistant(".")]}[way]
    turn = [*messages, *part, user("Go on.")]
    embedded = ModelOptions(threads=1)
    with serving(embedded) as app:
        asyncio.run(interrupt(app))
        reply = chat(app, turn, max_tokens=3)
    with serving(embedded, cache=CacheOptions(cache="off")) as app:
        first = prompt_tokens(chat(app, messages, max_tokens=1))
        assert_as_cold(reply, app, turn, max_tokens=3)
    assert cached(reply) >= first - 16


def test_case_12_a_nonce_in_front_of_the_system_prompt_costs_nothing(warm, cold):
    def told(nonce, *more):
        line = f"x-anthropic-billing-header: cc_version=2.1.0; cch={nonce};"
        blocks = [{"type": "text", "text": text} for text in (line, SYSTEM["content"])]
        return [{"role": "system", "content": blocks}, user("First question."), *more]

    first = chat(warm, told("36ee5"))
    turn = told("91c0a", assistant(text_of(first)), user("And now?"))
    second = chat(warm, turn)
    assert cached(second) >= prompt_tokens(first) - 8
    assert_as_cold(second, cold, turn)


def test_case_14_agents_with_one_prefix_compute_it_once(warm, cold):
    prefix = [{"role": "system", "content": FACTS * 16}]
    tasks = [[*prefix, user(f"Task {number}")] for number in range(4)]

    async def together():
        async with http(warm) as client:
            posts = [
                client.post("/v1/chat/completions", json=body_of(messages), timeout=100)
                for messages in tasks
            ]
            return [response.json() for response in await asyncio.gather(*posts)]

    replies = asyncio.run(together())
    shared = min(prompt_tokens(reply) for reply in replies) - 40
    computed = sum(reply["timings"]["prompt_n"] for reply in replies)
    assert shared > 256
    assert computed <= shared + 4 * 80
    for messages, reply in zip(tasks, replies, strict=True):
        assert_as_cold(reply, cold, messages)


def test_case_15_the_state_from_before_a_tool_cycle_outlives_its_thoughts(warm, cold):
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "look", "arguments": "{}"},
    }
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    fields = {
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": True, "preserve_thinking": False},
    }
    start = [SYSTEM, user("Look.")]
    thought = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I look. " * 10,
        "tool_calls": [call],
    }
    cycle = [*start, thought, {"role": "tool", "tool_call_id": "c1", "content": "a wall"}]
    before = chat(warm, start, **fields)
    chat(warm, cycle, **fields)
    after = [*cycle, assistant("A wall."), user("Thanks. And now?")]
    reply = chat(warm, after, **fields)
    assert cached(reply) >= prompt_tokens(before) - 24
    assert_as_cold(reply, cold, after, **fields)


def test_the_reply_is_the_same_with_and_without_looking_things_up(warm):
    messages = [SYSTEM, user("Same?")]
    chat(warm, messages)
    hit, passed = chat(warm, messages), chat(warm, messages, cache_prompt=False)
    assert cached(hit) > 0
    assert cached(passed) == 0
    assert passed["timings"]["cache_miss_reason"] == "disabled"
    assert text_of(hit) == text_of(passed)
