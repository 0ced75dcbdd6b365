"""Replies with drafts are replies without: tokens, text, log-probabilities, reasons, stop strings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from civetta.decode.lengths import Measured
from civetta.engine.protocol import GenerateRequest
from civetta.engine.speculation import Drafting, Speculation
from civetta.model.tiny import write_tiny
from civetta.types import FinishReason, SamplingParams
from engine.drafting import Bench, Prophet, replies, said
from engine.fakes import ManualClock

pytestmark = pytest.mark.timeout(120)
random = np.random.default_rng(8)
PROMPTS = [[int(i) for i in random.integers(0, 256, n)] for n in (5, 40, 57, 60, 63, 64, 90, 121)]
PROMPTS[1] = [*range(30, 50)] * 2  # repeats itself
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "warm": SamplingParams(temperature=0.7, seed=11, top_p=0.9),
    "filters and penalties": SamplingParams(
        temperature=1.0,
        seed=3,
        top_k=20,
        top_p=0.95,
        min_p=0.02,
        repeat_penalty=1.2,
        repeat_last_n=16,
        frequency_penalty=0.3,
        presence_penalty=0.5,
        logprobs=3,
    ),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(write_tiny(tmp_path_factory.mktemp("tiny")))


def asked(sampling, count=8, **fields):
    defaults = {"max_tokens": 14, "ignore_eos": True}
    return [
        GenerateRequest(
            request_id=f"r{i}",
            prompt_ids=tuple(prompt),
            sampling=sampling,
            **{**defaults, **fields},
        )
        for i, prompt in enumerate(PROMPTS[:count])
    ]


@pytest.fixture(scope="module")
def plain(bench):
    """Without drafting, one by one."""
    found = {}
    with bench.engine() as engine:
        for name, sampling in SAMPLINGS.items():
            found[name] = [replies(engine, [request])[0] for request in asked(sampling)]
    return found


def prophet(bench, outcomes, wrong_every=0):
    texts = [p + o["ids"] for p, o in zip(PROMPTS, outcomes, strict=False)]
    return Prophet(texts, bench.vocab, wrong_every)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    ("depth", "sessions", "count"), [(1, 1, 2), (7, 1, 2), (3, 4, 5), (7, 8, 8)]
)
def test_drafts_change_nothing(bench, plain, sampling, depth, sessions, count):
    """A head that is right mostly, one that is random, and the text itself."""
    requests, wanted = asked(SAMPLINGS[sampling], count), plain[sampling][:count]
    head = prophet(bench, wanted, wrong_every=5)
    kinds = [{"head": head}, {"mode": "lookup"}, {}]
    for options in kinds[:2] if count == 8 else kinds:
        with bench.engine(sessions=sessions, draft=depth, **options) as engine:
            assert said(replies(engine, requests)) == said(wanted)
            stats = engine.stats()
        if options.get("head"):
            assert stats.draft_tokens_accepted_total > stats.draft_tokens_total / 3 > 0


def test_a_right_draft_saves_launches(bench, plain):
    wanted = plain["greedy"]
    head = prophet(bench, wanted)
    with bench.engine(draft=7, head=head) as engine:
        (found,) = replies(engine, asked(SAMPLINGS["greedy"], 1))
        stats = engine.stats()
    usage = found["usage"]
    assert found["ids"] == wanted[0]["ids"]
    assert head.rounds == 2  # 1 token of the prefill, then 8 a round
    assert usage.draft_tokens == usage.draft_tokens_accepted == stats.draft_tokens_total == 7 + 4
    assert stats.draft_depths == usage.draft_depths == (*[(2, 2)] * 4, *[(1, 1)] * 3)
    assert stats.drafts_total == 2


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_lengths_that_adapt_change_nothing(bench, plain, sampling):
    for options in ({"mode": "lookup"}, {"head": prophet(bench, plain[sampling], 7)}):
        with bench.engine(sessions=4, draft=7, fixed=False, **options) as engine:
            assert said(replies(engine, asked(SAMPLINGS[sampling], 5))) == said(plain[sampling][:5])


def test_stop_strings_end_a_verified_draft(bench, plain):
    """The stop string lies in the middle of drafts that all stand."""
    for outcome, prompt in zip(plain["greedy"][:3], PROMPTS[:3], strict=True):
        stop = outcome["text"][6:8]
        assert stop
        request = GenerateRequest(
            request_id="x",
            prompt_ids=tuple(prompt),
            sampling=SAMPLINGS["greedy"],
            max_tokens=14,
            ignore_eos=True,
            stop=(stop,),
        )
        with bench.engine() as engine:
            wanted = replies(engine, [request])
        assert wanted[0]["reason"] is FinishReason.STOP
        with bench.engine(draft=7, head=prophet(bench, plain["greedy"])) as engine:
            assert said(replies(engine, [request])) == said(wanted)


def test_end_tokens_end_a_verified_draft(bench):
    """Some of these prompts reach an end token by sampling from all tokens."""
    hot = SamplingParams(temperature=2.0, seed=5)
    requests = asked(hot, max_tokens=30, ignore_eos=False)
    with bench.engine(sessions=8) as engine:
        wanted = replies(engine, requests)
    assert {one["reason"] for one in wanted} == {FinishReason.STOP, FinishReason.LENGTH}
    with bench.engine(sessions=8, draft=7, head=prophet(bench, wanted)) as engine:
        found = replies(engine, requests)
        assert said(found) == said(wanted)
        assert engine.stats().draft_tokens_accepted_total > 30


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 9])
def test_budgets_are_kept(bench, plain, max_tokens):
    with bench.engine(sessions=2, draft=7, head=prophet(bench, plain["greedy"])) as engine:
        found = replies(engine, asked(SAMPLINGS["greedy"], 3, max_tokens=max_tokens))
    for one, whole in zip(found, plain["greedy"], strict=False):
        assert one["ids"] == whole["ids"][:max_tokens]
        assert one["reason"] is FinishReason.LENGTH


@pytest.mark.parametrize("context", [66, 70, 129])
def test_the_context_ends_where_it_ends(bench, context):
    requests = [
        request
        for request in asked(SAMPLINGS["greedy"], max_tokens=None)
        if context - 40 < len(request.prompt_ids) < context
    ]
    with bench.engine(context=context) as engine:
        wanted = replies(engine, requests)
    with bench.engine(context=context, draft=7, head=prophet(bench, wanted)) as engine:
        assert said(replies(engine, requests)) == said(wanted)


def machine(row_s, step_s):
    """Calibration of a machine with these prices beside a launch of one second."""
    sizes = [(1, 1), (1, 4), (1, 8), (2, 2)]
    return tuple(
        tuple(Measured(sessions=s, rows=r, seconds=a + r * b) for s, r in sizes)
        for a, b in ((1.0, row_s), (0.001, step_s))
    )


def test_drafting_stops_where_it_does_not_pay_and_is_tried_again(bench, plain):
    requests = asked(SAMPLINGS["greedy"], 1, max_tokens=100)
    costs, still = machine(row_s=1.0, step_s=1.0), ManualClock()
    with bench.engine(draft=7, fixed=False, costs=costs, clock=still) as engine:
        (found,) = replies(engine, requests)
        assert engine.stats().drafts_total == 3  # at once, then ever later
        assert found["ids"][:14] == plain["greedy"][0]["ids"]


class Liar(Prophet):
    """Sure of a token that never comes, until `honest`."""

    honest = False

    def _logits(self, chain):
        logits_BV = super()._logits(chain)
        return logits_BV if self.honest else logits_BV.roll(1, dims=-1)


def talks(bench, users, tokens, turns):
    """Requests of each turn, all as long, and what is said without drafts."""
    asked_ = [
        [replace(one, request_id=f"{turn} {one.request_id}") for one in requests]
        for requests in [asked(SAMPLINGS["greedy"], users, max_tokens=tokens)]
        for turn in range(turns)
    ]
    with bench.engine(sessions=users) as engine:
        wanted = replies(engine, asked_[0])
    return asked_, wanted


@pytest.mark.parametrize("users", [1, 8])
def test_rows_that_useless_drafts_cost(bench, users):
    """Counted, with costs that never change: two replies of 60 tokens each, and no draft stands.

    A draft is a row of the launch and one of the head. Whoever is there at first may have a trial
    together; then one reply at a time is tried after 2, 4, 8, ... rounds, however many replies begin.
    """
    turns, wanted = talks(bench, users, tokens=60, turns=2)
    head = Liar([[*p, *w["ids"]] for p, w in zip(PROMPTS, wanted, strict=False)], bench.vocab)
    costs, still = machine(row_s=1.0, step_s=1.0), ManualClock()
    options = {"draft": 7, "fixed": False, "head": head, "costs": costs, "clock": still}
    with bench.engine(sessions=users, **options) as engine:
        for requests in turns:
            assert said(replies(engine, requests)) == said(wanted)
        stats = engine.stats()
    assert stats.draft_tokens_accepted_total == 0
    assert 2 <= head.rounds <= stats.draft_tokens_total <= users + 6


def on_a_made_machine(bench, head, costs, turns, users):
    """All turns where a launch takes 8 seconds and 0.5 a row, a draft step 1: texts, and stats."""
    clock = ManualClock()
    options = {"draft": 7, "fixed": False, "head": head, "costs": costs, "clock": clock}
    with bench.engine(sessions=users, **options) as engine:
        launch, step = engine._loop._model.forward_pieces, head._logits

        def forward(pieces):
            clock.now_s += 8.0 + 0.5 * sum(len(piece.ids) for piece in pieces)
            return launch(pieces)

        def drafted(chain):
            clock.now_s += 1.0
            return step(chain)

        engine._loop._model.forward_pieces, head._logits = forward, drafted
        found = [said(replies(engine, requests)) for requests in turns]
        return found, engine.stats()


def calibrated(launch_s, row_s):
    """A calibration by what a launch and a row of it seemed to take; a draft step took 1."""
    launches = [(1, 1), (1, 8), (2, 2)]
    steps = [(1, 1), (3, 3), (3, 6)]
    return (
        tuple(Measured(sessions=s, rows=r, seconds=launch_s + r * row_s) for s, r in launches),
        tuple(Measured(sessions=deep, rows=r, seconds=float(deep)) for deep, r in steps),
    )


def test_a_calibration_with_dear_rows_is_outgrown(bench):
    """Later replies take as few launches as after a good one; each text is the one without drafts."""
    turns, wanted = talks(bench, 1, tokens=100, turns=8)
    launches = {}
    for name, costs in {"good": calibrated(8.0, 0.5), "bad": calibrated(0.0, 8.5)}.items():
        taken = []
        for asked_ in (turns[:1], turns[:-3], turns):
            head = prophet(bench, wanted, wrong_every=12)
            found, stats = on_a_made_machine(bench, head, costs, asked_, 1)
            assert found == [said(wanted)] * len(asked_)
            taken.append(stats.decode_rounds_total)
        launches[name] = (taken[0], taken[2] - taken[1])  # of the first reply, of the last three
    assert launches["bad"][0] > 1.5 * launches["good"][0]
    assert launches["bad"][1] < 1.1 * launches["good"][1]


@pytest.mark.parametrize("users", [1, 4])
def test_a_useless_head_is_switched_off_where_rows_were_calibrated_for_nothing(bench, users):
    turns, wanted = talks(bench, users, tokens=100, turns=4)
    head = Liar([[*p, *w["ids"]] for p, w in zip(PROMPTS, wanted, strict=False)], bench.vocab)
    found, stats = on_a_made_machine(bench, head, calibrated(8.0, 1e-6), turns, users)
    assert found == [said(wanted)] * len(turns)
    assert stats.draft_tokens_accepted_total == 0
    assert 1 <= stats.drafts_total < 0.1 * stats.generated_tokens_total


def test_a_head_that_becomes_right_is_found_again(bench):
    """After a reply of which no draft stood, the next one's first trial comes, and is followed up."""
    (first, second), wanted = talks(bench, 1, tokens=100, turns=2)
    head = Liar([[*PROMPTS[0], *wanted[0]["ids"]]], bench.vocab)
    costs, still = machine(row_s=0.2, step_s=0.2), ManualClock()
    options = {"draft": 7, "fixed": False, "head": head, "costs": costs, "clock": still}
    with bench.engine(**options) as engine:
        assert said(replies(engine, first)) == said(wanted)
        assert engine.stats().draft_tokens_accepted_total == 0
        head.honest = True
        assert said(replies(engine, second)) == said(wanted)
        assert engine.stats().draft_tokens_accepted_total > 20


