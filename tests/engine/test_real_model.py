"""The engine on the tiny real model: what a reply must not depend on."""

from __future__ import annotations

import pytest

from civetta.chat.message import Conversation, text_message
from civetta.engine.client import ChatClient, ReplyOptions
from civetta.engine.load import load_engine
from civetta.engine.protocol import TokenEvent
from civetta.model.tiny import write_tiny
from civetta.options import EngineOptions, ModelOptions, Settings
from civetta.types import SamplingOverrides, SamplingParams
from engine.fakes import ask

pytestmark = pytest.mark.timeout(120)
PROMPT = list(range(1, 151))
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=7, repeat_penalty=1.1, presence_penalty=1)


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    model = ModelOptions(model=str(write_tiny(tmp_path_factory.mktemp("tiny"))), threads=1)
    return lambda **options: load_engine(Settings(model=model, engine=EngineOptions(**options)))


def tokens_of(stream):
    return [event.token_id for event in stream if isinstance(event, TokenEvent)]


@pytest.fixture(scope="module")
def alone(engine_of):
    with engine_of() as engine:
        return tokens_of(engine.submit(ask(PROMPT, sampling=SEEDED, max_tokens=24)))


@pytest.mark.parametrize("batch", [1, 7, 64, 100])
def test_prefill_chunk_does_not_change_a_sampled_reply(engine_of, alone, batch):
    with engine_of(prefill_batch=batch) as engine:
        assert tokens_of(engine.submit(ask(PROMPT, sampling=SEEDED, max_tokens=24))) == alone


def test_company_does_not_change_a_sampled_reply(engine_of, alone):
    with engine_of(sessions=3, prefill_batch=32, prefill_chunk=16) as engine:
        request = ask(PROMPT, sampling=SEEDED, max_tokens=24)
        other = ask(PROMPT[:90], sampling=SEEDED, max_tokens=40)
        streams = [engine.submit(spec) for spec in (other, request, other, request)]
        replies = [tokens_of(stream) for stream in streams]
    assert replies[1] == replies[3] == alone
    assert replies[0] == replies[2] != alone


def test_a_conversation_end_to_end(engine_of):
    conversation = Conversation(messages=(text_message("user", "Say something."),))
    options = ReplyOptions(sampling=SamplingOverrides(seed=1), max_tokens=20)
    with engine_of() as engine:
        client = ChatClient(engine)
        first = client.generate_sync(conversation, options).result_sync()
        second = client.generate_sync(conversation, options).result_sync()
    assert first.usage.completion_tokens <= 20
    assert (first.reasoning, first.content) == (second.reasoning, second.content)
