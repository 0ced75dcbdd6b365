from __future__ import annotations

import asyncio
import json

import pytest
from openai.types.responses import Response

from api.serving import app_of, error_of, request, sdk, server
from api.test_chat_completions import CALL, THOUGHT
from api.typed_events import response_of, told, typed_events
from civetta.options import ReasoningOptions, SamplingOptions
from civetta.types import SamplingParams
from fake_engine import FakeEngine

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TWO_CALLS = (
    "Hm.\n</think>\n\nFirst <tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>"
    "\n</function>\n</tool_call>\nthen this."
)


def ask(engine, *, topics=None, path="", **body):
    body = {"input": "Hi", **body}
    return request(app_of(engine, **(topics or {})), "POST", f"/v1/responses{path}", body=body)


def prompt_of(engine):
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids)


def prompt_for(**body):
    engine = FakeEngine("ok")
    response = ask(engine, **body)
    assert response.status_code == 200, response.text
    return prompt_of(engine)


def test_openai_sdk_buffered():
    engine = FakeEngine(THOUGHT, cached_tokens=3)

    async def run():
        async with sdk(app_of(engine)) as client:
            return await client.responses.create(
                model="fake-model",
                input="Hi",
                instructions="Be brief.",
                max_output_tokens=200,
                temperature=0.5,
                metadata={"a": "b"},
            )

    done = asyncio.run(run())
    assert isinstance(done, Response)
    assert done.output_text == "Hello wörld 🌍"
    assert done.status == "completed"
    assert [item.type for item in done.output] == ["reasoning", "message"]
    assert done.output[0].content[0].text == "Let me think."
    assert done.output[0].summary == []
    assert done.usage.input_tokens_details.cached_tokens == 3
    assert done.usage.output_tokens_details.reasoning_tokens == len("Let me think.\n") + 1
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    assert (done.temperature, done.top_p, done.max_output_tokens) == (0.5, 0.95, 200)
    assert (done.instructions, done.metadata, done.store) == ("Be brief.", {"a": "b"}, False)
    assert engine.requests[0].max_tokens == 200
    assert engine.requests[0].sampling.temperature == 0.5
    assert "\n\nBe brief.<|im_end|>" in prompt_of(engine)


