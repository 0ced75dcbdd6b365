from __future__ import annotations

import asyncio
import base64

import anthropic
import pytest

from api.serving import RawClient, anthropic_sdk, app_of, request, server
from api.test_chat_completions import CALL, THOUGHT
from api.test_responses import TWO_CALLS, prompt_of
from api.typed_events import message_of, typed_events
from civetta.api.delivery import Pace
from civetta.errors import EngineBusy, ReadFailed
from civetta.options import ReasoningOptions
from civetta.types import SamplingParams
from fake_engine import FakeEngine

USER = {"role": "user", "content": "Hi"}
THINK = {"type": "enabled", "budget_tokens": 2000}
WEATHER = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def ask(engine, *, topics=None, path="", headers=None, pace=None, **body):
    body = {"messages": [USER], "max_tokens": 1000, **body}
    app = app_of(engine, pace, **(topics or {}))
    return request(app, "POST", f"/v1/messages{path}", body=body, headers=headers)


def error_of(reply):
    payload = reply.json()
    assert payload["type"] == "error"
    assert payload["request_id"] == reply.headers["X-Request-ID"]
    assert set(payload["error"]) == {"type", "message", "code", "param"}
    return payload["error"]


def prompt_for(**body):
    engine = FakeEngine("ok")
    reply = ask(engine, **body)
    assert reply.status_code == 200, reply.text
    return prompt_of(engine)


def told(message):
    """Blocks without ids and signatures."""
    return [
        {k: v for k, v in block.items() if k not in ("id", "signature")}
        for block in message["content"]
    ]


def test_anthropic_sdk_buffered():
    engine = FakeEngine(THOUGHT, cached_tokens=3)

    async def run():
        async with anthropic_sdk(app_of(engine)) as client:
            return await client.messages.create(
                model="fake-model",
                max_tokens=3000,
                system="Be brief.",
                messages=[USER],
                thinking=THINK,
                extra_body={"temperature": 0.5, "top_k": 7},
                metadata={"user_id": "u"},
            )

    done = asyncio.run(run())
    assert [block.type for block in done.content] == ["thinking", "text"]
    assert done.content[0].thinking == "Let me think."
    assert done.content[0].signature
    assert done.content[1].text == "Hello wörld 🌍"
    assert (done.stop_reason, done.stop_sequence) == ("end_turn", None)
    usage = done.usage
    assert usage.cache_read_input_tokens == 3
    assert usage.input_tokens + 3 == len(engine.requests[0].prompt_ids)
    assert usage.output_tokens_details.thinking_tokens == len("Let me think.\n") + 1
    assert engine.requests[0].max_tokens == 3000
    assert engine.requests[0].thinking_budget == 2000
    assert engine.requests[0].sampling.temperature == 0.5
    assert engine.requests[0].sampling.top_k == 7
    assert "\n\nBe brief.<|im_end|>" in prompt_of(engine)


@pytest.mark.parametrize("kind", ["enabled", "adaptive"])
def test_a_budget_of_thought_holds_with_each_kind_of_thinking(kind):
    engine = FakeEngine(THOUGHT)
    assert ask(engine, thinking={"type": kind, "budget_tokens": 7}).status_code == 200
    assert engine.requests[0].thinking_budget == 7


def test_anthropic_sdk_stream_gives_the_final_message():
    async def run():
        async with (
            anthropic_sdk(app_of(FakeEngine(TWO_CALLS, cached_tokens=2))) as client,
            client.messages.stream(
                model="fake-model",
                max_tokens=3000,
                messages=[USER],
                thinking={"type": "adaptive"},
                tools=[WEATHER],
            ) as stream,
        ):
            kinds = [item.type async for item in stream]
            return kinds, await stream.get_final_message()

    kinds, done = asyncio.run(run())
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.type for block in done.content] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
        "text",
    ]
    assert [block.input for block in done.content[2:4]] == [{"city": "Köln"}, {"city": "Ulm"}]
    assert done.content[2].id.startswith("toolu_")
    assert done.stop_reason == "tool_use"
    assert done.usage.cache_read_input_tokens == 2


