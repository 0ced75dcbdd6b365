"""Replies through shortlists are replies through whole rows: the engine of civetta-nano, both ways.

On a CPU an engine takes whole rows; here its model is given the lister that a GPU's has, in torch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from civetta.chat.answer_format import AnswerFormat
from civetta.chat.message import Conversation, text_message
from civetta.chat.template import TemplateOptions
from civetta.engine.client import ChatClient, ReplyOptions
from civetta.engine.load import load_engine
from civetta.engine.protocol import Finished, PromptLogprobs, TokenEvent
from civetta.engine.trunk_model import TrunkModel
from civetta.kernels.shortlist import reference
from civetta.options import CacheOptions, DraftingOptions, EngineOptions, ModelOptions, Settings
from civetta.types import SamplingOverrides

pytestmark = pytest.mark.timeout(120)

SAMPLED = {
    "greedy": {"temperature": 0.0},
    "presets": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "presence_penalty": 1.5},
    "open": {"temperature": 1.0},
    "min-p": {"temperature": 0.9, "min_p": 0.05, "repeat_penalty": 1.1},
}
SCHEMA = AnswerFormat(
    kind="json_schema",
    schema={"type": "object", "properties": {"a": {"enum": ["xy"]}}, "required": ["a"]},
)


@pytest.fixture(scope="module", params=["off", "mtp"])
def engine(request):
    settings = Settings(
        model=ModelOptions(threads=1, context=1024),
        engine=EngineOptions(sessions=3),
        cache=CacheOptions(cache="off"),
        drafting=DraftingOptions(speculative=request.param),
    )
    with load_engine(settings) as made:
        yield made


@pytest.fixture
def listing(monkeypatch):
    """Turns shortlists on; the list holds how many tokens each row of them was asked for."""
    asked = []

    def shortlists(logits_TV, *others):
        asked.append(len(logits_TV))
        return reference.shortlists(logits_TV, *others)

    def turn_on():
        monkeypatch.setattr(TrunkModel, "shortlists", property(lambda _: shortlists))
        return asked

    return turn_on


def replies(engine):
    """Ids and log-probabilities of one reply of each kind, three at a time."""
    client, streams = ChatClient(engine), []
    for i, (name, sampling) in enumerate(SAMPLED.items()):
        for bound in (None, SCHEMA):
            options = ReplyOptions(
                sampling=SamplingOverrides(seed=i, **sampling),
                max_tokens=24,
                logprobs=2 if name == "presets" else None,
                answer_format=bound,
                template=TemplateOptions(enable_thinking=False),
            )
            talk = Conversation(messages=(text_message("user", f"Count from {i} to 30."),))
            streams.append(engine.submit(client.prepare(talk, options).request))
    return [read(stream) for stream in streams]


def read(stream):
    events = list(stream)
    assert isinstance(events[-1], Finished)
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    return [t.token_id for t in tokens], [t.logprob for t in tokens]


def test_replies_are_the_same(engine, listing):
    whole = replies(engine)
    asked = listing()
    listed = replies(engine)
    assert [ids for ids, _ in listed] == [ids for ids, _ in whole]
    assert asked
    for (_, mine), (_, theirs) in zip(listed, whole, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert abs(a.logprob - b.logprob) < 1e-9
                assert [i for i, _ in a.top] == [i for i, _ in b.top]


def test_prompts_are_scored_from_whole_rows(engine, listing):
    """One request that wants its prompt's log-probabilities, beside others that do not."""
    client = ChatClient(engine)
    talk = Conversation(messages=(text_message("user", "What is 17+25?"),))
    greedy = ReplyOptions(sampling=SamplingOverrides(temperature=0.0), max_tokens=6)
    plain = client.prepare(talk, greedy).request

    def ask():
        scored = engine.submit(replace(plain, request_id="scored", prompt_logprobs=1))
        others = [engine.submit(plain) for _ in range(2)]
        found = [list(stream) for stream in (scored, *others)]
        told = [e.logprobs for e in found[0] if isinstance(e, PromptLogprobs)]
        return told, [[e.token_id for e in f if isinstance(e, TokenEvent)] for f in found]

    whole = ask()
    listing()
    assert ask() == whole
    assert sum(len(part) for part in whole[0]) == len(plain.prompt_ids) - 1