def test_openai_sdk_stream_gives_the_final_response():
    async def run():
        async with (
            sdk(app_of(FakeEngine(TWO_CALLS))) as client,
            client.responses.stream(model="fake-model", input="Hi", tools=[WEATHER]) as stream,
        ):
            kinds = [item.type async for item in stream]
            return kinds, await stream.get_final_response()

    kinds, done = asyncio.run(run())
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert [item.type for item in done.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert done.output_text == "First\nthen this."
    assert json.loads(done.output[2].arguments) == {"city": "Köln"}
    assert json.loads(done.output[3].arguments) == {"city": "Ulm"}


@pytest.mark.parametrize("summary", [None, "auto"])
def test_stream_and_buffer_say_the_same(summary):
    body = {"tools": [WEATHER], "reasoning": {"summary": summary}}
    buffered = ask(FakeEngine(TWO_CALLS), **body).json()
    stream = ask(FakeEngine(TWO_CALLS), stream=True, **body)
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert "[DONE]" not in stream.text
    streamed = response_of(typed_events(stream.text))
    assert told(streamed["output"]) == told(buffered["output"])
    assert told(buffered["output"]) == [
        ("reasoning", "Hm."),
        ("message", "First"),
        ("function_call", "weather", '{"city": "Köln"}'),
        ("function_call", "weather", '{"city": "Ulm"}'),
        ("message", "\nthen this."),
    ]
    ignore = {"id", "created_at", "completed_at", "output", "timings"}
    assert {k: v for k, v in streamed.items() if k not in ignore} == {
        k: v for k, v in buffered.items() if k not in ignore
    }
    thought = buffered["output"][0]
    assert bool(thought["summary"]) == (summary is not None)
    assert ("content" in thought) == (summary is None)


def test_case_21_arguments_agree_in_all_events():
    events = typed_events(ask(FakeEngine(CALL), stream=True, tools=[WEATHER]).text)
    by_type = {item["type"]: item for item in events}
    arguments = '{"city": "Köln"}'
    assert by_type["response.function_call_arguments.delta"]["delta"] == arguments
    assert by_type["response.function_call_arguments.done"]["arguments"] == arguments
    item = by_type["response.output_item.done"]["item"]
    assert (item["name"], item["arguments"], item["status"]) == ("weather", arguments, "completed")
    assert item["call_id"].startswith("call_")
    assert by_type["response.completed"]["response"]["output"][-1] == item


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_reply_is_incomplete(stream):
    reply = ask(FakeEngine(THOUGHT), max_output_tokens=5, stream=stream)
    response = response_of(typed_events(reply.text)) if stream else reply.json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert told(response["output"]) == [("reasoning", "Let m")]
    if not stream:
        assert response["output"][0]["status"] == "incomplete"


def test_case_25_an_unfinished_call_is_omitted():
    engine = FakeEngine(TWO_CALLS)
    cut = TWO_CALLS.index("Ulm")
    tokens = len(engine.tokenizer.encode(TWO_CALLS[:cut]))
    response = ask(engine, tools=[WEATHER], max_output_tokens=tokens).json()
    assert response["status"] == "incomplete"
    assert told(response["output"])[-1] == ("function_call", "weather", '{"city": "Köln"}')


def test_a_late_failure_ends_the_stream_with_response_failed():
    from civetta.errors import ReadFailed

    def fail(index):
        if index == 20:
            raise ReadFailed("The disk gave up.")

    events = typed_events(ask(FakeEngine(THOUGHT, before_token=fail), stream=True).text)
    assert [item["sequence_number"] for item in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "The disk gave up."}
    assert told(response["output"])[0][1].startswith("Let me think")


def test_an_early_failure_is_a_plain_error():
    from civetta.errors import EngineBusy

    reply = ask(FakeEngine(refuse=EngineBusy("Full.")), stream=True)
    assert reply.status_code == 429
    assert error_of(reply)["code"] == "queue_full"


def test_history_renders_as_one_turn_with_its_thought():
    prompt = prompt_for(
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "I look."}],
                "encrypted_content": None,
            },
            {
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "id": "msg_1",
                "phase": "commentary",
                "content": [
                    {"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}
                ],
            },
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "weather",
                "arguments": '{"city": "Köln"}',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ],
        tools=[WEATHER],
    )
    assert prompt.count("<|im_start|>assistant") == 2
    assert "<think>\nI look.\n</think>\n\nWait.\n\n<tool_call>\n<function=weather>" in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt


def test_a_replayed_reply_renders_as_it_was_sampled():
    engine = FakeEngine(CALL)
    output = ask(engine, tools=[WEATHER]).json()["output"]
    sampled = prompt_of(engine) + CALL
    first = {"role": "user", "content": "Hi"}
    last = {"type": "function_call_output", "call_id": "x", "output": "dry"}
    again = prompt_for(input=[first, *output, last], tools=[WEATHER])
    assert again.startswith(sampled + "<|im_end|>")


def test_custom_tool_calls_of_another_server_are_read_as_calls():
    prompt = prompt_for(
        input=[
            {"role": "user", "content": "Patch it."},
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        ]
    )
    assert "<function=apply_patch>\n<parameter=input>\n*** x\n</parameter>" in prompt
    assert "<tool_response>\ndone\n</tool_response>" in prompt


def test_case_53_several_developer_and_system_turns_fold():
    prompt = prompt_for(
        instructions="A",
        input=[
            {"role": "developer", "content": "B"},
            {"role": "user", "content": "Hi"},
            {"role": "system", "content": "C"},
        ],
    )
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.count("<|im_start|>system") == 1
    assert prompt.index("A\n\nB\n\nC") < prompt.index("<|im_start|>user\nHi")


