"""What users of other servers reported, as requests in the Responses and in the Messages API."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from api import test_messages, test_responses
from api.serving import RawClient, anthropic_sdk, app_of, error_of, request, sdk
from api.test_dialect_streams import REPLIES, call, message_encoder, reply_events
from api.typed_events import message_of, response_of, typed_events
from civetta.options import ReasoningOptions
from civetta.types import FinishReason
from fake_engine import FakeEngine

SCHEMA = {
    "type": "object",
    "properties": {
        "number": {"type": "integer"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "text": {"type": "string"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
}


@dataclass
class Said:
    """A reply without its dialect."""

    thought: str = ""
    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    cut: bool = False
    payload: Any = None


class Responses:
    path = "/v1/responses"

    def ask(self, engine, *, tool=None, think=True, budget=4000, stream=False, **more):
        body = {"input": "Hi", "max_output_tokens": budget, "stream": stream, **more}
        if not think:
            body["reasoning"] = {"effort": "none"}
        if tool is not None:
            body["tools"] = [{"type": "function", "name": "f", "parameters": tool}]
        return request(app_of(engine), "POST", self.path, body=body)

    def said(self, reply, stream=False):
        payload = response_of(typed_events(reply.text)) if stream else reply.json()
        made = Said(payload=payload, cut=payload["status"] == "incomplete")
        for item in payload["output"]:
            made.kinds.append(item["type"])
            if item["type"] == "function_call":
                made.calls.append((item["name"], json.loads(item["arguments"])))
            elif item["type"] == "reasoning":
                made.thought += item["content"][0]["text"]
            else:
                made.text += item["content"][0]["text"]
        return made


class Messages:
    path = "/v1/messages"

    def ask(self, engine, *, tool=None, think=True, budget=4000, stream=False, **more):
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": budget, **more}
        body["stream"] = stream
        if think:
            body["thinking"] = {"type": "adaptive"}
        if tool is not None:
            body["tools"] = [{"name": "f", "input_schema": tool}]
        return request(app_of(engine), "POST", self.path, body=body)

    def said(self, reply, stream=False):
        payload = message_of(typed_events(reply.text)) if stream else reply.json()
        made = Said(payload=payload, cut=payload["stop_reason"] == "max_tokens")
        for block in payload["content"]:
            made.kinds.append(block["type"])
            made.thought += block.get("thinking", "")
            made.text += block.get("text", "")
            if block["type"] == "tool_use":
                made.calls.append((block["name"], block["input"]))
        return made


@pytest.fixture(params=[Responses(), Messages()], ids=["responses", "messages"])
def dialect(request):
    return request.param


def message_from(pieces):
    """The content of a streamed message whose text comes in these pieces."""
    encoder = message_encoder(shown=True)
    frames = b"".join(
        encoder.frames(item)
        for item in reply_events(pieces, thinking=True, reason=FinishReason.STOP)
    )
    return message_of(typed_events(frames.decode()))["content"]


def both_ways(dialect, text, **asked):
    """The reply to `text`, which has to be the same streamed and buffered."""
    whole = dialect.said(dialect.ask(FakeEngine(text), **asked))
    stream = dialect.said(dialect.ask(FakeEngine(text), stream=True, **asked), stream=True)
    for name in ("thought", "text", "calls", "kinds", "cut"):
        assert getattr(whole, name) == getattr(stream, name), name
    return whole


@pytest.mark.parametrize(
    "parameter", ["<parameter=\ntext>\nx\n</parameter>", "<parameter=text: [1]\n</parameter>"]
)
def test_case_16_malformed_parameters_leave_valid_arguments(dialect, parameter):
    text = f"</think>\n<tool_call>\n<function=f>\n{parameter}\n</function>\n</tool_call>"
    said = both_ways(dialect, text, tool=SCHEMA)
    assert [name for name, _ in said.calls] == ["f"]
    assert said.text == ""


def test_case_17_two_functions_in_one_block_are_two_calls():
    text = REPLIES["two functions in one block"]
    for size in (1, 3, len(text)):
        content = message_from([text[at : at + size] for at in range(0, len(text), size)])
        calls = [(block["name"], block["input"]) for block in content]
        assert calls == [("now", {}), ("weather", {"days": 7})]


def test_case_18_no_phantom_call_wherever_the_text_is_cut():
    text = "</think>\n" + call("now") + call("now") + "\n" + call("weather", days="2")
    calls = [("now", {}), ("now", {}), ("weather", {"days": 2})]
    for size in (1, 2, 4, *range(5, len(text), 7)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        content = message_from(pieces)
        assert [(block["name"], block["input"]) for block in content] == calls


def test_case_20_values_have_the_types_of_the_schema(dialect):
    values = {
        "number": "007",
        "flag": "true",
        "list": "[1,2]",
        "text": "007",
        "either": "null",
    }
    said = both_ways(dialect, "</think>\n" + call("f", **values), tool=SCHEMA)
    expected = {"number": 7, "flag": True, "list": [1, 2], "text": "007", "either": None}
    assert said.calls == [("f", expected)]
    empty = both_ways(dialect, "</think>\n" + call("f", text=""), tool=SCHEMA)
    assert empty.calls == [("f", {"text": ""})]


def test_case_23_a_call_in_a_thought_stays_thought(dialect):
    said = both_ways(dialect, f"Write {call('f')} now.\n</think>\n\nNo.", tool=SCHEMA)
    assert (said.calls, said.text) == ([], "No.")
    assert "<tool_call>" in said.thought


def test_case_26_a_call_after_a_thought_leaves_no_noise(dialect):
    said = both_ways(dialect, "Hm.\n</think>\n\n" + call("f"), tool=SCHEMA)
    assert (said.text, said.calls) == ("", [("f", {})])
    assert len(said.kinds) == 2


def test_case_28_a_cut_thought_is_no_answer(dialect):
    said = both_ways(dialect, "A long thought that never ends.", budget=12)
    assert (said.thought, said.text, said.cut) == ("A long thoug", "", True)


@pytest.mark.parametrize("kind", sorted(REPLIES))
def test_case_30_no_tag_fragment_in_any_channel(dialect, kind):
    said = both_ways(dialect, REPLIES[kind])
    assert "</think" not in said.thought + said.text or kind in ("thought only", "half a tag")


@pytest.mark.parametrize("effort", ["turbo", "", 3])
def test_case_33_unknown_efforts_are_400(dialect, effort):
    field_ = "reasoning" if dialect.path.endswith("responses") else "output_config"
    assert dialect.ask(FakeEngine(), **{field_: {"effort": effort}}).status_code == 400


def test_case_34_a_schema_binds_the_answer_behind_the_thought(dialect):
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {}}}
    engine = FakeEngine('Hm.\n</think>\n\n{"a": 1}')
    if dialect.path.endswith("responses"):
        reply = dialect.ask(engine, text={"format": {**form, "name": "n"}})
    else:
        reply = dialect.ask(engine, output_config={"format": form})
    said = dialect.said(reply)
    assert (said.thought, said.text) == ("Hm.", '{"a": 1}')
    assert engine.requests[0].thinking
    assert engine.requests[0].constraint.starts == "answer"


def test_case_35_what_is_left_out_is_the_default():
    prompts = []
    for body in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
        engine = FakeEngine("ok")
        Responses().ask(engine, **body)
        prompts.append(engine.requests[0].prompt_ids)
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("stop", ["beta gamma", "own fox", "\nUser:", "🦊"])
def test_case_37_stop_sequences_cut_exactly(stop):
    text = f"a quick br{stop} jumps"
    for stream in (False, True):
        reply = Messages().ask(FakeEngine(text), think=False, stop_sequences=[stop], stream=stream)
        said = Messages().said(reply, stream)
        assert said.text == "a quick br"
        assert said.payload["stop_sequence"] == stop
    held = both_ways(Messages(), "an own fo", think=False, stop_sequences=["own fox"])
    assert held.text == "an own fo"


@pytest.mark.parametrize("text", ["👩‍🚀 naïve 漢字 한글 🇩🇪", "ﷺ café 🏳️‍🌈"])
def test_case_39_no_replacement_characters(dialect, text):
    assert both_ways(dialect, text, think=False).text == text
    cut = both_ways(dialect, "ok 👩‍🚀", think=False, budget=5)
    assert cut.text.startswith("ok ")


@pytest.mark.parametrize("stream", [False, True])
def test_case_40_a_disconnect_ends_the_generation(dialect, stream):
    engine = FakeEngine("x" * 100_000)
    body = {"stream": stream, "max_tokens": 10**6, "messages": [{"role": "user", "content": "x"}]}
    if dialect.path.endswith("responses"):
        body = {"stream": stream, "input": "x"}

    async def run():
        client = RawClient(app_of(engine), dialect.path, body)
        task = asyncio.create_task(client.run())
        while not engine.requests:
            await asyncio.sleep(0)
        await client.disconnect()
        await asyncio.wait_for(task, 5)

    asyncio.run(run())
    assert engine.ended.acquire(timeout=5)
    assert engine.finished[0].reason is FinishReason.CANCELLED


def test_case_45_the_last_event_has_the_usage():
    last = typed_events(Responses().ask(FakeEngine("ok", cached_tokens=2), stream=True).text)[-1]
    usage = last["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 2
    assert last["response"]["timings"]["cache_n"] == 2
    events = typed_events(Messages().ask(FakeEngine("ok", cached_tokens=2), stream=True).text)
    begun, ended = events[0]["message"]["usage"], events[-2]["usage"]
    assert begun["input_tokens"] == ended["input_tokens"] == usage["input_tokens"] - 2
    assert begun["cache_read_input_tokens"] == ended["cache_read_input_tokens"] == 2
    assert (begun["output_tokens"], ended["output_tokens"]) == (0, 2)


def test_case_47_a_seed_reaches_the_engine(dialect):
    engine = FakeEngine("ok")
    for seed in (7, 7, None, None):
        assert dialect.ask(engine, seed=seed).status_code == 200
    seeds = [asked.sampling.seed for asked in engine.requests]
    assert seeds[:2] == [7, 7]
    assert len(set(seeds)) == 3


def test_case_51_budgets(dialect):
    engine = FakeEngine("ok")
    for budget, expected in ((None, None), (-1, None), (10**9, 10**9)):
        assert dialect.ask(engine, budget=budget).status_code == 200
        assert engine.requests[-1].max_tokens == expected
    assert dialect.ask(engine, budget=0).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_case_63_overflow_is_400_before_the_headers(stream):
    reply = Responses().ask(FakeEngine(context_tokens=20), stream=stream)
    assert reply.status_code == 400
    error = error_of(reply)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert "maximum context length is 20 tokens" in error["message"]
    assert (error["n_ctx"], error["n_prompt_tokens"] > 20) == (20, True)


def test_case_58_and_70_models_are_told_to_every_client():
    async def run():
        app = app_of(FakeEngine())
        async with sdk(app) as openai_client, anthropic_sdk(app) as anthropic_client:
            ours = [item async for item in openai_client.models.list()]
            theirs = [item async for item in anthropic_client.models.list()]
            one = await anthropic_client.models.retrieve("fake-model")
        return ours, theirs, one

    ours, theirs, one = asyncio.run(run())
    assert [item.id for item in ours] == [item.id for item in theirs] == ["fake-model"]
    assert ours[0].context_length == ours[0].max_model_len == ours[0].meta["n_ctx"] == 4096
    assert theirs[0].max_input_tokens == 4096
    assert (one.display_name, one.created_at.year) == ("fake-model", 2023)
    body = request(app_of(FakeEngine()), "GET", "/v1/models?client_version=0.150.0").json()
    codex = body["models"][0]
    assert (codex["slug"], codex["context_window"]) == ("fake-model", 4096)
    # Fields without a default in some version of Codex's ModelInfo: one missing voids the answer.
    needed = {
        "display_name",
        "supported_reasoning_levels",
        "shell_type",
        "visibility",
        "supported_in_api",
        "priority",
        "base_instructions",
        "supports_reasoning_summaries",
        "support_verbosity",
        "truncation_policy",
        "supports_parallel_tool_calls",
        "experimental_supported_tools",
    }
    assert needed <= set(codex)
    efforts = [level["effort"] for level in codex["supported_reasoning_levels"]]
    for effort in efforts:
        assert Responses().ask(FakeEngine("ok"), reasoning={"effort": effort}).status_code == 200


@pytest.mark.parametrize("cch", ["36ee5", "0a1b2"])
def test_case_12_a_billing_line_is_taken_out_whichever_api_it_comes_by(cch):
    line = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={cch};"
    user = {"role": "user", "content": "Hi"}
    parts = [{"type": "text", "text": text} for text in (line, "You are.")]

    def prompts(path, *bodies):
        engine = FakeEngine("ok")
        for body in bodies:
            assert request(app_of(engine), "POST", path, body=body).status_code == 200
        return {engine.tokenizer.decode(asked.prompt_ids) for asked in engine.requests}

    chat = prompts(
        "/v1/chat/completions",
        *(
            {"messages": [{"role": "system", "content": content}, user]}
            for content in (f"{line}\nYou are.", "You are.", parts)
        ),
    )
    ours = prompts(
        "/v1/responses",
        {"input": "Hi", "instructions": f"{line}\nYou are."},
        {"input": [{"role": "developer", "content": f"{line}\n\nYou are."}, user]},
        {"input": "Hi", "instructions": "You are."},
    )
    assert len(chat) == len(ours) == 1
    assert chat == ours


def test_case_15_thoughts_of_earlier_turns_go_where_they_are_not_kept():
    history = [
        {"role": "user", "content": "One"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm one."}]},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "Two"},
    ]

    def prompt(topics=None, **body):
        return test_responses.prompt_for(input=history, topics=topics, **body)

    assert "Hm one." in prompt()
    assert "Hm one." not in prompt({"reasoning": ReasoningOptions(preserve_thinking="off")})
    assert "Hm one." not in prompt(reasoning={"context": "current_turn"})
    assert "Hm one." in prompt(
        {"reasoning": ReasoningOptions(preserve_thinking="off")}, reasoning={"context": "all_turns"}
    )


def test_case_32_reasoning_may_be_absent_in_a_replay():
    prompt = test_messages.prompt_for(
        messages=[
            {"role": "user", "content": "One"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
        ],
        tools=[{"name": "f", "input_schema": {}}],
    )
    assert "<function=f>" in prompt
    assert "<tool_response>" in prompt
