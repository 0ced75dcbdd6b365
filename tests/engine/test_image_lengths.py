"""Chosen lengths of drafts follow a request's kind: what images showed leaves text as it was.

The machine is a made one: a clock that moves by what a launch and a draft step are said to take. On
it lengths follow from what drafts brought alone, so that they can be compared reply by reply.
"""

from __future__ import annotations

import pytest

import pictures
import tiny_vision
from civetta.chat.image_source import bytes_part
from civetta.chat.message import Conversation, Message, TextPart
from civetta.decode.lengths import Measured, plan_lengths
from civetta.engine import speculation
from civetta.engine.client import ChatClient, ReplyOptions
from civetta.types import SamplingOverrides
from engine.drafting import Bench, Prophet, replies
from engine.fakes import ManualClock

pytestmark = pytest.mark.timeout(120)
LAUNCH_S, ROW_S, DRAFTING_S, STEP_S = 1.0, 0.1, 0.01, 0.5
KINDS = ("text", "images")
SLOW = {"text": 3.0, "images": 1.0}
"""How much longer than calibrated a kind's launches take, as in long contexts."""
CIRCLE = ("text", "text", "text", "images", "images", "images", "text", "images") * 4


class Timed(Prophet):
    """A head that knows one text, and whose steps move the clock."""

    def __init__(self, text, vocab, clock):
        super().__init__([text], vocab)
        self.clock = clock

    def begin(self, sessions, next_ids):
        self.clock.now_s += DRAFTING_S
        return super().begin(sessions, next_ids)

    def _logits(self, chain):
        self.clock.now_s += STEP_S * len(chain.sessions)
        return super()._logits(chain)


def calibration():
    sizes = [(1, 1), (1, 4), (1, 8), (2, 2)]
    return tuple(
        tuple(Measured(sessions=s, rows=r, seconds=fixed + r * row) for s, r in sizes)
        for fixed, row in ((LAUNCH_S, ROW_S), (DRAFTING_S, STEP_S))
    )


def asked(engine, kind):
    parts = (TextPart(text="Tell me more. " * 6),)
    if kind == "images":
        parts = (bytes_part(pictures.encoded(pictures.flat(96, 64, "red")), index=1), *parts)
    options = ReplyOptions(
        sampling=SamplingOverrides(temperature=0), max_tokens=40, ignore_eos=True
    )
    message = Message(role="user", parts=parts)
    return ChatClient(engine).prepare(Conversation(messages=(message,)), options).request


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tiny_vision.write(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def plain(bench):
    """Prompt and reply of each kind without drafts."""
    with bench.engine(context=1024) as engine:
        requests = {kind: asked(engine, kind) for kind in KINDS}
        return {
            kind: [*one.prompt_ids, *replies(engine, [one])[0]["ids"]]
            for kind, one in requests.items()
        }


@pytest.fixture
def planned(monkeypatch):
    """Grows by one item with each plan of a round's lengths."""
    plans = []

    def plan(*args):
        plans.append(plan_lengths(*args))
        return plans[-1]

    monkeypatch.setattr(speculation, "plan_lengths", plan)
    return plans


def drafted(bench, text, order, planned=()):
    """By kind, what each reply of the order drafted and kept, by depth; the head knows one text.

    And how often its lengths were planned, where `planned` gets an item each time.
    """
    clock = ManualClock()
    head = Timed(text, bench.vocab, clock)
    options = {"fixed": False, "costs": calibration(), "clock": clock}
    with bench.engine(context=1024, draft=7, head=head, **options) as engine:
        model = engine._loop._model
        launch = model.forward_pieces

        def forward(pieces):
            rows = sum(len(piece.ids) for piece in pieces)
            clock.now_s += SLOW[kind] * LAUNCH_S + ROW_S * rows
            return launch(pieces)

        model.forward_pieces = forward
        found = {kind: [] for kind in KINDS}
        for kind in order:
            before = len(planned)
            (reply,) = replies(engine, [asked(engine, kind)])
            found[kind].append((reply["usage"].draft_depths, len(planned) - before))
    return found


@pytest.mark.parametrize("known", KINDS)
def test_each_kind_drafts_as_if_there_were_no_other(bench, plain, planned, known):
    """Drafts of the known kind all stand, those of the other hardly ever."""
    mixed = drafted(bench, plain[known], CIRCLE, planned)
    for kind in KINDS:
        alone = drafted(bench, plain[known], (kind,) * CIRCLE.count(kind), planned)
        assert mixed[kind] == alone[kind]
    other = KINDS[1 - KINDS.index(known)]
    tokens, useless = (
        sum(drawn for depths, _ in mixed[kind] for drawn, _ in depths) for kind in (known, other)
    )
    assert tokens > 8 * 20
    assert 0 < useless < tokens / 4