@pytest.mark.parametrize("display", [None, "summarized", "omitted"])
def test_stream_and_buffer_say_the_same(display):
    body = {"tools": [WEATHER], "thinking": {"type": "adaptive", "display": display}}
    buffered = ask(FakeEngine(TWO_CALLS), **body).json()
    stream = ask(FakeEngine(TWO_CALLS), stream=True, **body)
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert "[DONE]" not in stream.text
    streamed = message_of(typed_events(stream.text))
    assert told(streamed) == told(buffered)
    assert streamed["content"][0]["signature"] == buffered["content"][0]["signature"]
    assert told(buffered) == [
        {"type": "thinking", "thinking": "" if display == "omitted" else "Hm."},
        {"type": "text", "text": "First"},
        {"type": "tool_use", "name": "weather", "input": {"city": "Köln"}},
        {"type": "tool_use", "name": "weather", "input": {"city": "Ulm"}},
        {"type": "text", "text": "\nthen this."},
    ]
    ignore = {"id", "content", "timings"}  # durations differ
    assert {k: v for k, v in streamed.items() if k not in ignore} == {
        k: v for k, v in buffered.items() if k not in ignore
    }


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_case_59_tools_go_around_and_render_as_they_were_sampled(display):
    engine = FakeEngine(CALL)
    body = {"tools": [WEATHER], "thinking": {"type": "adaptive", "display": display}}
    reply = ask(engine, **body).json()
    sampled = prompt_of(engine) + CALL
    call = reply["content"][-1]
    assert (call["type"], reply["stop_reason"]) == ("tool_use", "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "dry"}
    turns = [
        USER,
        {"role": "assistant", "content": reply["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    ask(engine, messages=turns, **body)
    prompt = prompt_of(engine)
    assert prompt.startswith(sampled + "<|im_end|>")
    rest = prompt.removeprefix(sampled)
    assert rest.index("<tool_response>\ndry\n</tool_response>") < rest.index("Well?")


def test_case_59_everything_that_claude_code_sends_is_taken():
    engine = FakeEngine(THOUGHT)
    reply = ask(
        engine,
        path="?beta=true",
        headers={
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        },
        model="fake-model",
        stream=True,
        system=[
            {
                "type": "text",
                "text": "You are Claude Code.",
                "cache_control": {"type": "ephemeral"},
            },
            {"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}},
                ],
            },
            {"role": "system", "content": "Agents: none."},
        ],
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "u"},
        tools=[{**WEATHER, "eager_input_streaming": True, "cache_control": {"type": "ephemeral"}}],
    )
    message = message_of(typed_events(reply.text))
    assert told(message)[-1] == {"type": "text", "text": "Hello wörld 🌍"}
    assert reply.headers["X-Civetta-Ignored"] == "context_management"
    prompt = prompt_of(engine)
    assert "You are Claude Code.\n\nRules.\n\nAgents: none.<|im_end|>" in prompt


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};\nYou are.",
        [
            {
                "type": "text",
                "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};",
            },
            {"type": "text", "text": "You are."},
        ],
    ],
)
def test_case_12_a_nonce_in_front_of_the_system_prompt_changes_nothing(system):
    def with_nonce(nonce):
        if isinstance(system, str):
            return system.replace("{}", nonce)
        first = {**system[0], "text": system[0]["text"].replace("{}", nonce)}
        return [first, *system[1:]]

    first, second = (prompt_for(system=with_nonce(nonce)) for nonce in ("36ee5", "0a1b2"))
    assert first == second == prompt_for(system="You are.")


def test_case_12_only_the_front_is_looked_at():
    line = "Say x-anthropic-billing-header: a; cch=b;"
    assert line in prompt_for(system=line)
    assert "x-anthropic" in prompt_for(messages=[{"role": "user", "content": line}])


def test_case_53_a_system_turn_amid_the_conversation_is_folded():
    prompt = prompt_for(
        system="A",
        messages=[
            USER,
            {"role": "system", "content": [{"type": "text", "text": "B"}]},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Go."},
            {"role": "system", "content": "C"},
        ],
    )
    assert prompt.count("<|im_start|>system") == 1
    assert prompt.index("A\n\nB\n\nC") < prompt.index("user\nHi")


def test_case_54_only_a_system_turn_is_a_clean_400():
    reply = ask(FakeEngine(), messages=[{"role": "system", "content": "A"}])
    assert reply.status_code == 400
    assert error_of(reply)["type"] == "invalid_request_error"