HOSTED = [
    {"type": "web_search", "external_web_access": True},
    {"type": "image_generation", "output_format": "png"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
    {"type": "local_shell"},
]


def test_case_56_hosted_tools_are_skipped_and_namespaces_used():
    shell = {"type": "function", "name": "shell", "strict": False, "parameters": {}}
    group = {"type": "namespace", "name": "mcp__w", "description": "", "tools": [WEATHER]}
    engine = FakeEngine(CALL)
    reply = ask(engine, tools=[shell, *HOSTED, group])
    assert reply.status_code == 200
    prompt = prompt_of(engine)
    assert '"shell"' in prompt
    assert '"weather"' in prompt
    assert "apply_patch" not in prompt
    assert "web_search" not in prompt
    ignored = reply.headers["X-Civetta-Ignored"]
    assert "tools[1] (web_search)" in ignored
    assert "tools[3] (custom)" in ignored
    call = reply.json()["output"][-1]
    assert (call["name"], call["namespace"]) == ("weather", "mcp__w")
    prompt = prompt_for(tools=[group], input=[{"role": "user", "content": "Hi"}, call])
    assert "<function=weather>" in prompt


@pytest.mark.parametrize("role", ["developer", "system"])
def test_a_picture_in_a_system_turn_is_named_by_its_item(role):
    png = "data:image/png;base64,AAAA"
    told = {"role": role, "content": [{"type": "input_image", "image_url": png}]}
    error = error_of(
        ask(FakeEngine(), instructions="I", input=[{"role": "user", "content": "x"}, told])
    )
    assert (error["code"], error["param"]) == ("invalid_messages", "input[1].content")


def test_a_name_in_two_namespaces_is_refused():
    groups = [{"type": "namespace", "name": name, "tools": [WEATHER]} for name in ("a", "b")]
    error = error_of(ask(FakeEngine(), tools=groups))
    assert (error["code"], error["param"]) == ("invalid_tools", "tools[1].tools[0].name")


CODEX = {
    "client_metadata": {"x-codex-installation-id": "1"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread",
    "store": False,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "stream": True,
}


def test_case_58_codex_extras_are_tolerated():
    reply = ask(FakeEngine(THOUGHT), tools=HOSTED, instructions="You are Codex.", **CODEX)
    response = response_of(typed_events(reply.text))
    assert response["status"] == "completed"
    assert response["output"][0]["summary"] == [{"type": "summary_text", "text": "Let me think."}]


@pytest.mark.parametrize("given", ["", [], None])
def test_case_58_an_empty_probe_is_answered(given):
    engine = FakeEngine("ok")
    reply = ask(engine, input=given, max_output_tokens=1)
    assert reply.status_code == 200
    assert reply.json()["status"] == "incomplete"
    assert engine.finished[0].usage.completion_tokens == 1


def test_case_58_stored_state_without_a_store_is_a_plain_400():
    for body in ({"previous_response_id": "resp_1"}, {"store": True}):
        reply = ask(FakeEngine(), **body)
        assert reply.status_code == 400
        error = error_of(reply)
        assert error["param"] == next(iter(body))
        assert "--store DIR" in error["message"]


def test_sampling_and_reasoning_reach_the_engine():
    engine = FakeEngine("ok")
    assert ask(engine, reasoning={"effort": "none"}, top_k=5, seed=9).status_code == 200
    assert engine.requests[0].sampling == SamplingParams(
        temperature=0.7, top_p=0.8, top_k=5, presence_penalty=1.5, seed=9
    )
    assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")
    topics = {
        "sampling": SamplingOptions(max_tokens=7),
        "reasoning": ReasoningOptions(think="off"),
    }
    ask(engine, topics=topics)
    assert engine.requests[1].max_tokens == 7
    assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")


def test_log_probabilities_belong_to_the_text():
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = ask(FakeEngine(THOUGHT), **body).json()["output"][1]["content"][0]
    raw = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
    assert raw.decode().strip() == part["text"]
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
    streamed = response_of(typed_events(ask(FakeEngine(THOUGHT), stream=True, **body).text))
    assert streamed["output"][1]["content"][0] == part


def test_truncation_drops_the_oldest_turns_and_nothing_else():
    turns = [
        {"role": role, "content": f"{role} {n} " + "x" * 200}
        for n in range(8)
        for role in ("user", "assistant")
    ]
    last = {"role": "user", "content": "last"}
    engine = FakeEngine("ok", context_tokens=1000)
    body = {"input": [*turns, last], "instructions": "Stay."}
    assert error_of(ask(engine, **body))["code"] == "context_length_exceeded"
    reply = ask(engine, truncation="auto", **body)
    assert reply.json()["truncation"] == "auto"
    prompt = prompt_of(engine)
    assert "Stay." in prompt
    assert "last<|im_end|>" in prompt
    kept = [n for n in range(8) if f"user {n} " in prompt]
    assert kept == list(range(kept[0], 8))
    assert kept == [n for n in range(8) if f"assistant {n} " in prompt]
    one_more = [*turns[2 * kept[0] - 2 :], last]
    assert ask(engine, **{**body, "input": one_more}).status_code == 400
    alone = {"role": "user", "content": "x" * 2000}
    assert ask(engine, truncation="auto", input=[*turns, alone]).status_code == 400


def test_input_tokens_are_those_of_the_prompt():
    engine = FakeEngine("ok")
    body = {"instructions": "Be brief.", "tools": [WEATHER]}
    ask(engine, **body)
    reply = ask(engine, path="/input_tokens", **body).json()
    tokens = len(engine.requests[0].prompt_ids)
    assert reply == {"object": "response.input_tokens", "input_tokens": tokens}
    assert len(engine.requests) == 1


def test_a_schema_binds_the_answer():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    engine = FakeEngine("ok")
    reply = ask(engine, text={"format": form, "verbosity": "low"})
    constraint = engine.requests[0].constraint
    assert json.loads(constraint.grammar.text)["properties"] == schema["properties"]
    assert constraint.starts == "answer"
    assert reply.json()["text"] == {"format": form, "verbosity": "low"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"inputs": "x"}, "inputs"),
        ({"input": [{"role": "user", "content": "x", "weight": 1}]}, "input[0].weight"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": 3}]}, "input[0].type"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0]",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]},
            "input[0].content[0].text",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": 1}]}, "tools[0].type"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["thoughts"]}, "include[0]"),
        ({"truncation": "middle"}, "truncation"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "turbo"}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ],
)
def test_what_is_wrong_is_named(body, param):
    reply = ask(FakeEngine(), **body)
    assert reply.status_code == 400
    assert error_of(reply)["param"] == param


