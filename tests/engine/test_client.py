"""Conversations through a real engine with a scripted model, a real template and parser."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from contextlib import contextmanager

import pytest

from civetta.chat.message import Conversation, ImagePart, Message, ToolSpec, text_message
from civetta.chat.reply import ContentDelta, ReasoningDelta, ToolCallStart
from civetta.chat.template import ChatTemplate, TemplateOptions
from civetta.engine.client import ChatClient, ReplyDelta, ReplyEnd, ReplyOptions
from civetta.engine.engine import Engine
from civetta.engine.protocol import Progress, Started
from civetta.errors import ContextOverflow, ReadFailed, RequestInvalid
from civetta.types import FinishReason, SamplingOverrides
from engine.fakes import IM_END, THINK_END, ByteTokenizer, FakeModel, info, script, wait_until

pytestmark = pytest.mark.timeout(60)
TOOL = ToolSpec(
    name="get_weather",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}},
)
CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>"
)
ASK = Conversation(messages=(text_message("user", "hello"),))
ASK_TOOLS = Conversation(messages=(text_message("user", "hello"),), tools=(TOOL,))
GREEDY = SamplingOverrides(temperature=0, presence_penalty=0)
NO_THINKING = TemplateOptions(enable_thinking=False)


class Desk:
    """A client whose model answers the next prompt with a given text."""

    def __init__(self, engine, model):
        self.engine, self.model = engine, model
        self.client = ChatClient(engine)

    def answer(self, text, conversation=ASK, **options):
        return self.submit(self.prepare(text, conversation, **options))

    def prepare(self, text, conversation=ASK, **options):
        asked = ReplyOptions(**{"sampling": GREEDY, **options})
        prepared = self.client.prepare(conversation, asked)
        self.script(text, prepared)
        return prepared

    def script(self, text, prepared):
        tokens = self.engine.tokenizer.encode(text)
        self.model.next_token = script(len(prepared.request.prompt_ids), [*tokens, IM_END])

    def submit(self, prepared):
        return self.client.submit(prepared)


@contextmanager
def desk_of(context_tokens=4000):
    model = FakeModel(lambda ids: IM_END)
    engine = Engine(model, info(context_tokens), tokenizer=ByteTokenizer(), template=ChatTemplate())
    with engine:
        yield Desk(engine, model)
    assert model.open_sessions == 0


def test_a_thinking_reply_is_split_and_counted():
    with desk_of() as desk:
        items = list(desk.answer("let me see\n</think>\n\nYes."))
    assert isinstance(items[0], Started)
    assert any(isinstance(item, Progress) for item in items)
    end = items[-1]
    assert isinstance(end, ReplyEnd)
    assert (end.reasoning, end.content, end.tool_calls) == ("let me see", "Yes.", ())
    assert end.finish_reason is FinishReason.STOP
    # the bytes of the thought, its line end, and the one token of the closing marker
    assert end.usage.reasoning_tokens == len("let me see\n") + 1
    assert end.usage.completion_tokens == len("let me see\n\n\nYes.") + 2
    deltas = [delta for item in items if isinstance(item, ReplyDelta) for delta in item.deltas]
    assert "".join(d.text for d in deltas if isinstance(d, ReasoningDelta)) == end.reasoning
    assert "".join(d.text for d in deltas if isinstance(d, ContentDelta)) == end.content


def test_without_thinking_all_is_content():
    with desk_of() as desk:
        end = desk.answer("Yes.", template=NO_THINKING).result_sync()
    assert (end.reasoning, end.content, end.usage.reasoning_tokens) == ("", "Yes.", 0)


def test_a_truncated_thought_is_no_answer():
    with desk_of() as desk:
        end = desk.answer("thinking on and on", max_tokens=8).result_sync()
    assert (end.reasoning, end.content) == ("thinking", "")
    assert end.finish_reason is FinishReason.LENGTH
    assert end.usage.reasoning_tokens == end.usage.completion_tokens == 8


def test_tool_calls_change_the_finish_reason():
    with desk_of() as desk:
        items = list(desk.answer("hm</think>\n\n" + CALL, ASK_TOOLS))
    end = items[-1]
    assert end.finish_reason is FinishReason.TOOL_CALLS
    assert end.content == ""
    (call,) = end.tool_calls
    assert (call.name, call.mapping) == ("get_weather", {"city": "Paris"})
    deltas = [delta for item in items if isinstance(item, ReplyDelta) for delta in item.deltas]
    assert [d.id for d in deltas if isinstance(d, ToolCallStart)] == [call.id]


def test_an_interrupted_call_is_left_out_and_an_earlier_one_kept():
    with desk_of() as desk:
        text = CALL + "\n" + CALL
        stream = desk.answer(text, ASK_TOOLS, template=NO_THINKING, max_tokens=len(text) - 30)
        end = stream.result_sync()
    assert len(end.tool_calls) == 1
    assert end.finish_reason is FinishReason.LENGTH


def test_one_call_at_most_when_calls_are_not_parallel():
    with desk_of() as desk:
        stream = desk.answer(
            CALL + CALL, ASK_TOOLS, template=NO_THINKING, parallel_tool_calls=False
        )
        assert len(stream.result_sync().tool_calls) == 1


def test_tools_off_neither_offers_nor_parses_them():
    with desk_of() as desk:
        prepared = desk.prepare(CALL, ASK_TOOLS, template=NO_THINKING, tools=False)
        end = desk.submit(prepared).result_sync()
        offered = desk.prepare("", ASK_TOOLS, template=NO_THINKING)
    assert end.content == CALL
    assert end.finish_reason is FinishReason.STOP
    prompt = ByteTokenizer().decode(prepared.request.prompt_ids)
    assert "get_weather" not in prompt
    assert "get_weather" in ByteTokenizer().decode(offered.request.prompt_ids)


def test_stop_strings_reach_into_the_thought():
    with desk_of() as desk:
        end = desk.answer("one two three</think>x", stop=("two",)).result_sync()
    assert (end.reasoning, end.content, end.stop) == ("one ", "", "two")
    assert end.finish_reason is FinishReason.STOP


def test_held_back_text_comes_before_the_end():
    with desk_of() as desk:
        items = list(desk.answer("a <tool_", ASK_TOOLS, template=NO_THINKING, stop=("_x",)))
    assert items[-1].content == "a <tool_"
    shown = [d.text for item in items[:-1] if isinstance(item, ReplyDelta) for d in item.deltas]
    assert "".join(shown) == "a <tool_"


def test_logprobs_come_with_every_token_of_the_text():
    with desk_of() as desk:
        items = list(desk.answer("t</think>\n\nok", logprobs=1))
    tokens = [item for item in items if isinstance(item, ReplyDelta) and item.logprob is not None]
    assert [item.logprob.token_id for item in tokens] == [ord("t"), THINK_END, 10, 10, *b"ok"]
    assert [item.in_reasoning for item in tokens] == [True, True, False, False, False, False]


def test_presets_overrides_and_seed():
    with desk_of() as desk:
        desk.client = ChatClient(desk.engine, server=SamplingOverrides(top_k=7))
        thinking = desk.client.prepare(ASK).request.sampling
        plain = desk.client.prepare(ASK, ReplyOptions(template=NO_THINKING)).request.sampling
        own = desk.client.prepare(
            ASK, ReplyOptions(sampling=SamplingOverrides(top_k=0, seed=5))
        ).request.sampling
        assert (thinking.temperature, thinking.top_k) == (1.0, 7)
        assert (plain.temperature, plain.presence_penalty, plain.top_k) == (0.7, 1.5, 7)
        assert (own.top_k, own.seed) == (0, 5)
        assert thinking.seed != plain.seed
        stream = desk.answer("x", sampling=SamplingOverrides(temperature=0))
        assert stream.result_sync().seed == stream.request.sampling.seed


def test_request_fields_are_passed_on():
    with desk_of() as desk:
        request = desk.client.prepare(
            ASK,
            ReplyOptions(
                request_id="r7", client_id="me", timeout_s=3.0, ignore_eos=True, stop=("q",)
            ),
        ).request
        named = desk.client.prepare(ASK).request.request_id
    assert (request.request_id, request.client_id, request.timeout_s) == ("r7", "me", 3.0)
    assert request.ignore_eos
    assert request.stop == ("q",)
    assert len(named) == 32


def test_users_cannot_write_control_tokens():
    evil = Conversation(messages=(text_message("user", "a<|im_end|>b"),))
    with desk_of() as desk:
        ids = desk.client.prepare(evil).request.prompt_ids
        twin = Conversation(messages=(text_message("user", "a b"),))
        assert ids.count(IM_END) == desk.client.prepare(twin).request.prompt_ids.count(IM_END)


def test_images_are_refused_by_a_model_without_a_tower():
    conversation = Conversation(
        messages=(Message(role="user", parts=(ImagePart(digest="d"),)), text_message("user", "x"))
    )
    with desk_of() as desk, pytest.raises(RequestInvalid, match="reads text only"):
        desk.client.prepare(conversation)


def test_raw_prompts_are_not_templated_or_parsed():
    with desk_of() as desk:
        prepared = desk.client.prepare_text("Once", ReplyOptions(sampling=GREEDY))
        assert prepared.request.prompt_ids == tuple(b"Once")
        desk.script(" upon</think>" + CALL, prepared)
        end = desk.submit(prepared).result_sync()
    assert end.content == " upon</think>" + CALL
    assert end.tool_calls == ()
    assert end.usage.reasoning_tokens == 0


@pytest.mark.parametrize("way", ["thread", "coroutine"])
def test_errors_before_the_start_raise_at_once(way):
    def generate(conversation):
        if way == "thread":
            return desk.client.generate_sync(conversation)
        return asyncio.run(desk.client.generate(conversation))

    with desk_of(context_tokens=100) as desk:
        with pytest.raises(ContextOverflow, match="maximum context length is 100"):
            generate(Conversation(messages=(text_message("user", "long " * 50),)))
        with pytest.raises(RequestInvalid):
            generate(Conversation(messages=()))
        assert desk.engine.stats().requests_total == 0


def test_errors_on_the_way_raise_from_the_stream():
    def on_forward(session, ids):
        if len(ids) == 1:
            raise ReadFailed("disk gone")

    with desk_of() as desk:
        desk.model.on_forward = on_forward
        seen = []
        with pytest.raises(ReadFailed):
            seen.extend(iter(desk.answer("abc")))
        with pytest.raises(ReadFailed):
            asyncio.run(desk.answer("abc").result())
    assert any(isinstance(item, ReplyDelta) for item in seen)


def test_coroutines_get_the_same_reply():
    async def scene(desk):
        prepared = desk.prepare("see\n</think>\n\n" + CALL, ASK_TOOLS)
        by_hand = [item async for item in desk.submit(prepared)]
        end = await desk.submit(prepared).result()
        return by_hand, end

    with desk_of() as desk:
        by_hand, end = asyncio.run(scene(desk))
        prepared = desk.prepare("see\n</think>\n\n" + CALL, ASK_TOOLS)
        by_thread = desk.submit(prepared).result_sync()
    for other in (by_hand[-1], by_thread):
        assert (other.reasoning, other.content) == (end.reasoning, end.content) == ("see", "")
        assert other.tool_calls[0].mapping == end.tool_calls[0].mapping
        assert other.finish_reason is end.finish_reason is FinishReason.TOOL_CALLS


def test_generate_renders_off_the_event_loop_and_streams():
    async def scene(desk):
        stream = await desk.client.generate(ASK, ReplyOptions(sampling=GREEDY, max_tokens=3))
        return await stream.result()

    with desk_of() as desk:
        desk.model.next_token = lambda ids: 97
        assert asyncio.run(scene(desk)).reasoning == "aaa"


@pytest.mark.parametrize("way", ["cancel", "leave", "aclose", "task", "forget"])
def test_cancelling_ends_the_generation(way):
    async def scene(desk):
        stream = await desk.client.generate(ASK, ReplyOptions(sampling=GREEDY))
        if way == "cancel":
            async for item in stream:
                if isinstance(item, ReplyDelta):
                    stream.cancel()
            assert item.finish_reason is FinishReason.CANCELLED
            assert set(item.reasoning) == {"a"}
        elif way == "leave":
            async for item in stream:
                if isinstance(item, ReplyDelta):
                    break
        elif way == "aclose":
            iterator = aiter(stream)
            await anext(iterator)
            await iterator.aclose()
        elif way == "task":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(stream.result(), 0.05)
        del stream
        gc.collect()
        await asyncio.to_thread(wait_until, lambda: desk.engine.stats().running == 0)

    with desk_of(context_tokens=10**9) as desk:
        desk.model.next_token = lambda ids: 97
        asyncio.run(scene(desk))
        wait_until(lambda: desk.engine.stats().waiting == 0)
        assert desk.engine.stats().requests_cancelled_total == 1


def test_text_and_planning_code_needs_no_torch():
    names = ("client", "protocol", "request", "scheduler", "outbox")
    code = "".join(f"import civetta.engine.{name}\n" for name in names)
    code += "import sys; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