def test_counts_are_those_of_the_prompt():
    engine = FakeEngine("ok", context_tokens=900)
    body = {"system": "Be brief.", "tools": [WEATHER], "thinking": THINK}
    ask(engine, **body)
    reply = ask(engine, path="/count_tokens", **body)
    assert reply.json() == {"input_tokens": len(engine.requests[0].prompt_ids)}
    long = [{"role": "user", "content": "long " * 500}]
    assert ask(engine, path="/count_tokens", messages=long).json()["input_tokens"] > 900
    assert len(engine.requests) == 1
    assert error_of(ask(engine, path="/count_tokens", stream=True))["param"] == "stream"


def test_anthropic_sdk_counts():
    async def run():
        async with anthropic_sdk(app_of(FakeEngine())) as client:
            return await client.messages.count_tokens(model="fake-model", messages=[USER])

    assert asyncio.run(run()).input_tokens > 0


def test_without_thinking_there_is_none():
    engine = FakeEngine("ok")
    assert told(ask(engine).json()) == [{"type": "text", "text": "ok"}]
    assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")
    assert engine.requests[0].sampling == SamplingParams(
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        presence_penalty=1.5,
        seed=engine.requests[0].sampling.seed,
    )
    ask(engine, output_config={"effort": "high"})
    assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")
    ask(engine, topics={"reasoning": ReasoningOptions(think="on")})
    assert prompt_of(engine).endswith("<think>\n")
    ask(engine, topics={"reasoning": ReasoningOptions(think="on")}, thinking={"type": "disabled"})
    assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")


def test_effort_is_told_to_the_model():
    prompt = prompt_for(thinking={"type": "adaptive"}, output_config={"effort": "low"})
    assert "Reasoning effort: low" in prompt


def test_a_schema_binds_the_answer():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    engine = FakeEngine("ok")
    ask(engine, output_config={"format": {"type": "json_schema", "schema": schema}})
    constraint = engine.requests[0].constraint
    assert constraint.param == "output_config.format.schema"
    assert '"integer"' in constraint.grammar.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_named(stream):
    reply = ask(FakeEngine("one two three"), stop_sequences=["never", "two"], stream=stream)
    message = message_of(typed_events(reply.text)) if stream else reply.json()
    assert told(message) == [{"type": "text", "text": "one "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "two")


def test_a_cut_reply_says_max_tokens():
    reply = ask(FakeEngine("one two three"), max_tokens=5).json()
    assert told(reply) == [{"type": "text", "text": "one t"}]
    assert reply["stop_reason"] == "max_tokens"


def test_redacted_and_hosted_blocks_are_passed_over():
    engine = FakeEngine("ok")
    reply = ask(
        engine,
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "abc"},
                    {"type": "thinking", "thinking": "", "signature": "EqQBCgIYAhIM"},
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                    {"type": "text", "text": "Yes.", "citations": None},
                ],
            },
            {"role": "user", "content": "Go."},
        ],
    )
    ignored = reply.headers["X-Civetta-Ignored"]
    assert "messages[1].content[0] (redacted_thinking)" in ignored
    assert "messages[1].content[2] (server_tool_use)" in ignored
    assert "Yes.<|im_end|>" in prompt_of(engine)


def test_one_call_at_most_where_parallel_use_is_off():
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    reply = ask(FakeEngine(TWO_CALLS), tools=[WEATHER], tool_choice=choice).json()
    assert [block["type"] for block in reply["content"]].count("tool_use") == 1


@pytest.mark.parametrize(
    "choice",
    [{"type": "any"}, {"type": "tool", "name": "weather"}],
    ids=["any", "tool"],
)
def test_case_24_a_call_that_must_be_is_bound(choice):
    engine = FakeEngine(CALL)
    assert ask(engine, tools=[WEATHER], tool_choice=choice).status_code == 200
    constraint = engine.requests[0].constraint
    assert constraint.starts == "answer"
    assert "weather" in constraint.grammar.text
    unmet = ask(engine, tool_choice=choice)
    assert (error_of(unmet)["code"], error_of(unmet)["param"]) == ("invalid_tools", "tool_choice")