def test_lengths_grow_where_drafts_stand(bench, plain):
    head = prophet(bench, plain["greedy"])
    costs, still = machine(row_s=0.01, step_s=0.01), ManualClock()
    with bench.engine(draft=7, fixed=False, head=head, costs=costs, clock=still) as engine:
        (found,) = replies(engine, asked(SAMPLINGS["greedy"], 1))
    assert found["ids"] == plain["greedy"][0]["ids"]
    assert head.rounds <= 5  # thirteen tokens behind the first one


def test_a_fault_of_the_drafter_ends_drafting_alone(bench, plain):
    class Faulty(Prophet):
        def extend(self, chain, ids):
            raise ValueError("broken")

    with bench.engine(sessions=2, draft=5, head=Faulty([], bench.vocab)) as engine:
        assert said(replies(engine, asked(SAMPLINGS["warm"], 4))) == said(plain["warm"][:4])
        assert engine.stats().draft_tokens_total == 0


def test_page_shortage_stops_drafts_not_replies(bench, plain):
    """Two sessions' worth of pages in all, six requests: drafts take no page from anybody."""
    head = prophet(bench, plain["warm"])
    with bench.engine(sessions=6, context=146, draft=7, head=head) as engine:
        assert said(replies(engine, asked(SAMPLINGS["warm"], 6))) == said(plain["warm"][:6])


