"""Replies that obey a grammar or a budget are the same with drafts, company, cache and restarts."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace

import pytest

from civetta.chat.message import ToolSpec
from civetta.chat.reply import ReplyParser, assemble
from civetta.chat.tool_grammar import call_tail_grammar, calls_grammar
from civetta.engine.engine import Engine
from civetta.engine.protocol import GenerateRequest
from civetta.errors import RequestInvalid
from civetta.model.tiny import write_tiny
from civetta.types import Constraint, FinishReason, Grammar, SamplingParams
from engine.drafting import Bench, outcome, replies, said
from engine.fakes import ByteTokenizer, FakeModel, ask, babble, info
from engine.snapshot_cache import SnapshotCache

pytestmark = pytest.mark.timeout(120)
TOOLS = (
    ToolSpec(
        name="go",
        parameters={
            "properties": {
                "far": {"type": "integer", "minimum": 0, "maximum": 99},
                "where": {"enum": ["up", "down"]},
            },
            "required": ["where"],
        },
    ),
    ToolSpec(name="stop"),
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["age", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def of(kind, text, **more):
    return Constraint(grammar=Grammar(kind=kind, text=text), **more)


JSON = of("json_schema", json.dumps(SCHEMA))
WORD = of("regex", "[a-f]{3,9}(,[0-9]{1,4}){2}")
CALLS = of("lark", calls_grammar(TOOLS, many=False))
AUTO = of("lark", call_tail_grammar(TOOLS), starts="call", calls_max=2)
WARM = SamplingParams(temperature=1.0, seed=5, top_k=30, top_p=0.98)
GREEDY = SamplingParams(temperature=0)
FUSSY = SamplingParams(
    temperature=1.2, seed=8, min_p=0.01, repeat_penalty=1.3, frequency_penalty=0.4, logprobs=2
)
BIASED = SamplingParams(
    temperature=0.8, seed=6, presence_penalty=1.0, logit_bias=((65, 9.0), (66, -100.0), (67, 8.5))
)
ASKED = [
    {"constraint": JSON, "sampling": WARM},
    {"constraint": WORD, "sampling": GREEDY},
    {"constraint": CALLS, "sampling": FUSSY},
    {"constraint": JSON, "sampling": FUSSY, "thinking": True, "thinking_budget": 6},
    {"constraint": AUTO, "sampling": WARM, "max_tokens": 40},
    {"thinking": True, "thinking_budget": 3, "sampling": BIASED, "max_tokens": 14},
    {"constraint": WORD, "sampling": WARM, "stop": (",",)},
    {"constraint": CALLS, "sampling": GREEDY, "thinking": True, "thinking_budget": 0},
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(write_tiny(tmp_path_factory.mktemp("tiny")))


def requests(prompt_tokens=70):
    """The first of them share a prefix, so that a cache has something to give."""
    prefix = [(7 * i) % 250 for i in range(prompt_tokens)]
    return [
        GenerateRequest(
            request_id=f"r{i}",
            prompt_ids=(*prefix, *range(i + 1)),
            **{"max_tokens": 120, **fields},
        )
        for i, fields in enumerate(ASKED)
    ]


@pytest.fixture(scope="module")
def plain(bench):
    """One by one, without drafts or cache."""
    with bench.engine() as engine:
        return [replies(engine, [request])[0] for request in requests()]


def test_replies_are_texts_of_their_grammars(plain):
    by_number = dict(enumerate(plain))
    for number in (0, 3):
        whole = by_number[number]
        assert whole["reason"] is FinishReason.STOP
        parser = ReplyParser(thinking=number == 3)
        answer = assemble([*parser.push(whole["text"]), *parser.finish()]).content
        value = json.loads(answer)
        assert 0 <= value["age"] <= 150
        assert value["kind"] in ("cat", "dog")
        assert set(value) <= {"name", "age", "kind"}
    assert re.fullmatch(WORD.grammar.text, by_number[1]["text"])
    assert re.fullmatch("[a-f]{3,9}", by_number[6]["text"])  # the stop string cut it
    assert by_number[6]["stop"] == ","
    for number in (2, 7):
        parser = ReplyParser(thinking=number == 7, tools=TOOLS, exact=True)
        reply = assemble([*parser.push(by_number[number]["text"]), *parser.finish()])
        assert reply.content == ""
        (call,) = reply.tool_calls
        assert call.name == "stop" or call.mapping["where"] in ("up", "down")


def test_logprobs_tell_what_the_model_thought_and_come_with_each_token(plain):
    told = plain[2]["logprobs"]
    assert len([entry for entry in told if entry is not None]) == len(plain[2]["ids"]) - 1
    assert any(
        entry.token_id not in [token_id for token_id, _ in entry.top] for entry in told[:-1]
    ), "a grammar makes a model say what it finds unlikely"


@pytest.mark.parametrize(
    ("drafts", "sessions", "cached"),
    [
        (None, 8, True),
        ("mtp", 1, False),
        ("mtp", 3, True),
        ("lookup", 8, False),
        ("lookup", 3, True),
    ],
)
def test_drafts_company_and_cache_change_nothing(bench, plain, drafts, sessions, cached):
    draft = None if drafts is None else 5
    options = {"sessions": sessions, "draft": draft, "mode": drafts or "mtp"}
    with bench.engine(cache=SnapshotCache(every=20) if cached else None, **options) as engine:
        assert said(replies(engine, requests())) == said(plain)
        if cached:
            assert said(replies(engine, requests()[:3])) == said(plain[:3])
            assert engine.stats().cached_tokens_total > 0


def test_drafts_that_know_the_text_stand_within_grammars(bench, plain):
    """Looked up in a prompt that holds the very replies."""
    ids = [
        request.prompt_ids + tuple(one["ids"])
        for request, one in zip(requests(), plain, strict=True)
    ]
    longer = [
        replace(request, prompt_ids=(*ids[i], *request.prompt_ids))
        for i, request in enumerate(requests())
    ]
    with bench.engine() as engine:
        wanted = replies(engine, longer)
    with bench.engine(sessions=4, draft=6, mode="lookup") as engine:
        assert said(replies(engine, longer)) == said(wanted)
        assert engine.stats().draft_tokens_total > 0


def test_a_reply_that_is_put_back_goes_on_where_it_was():
    """A launch of several that fails once: all compute their states again, none begins anew."""
    asked_for = [
        ask("abc", request_id="a", constraint=WORD, max_tokens=40),
        ask("xyz", request_id="b", thinking=True, thinking_budget=6, max_tokens=40),
        ask("uvw", request_id="c", constraint=CALLS, max_tokens=120),
    ]
    failures = []

    def run(fault):
        everybody_asked = threading.Event()  # else a slow machine has two in the launch that fails

        def on_forward(session, ids):
            assert everybody_asked.wait(60)
            fault(session, ids, len(model.launches[-1]))

        model = FakeModel(babble, on_forward=on_forward)
        with Engine(model, info(), tokenizer=ByteTokenizer(), template=None) as engine:
            streams = [engine.submit(request) for request in asked_for]
            everybody_asked.set()
            ends = [outcome(list(stream)) for stream in streams]
            return said(ends), engine.stats().put_back_total

    def fail_once(session, ids, parts):
        if parts == 3 and len(session.ids) > 8 and not failures:
            failures.append(ids)
            raise RuntimeError("torn")

    wanted, never = run(lambda *_: None)
    assert never == 0
    assert run(fail_once) == (wanted, 3)
    assert failures


def test_a_grammar_and_ignore_eos_contradict_each_other(bench):
    with bench.engine() as engine, pytest.raises(RequestInvalid, match="ignore_eos"):
        engine.submit(replace(requests()[0], ignore_eos=True))


def test_a_budget_goes_with_ignore_eos(bench):
    request = replace(requests()[5], ignore_eos=True)
    with bench.engine() as engine:
        wanted = outcome(list(engine.submit(request)))
    with bench.engine(draft=5, mode="lookup") as engine:
        assert said([outcome(list(engine.submit(request)))]) == said([wanted])
    assert wanted["reason"] is FinishReason.LENGTH


def test_a_bad_grammar_is_refused_before_it_is_queued(bench):
    bad = replace(requests()[0], constraint=of("regex", "(", param="response_format.regex"))
    with bench.engine() as engine:
        with pytest.raises(RequestInvalid) as caught:
            engine.submit(bad)
        assert engine.stats().requests_total == 0
    assert caught.value.param == "response_format.regex"