def test_no_choice_means_no_tools():
    assert "weather" not in prompt_for(tools=[WEATHER], tool_choice={"type": "none"})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"message": []}, "message"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages[1].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
            "messages[0].content[0].y",
        ),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}
                ]
            },
            "messages[0].content[0].source.type",
        ),
        ({"system": [{"type": "image", "text": ""}]}, "system[0]"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
        ({"output_config": {"effort": "turbo"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
        ({"output_config": {"length": 3}}, "output_config.length"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"temperature": 9}, "temperature"),
        ({"speed": "fast"}, "speed"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_what_is_wrong_is_named(body, param):
    reply = ask(FakeEngine(), **body)
    assert reply.status_code == 400
    error = error_of(reply)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_unknown_fields_can_be_passed_over():
    content = [{"type": "text", "text": "Hi", "mood": "good"}]
    reply = ask(
        FakeEngine("ok"),
        topics=server(unknown_fields="warn"),
        messages=[{"role": "user", "content": content}],
        tools=[{**WEATHER, "colour": "red"}],
        fancy=1,
    )
    ignored = sorted(reply.headers["X-Civetta-Ignored"].split(", "))
    assert ignored == ["fancy", "messages[0].content[0].mood", "tools[0].colour"]


def test_errors_are_anthropics_whoever_raises_them():
    app = app_of(FakeEngine(), **server(api_key=("k",), max_request_bytes=200))
    key = {"x-api-key": "k"}
    post = {"messages": [USER]}
    for reply, status, kind in (
        (request(app, "POST", "/v1/messages", body=post), 401, "authentication_error"),
        (request(app, "GET", "/v1/messages", headers=key), 405, "invalid_request_error"),
        (request(app, "GET", "/v1/messages/batches", headers=key), 404, "not_found_error"),
        (
            request(app, "POST", "/v1/messages", body={"system": "x" * 300}, headers=key),
            413,
            "request_too_large",
        ),
        (
            request(app, "POST", "/v1/messages", body={**post, "model": "x"}, headers=key),
            404,
            "not_found_error",
        ),
        (ask(FakeEngine(refuse=EngineBusy("Full."))), 429, "rate_limit_error"),
        (ask(None), 503, "overloaded_error"),
    ):
        assert (reply.status_code, error_of(reply)["type"]) == (status, kind)


def test_anthropic_sdk_brings_its_key_and_reads_errors():
    async def run(api_key, **body):
        app = app_of(FakeEngine("ok"), **server(api_key=("k",)))
        async with anthropic_sdk(app, api_key) as client:
            return await client.messages.create(
                model="fake-model", max_tokens=9, messages=[USER], **body
            )

    assert asyncio.run(run("k")).content[0].text == "ok"
    with pytest.raises(anthropic.AuthenticationError):
        asyncio.run(run("wrong"))
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        asyncio.run(run("k", extra_body={"temperature": 7}))


@pytest.mark.parametrize("stream", [False, True])
def test_case_63_a_prompt_that_does_not_fit_is_told_in_words_that_compact(stream):
    reply = ask(FakeEngine(context_tokens=20), stream=stream)
    assert reply.status_code == 400
    error = error_of(reply)
    assert error["message"].startswith("prompt is too long: ")
    assert "tokens > 20 maximum" in error["message"]
    assert error["code"] == "context_length_exceeded"


def test_a_late_failure_is_an_error_event():
    def fail(index):
        if index == 5:
            raise ReadFailed("The disk gave up.")

    reply = ask(FakeEngine("one two three", before_token=fail), stream=True)
    last = typed_events(reply.text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["error"]["message"] == "The disk gave up."


def test_silence_is_filled_with_ping_events():
    import threading

    go = threading.Event()
    engine = FakeEngine("ok", before_token=lambda index: go.wait(10))
    app = app_of(engine, Pace(ping_s=0.01, headers_after_s=0.01))

    async def run():
        body = {"messages": [USER], "max_tokens": 9, "stream": True}
        client = RawClient(app, "/v1/messages", body)
        task = asyncio.create_task(client.run())
        await client.until(lambda self: self.text.count('event: ping\ndata: {"type":"ping"}') > 1)
        go.set()
        await asyncio.wait_for(task, 5)
        return message_of(typed_events(client.text))

    assert told(asyncio.run(run())) == [{"type": "text", "text": "ok"}]


def test_an_omitted_thought_is_in_its_signature_alone():
    block = ask(FakeEngine(THOUGHT), thinking={"type": "adaptive", "display": "omitted"}).json()
    thought = block["content"][0]
    assert thought["thinking"] == ""
    carried = base64.b64decode(thought["signature"].rpartition(".")[2]).decode()
    assert carried == "Let me think."