def test_rows_of_drafts_are_read_ahead(tmp_path, plain):
    """With the table on disk, a verified launch finds every row claimed."""
    bench = Bench(write_tiny(tmp_path), placement="disk")
    head = prophet(bench, plain["greedy"])
    with bench.engine(draft=7, head=head) as engine:
        before = bench.trunk._rows.stats()
        (found,) = replies(engine, asked(SAMPLINGS["greedy"], 1))
        after = bench.trunk._rows.stats()
    assert said([found]) == said(plain["greedy"][:1])
    assert after.claimed - before.claimed >= (1 + 7) + (1 + 4)  # two launches' tokens, one by one
    assert after.plain - before.plain <= 1  # the prompt, which nothing announced


def test_trials_behind_pictures_do_not_cost_text_its_own():
    """Rounds with drafts that lose, pictures among the replies: text's account is as it was."""
    planned = []
    speculation = Speculation(
        Drafting(mode="lookup", most=7), clock=ManualClock(), guard=planned.append
    )
    text, picture = (
        SimpleNamespace(key=key, request=SimpleNamespace(spec=SimpleNamespace(images=images)))
        for key, images in ((1, ()), (2, ("a picture",)))
    )

    def rounds_planned(jobs):
        before = len(planned)
        speculation.propose(jobs)
        return len(planned) - before

    while rounds_planned([text, picture]):
        speculation.finished(replies=2, tokens=2, seconds=100.0, drafted=True)
    assert not rounds_planned([picture])
    assert rounds_planned([text])
