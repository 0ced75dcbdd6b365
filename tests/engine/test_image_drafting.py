"""Drafts across images: replies are those without drafts, also right behind a picture."""

from __future__ import annotations

import pytest

import pictures
import tiny_vision
from civetta.chat.image_source import bytes_part
from civetta.chat.message import Conversation, Message, TextPart
from civetta.engine.client import ChatClient, ReplyOptions
from civetta.types import SamplingOverrides
from engine.drafting import Bench, Prophet, replies, said

pytestmark = pytest.mark.timeout(120)
RED, BLUE = (pictures.encoded(pictures.flat(96, 64, colour)) for colour in ("red", "blue"))
WIDE = pictures.encoded(pictures.noise(256, 32))
SAMPLINGS = {
    "greedy": SamplingOverrides(temperature=0),
    "penalties": SamplingOverrides(
        temperature=1.0, seed=3, top_k=20, top_p=0.95, min_p=0.02, repeat_penalty=1.2
    ),
}
ASKED = [
    ("What is ", RED, "?"),
    ("no picture at all",),
    (RED, BLUE),
    (WIDE, "and then ", RED, " and so on and so on and so on"),
    ("abc abc abc abc ", BLUE),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tiny_vision.write(tmp_path_factory.mktemp("tiny") / "model"))


def requests(engine, sampling):
    """One conversation each; the picture of `RED, BLUE` is the last thing before the reply opens."""
    options = ReplyOptions(sampling=SAMPLINGS[sampling], max_tokens=14, logprobs=2, ignore_eos=True)
    made = []
    for parts in ASKED:
        items = [
            TextPart(text=part) if isinstance(part, str) else bytes_part(part, index=1)
            for part in parts
        ]
        message = Message(role="user", parts=tuple(items))
        made.append(ChatClient(engine).prepare(Conversation(messages=(message,)), options).request)
    return made


@pytest.fixture(scope="module")
def plain(bench):
    """Without drafts, one by one."""
    with bench.engine() as engine:
        return {
            name: [(one, replies(engine, [one])[0]) for one in requests(engine, name)]
            for name in SAMPLINGS
        }


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("depth", "sessions"), [(1, 1), (7, 1), (3, 4)])
def test_drafts_change_nothing(bench, plain, sampling, depth, sessions):
    """A head that is mostly right, the model's own, which is random, and the text itself."""
    asked, wanted = zip(*plain[sampling], strict=True)
    texts = [[*one.prompt_ids, *reply["ids"]] for one, reply in plain[sampling]]
    for options in (
        {"head": Prophet(texts, bench.vocab, wrong_every=5)},
        {},
        {"mode": "lookup"},
    ):
        with bench.engine(sessions=sessions, draft=depth, **options) as engine:
            assert said(replies(engine, asked)) == said(wanted)
            stats = engine.stats()
        assert stats.draft_tokens_total > 0
        if "head" in options:
            assert stats.draft_tokens_accepted_total > stats.draft_tokens_total / 3


def test_a_reply_whose_first_drafts_are_an_image_away(bench, plain):
    """All drafts stand: each is verified in a launch whose positions an image has shifted."""
    (one, wanted), *_ = plain["greedy"]
    last = one.images[-1]
    assert len(one.prompt_ids) - (last.position + last.image.tokens) < 40
    head = Prophet([[*one.prompt_ids, *wanted["ids"]]], bench.vocab)
    with bench.engine(draft=7, head=head) as engine:
        (found,) = replies(engine, [one])
    assert said([found]) == said([wanted])
    assert found["usage"].draft_tokens == found["usage"].draft_tokens_accepted == 7 + 4