def test_unknown_fields_can_be_passed_over():
    reply = ask(
        FakeEngine("ok"),
        topics=server(unknown_fields="warn"),
        fancy=1,
        input=[{"role": "user", "content": "Hi", "weight": 2}],
        tools=[{**WEATHER, "colour": "red"}],
    )
    assert reply.status_code == 200
    ignored = reply.headers["X-Civetta-Ignored"].split(", ")
    assert sorted(ignored) == ["fancy", "input[0].weight", "tools[0].colour"]


def test_allowed_tools_narrow_what_is_offered():
    other = {**WEATHER, "name": "other"}
    listed = [{"type": "function", "name": "other"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": listed}
    prompt = prompt_for(tools=[WEATHER, other], tool_choice=choice)
    assert '"other"' in prompt
    assert '"weather"' not in prompt


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [WEATHER]},
    ],
    ids=["required", "named", "allowed"],
)
def test_case_24_a_call_that_must_be_is_bound(choice):
    engine = FakeEngine(CALL)
    reply = ask(engine, tools=[WEATHER], tool_choice=choice)
    assert reply.json()["tool_choice"] == choice
    constraint = engine.requests[0].constraint
    assert constraint.starts == "answer"
    assert "weather" in constraint.grammar.text
    assert error_of(ask(engine, tool_choice=choice))["code"] == "invalid_tools"


def test_case_24_one_call_at_most_without_parallel_calls():
    reply = ask(FakeEngine(TWO_CALLS), tools=[WEATHER], parallel_tool_calls=False).json()
    assert [item["type"] for item in reply["output"]].count("function_call") == 1


def test_no_choice_means_no_tools():
    assert '"weather"' not in prompt_for(tools=[WEATHER], tool_choice="none")


def test_another_model_is_not_found():
    assert error_of(ask(FakeEngine(), model="gpt"))["code"] == "model_not_found"
