"""Rows from measurements, and what is said when outputs differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from civetta.bench.case import Case
from civetta.bench.phases import PHASES
from civetta.bench.result import Outputs, make_rows
from civetta.bench.run import Measurement, Output, Sample
from civetta.bench.usage import Usage

FACTS = {
    "model": "m", "model_bytes": 1, "parameters": 2, "format": "f", "device": "cpu",
    "backend": "b", "dtype": "f32", "threads": 1, "prefill_batch": 64, "speculative": "off",
}  # fmt: skip


def subject(label: str) -> Any:
    return SimpleNamespace(label=label, facts=lambda: dict(FACTS))


def sample(seconds: float, *hashes: str, phases_s: dict[str, float] | None = None) -> Sample:
    output = Output(ids=hashes, logits=tuple(h + "!" for h in hashes))
    return Sample(seconds=seconds, output=output, phases_s=phases_s or {})


def measured(label: str, *samples: Sample, sessions: int = 1, usage: Usage | None = None) -> Any:
    case = Case(kind="decode", tokens=10, depth=5, sessions=sessions)
    return Measurement(case=case, subject=subject(label), samples=samples, usage=usage)


def test_rates_are_of_all_sessions_and_ratios_pair_by_pair() -> None:
    a = measured("A", sample(1.0, "x", "y"), sample(2.0, "x", "y"), sessions=2)
    b = measured("B", sample(0.5, "x", "y"), sample(4.0, "x", "y"), sessions=2)
    first, second = make_rows([a, b], Outputs())
    assert (first.rate_min, first.rate_mean, first.rate_max) == (10.0, 15.0, 20.0)
    assert first.session_rate == 7.5
    assert first.ratio_median is None
    assert (second.ratio_min, second.ratio_max, second.ratio_median) == (0.5, 2.0, 1.25)
    assert first.seconds == (1.0, 2.0)
    assert first.test == "tg10 @ d5"


def test_what_was_watched_is_in_the_row() -> None:
    usage = Usage(rss_peak_bytes=7, device_peak_bytes=8, threads_peak=9)
    parts = [dict.fromkeys(PHASES, 0.5), dict.fromkeys(PHASES, 1.5)]
    samples = [sample(1.0, "x", phases_s=part) for part in parts]
    (row,) = make_rows([measured("A", *samples, usage=usage)], Outputs())
    assert (row.rss_peak_bytes, row.device_peak_bytes, row.threads_peak) == (7, 8, 9)
    assert row.phases_s == dict.fromkeys(PHASES, 1.0)


def test_equal_outputs_are_no_matter_how_many_sessions() -> None:
    outputs = Outputs()
    make_rows([measured("A", sample(1.0, "x"))], outputs)
    (row,) = make_rows([measured("A", sample(1.0, "x", "y"), sessions=2)], outputs)
    assert row.same_output
    assert outputs.differences == []
    assert not outputs.contradicted


def test_replies_that_draft_tell_no_logits_and_are_compared_by_ids() -> None:
    def drafted(ids: str) -> Sample:
        return Sample(
            seconds=1.0, output=Output(ids=(ids,), logits=("",)), phases_s={}, drafts=(9, 4)
        )

    same, other = Outputs(), Outputs()
    a, b = make_rows(
        [
            measured("A", sample(1.0, "x"), sample(1.0, "x")),
            measured("B", drafted("x"), drafted("x")),
        ],
        same,
    )
    assert a.same_output
    assert b.same_output
    assert not same.contradicted
    assert (a.draft_tokens, b.draft_tokens, b.draft_tokens_accepted) == (None, 18, 8)
    _, b = make_rows([measured("A", sample(1.0, "x")), measured("B", drafted("y"))], other)
    assert not b.same_output


def test_another_setting_may_differ_and_it_is_said() -> None:
    outputs = Outputs()
    a, b = make_rows([measured("A", sample(1.0, "x")), measured("B", sample(1.0, "z"))], outputs)
    assert (a.same_output, b.same_output) == (True, False)
    assert not outputs.contradicted
    assert outputs.differences == [
        "tg10 @ d5 with 1 sessions, setting B: the output of session 0 differs from that of the"
        " other setting."
    ]


@pytest.mark.parametrize(
    "found",
    [
        [measured("A", sample(1.0, "x"), sample(1.0, "z"))],
        [
            measured("A", sample(1.0, "x")),
            measured("A", sample(1.0, "x", "y"), sample(1.0, "x", "w"), sessions=2),
        ],
        [measured("B", sample(1.0, "x")), measured("B", sample(1.0, "z", "y"), sessions=2)],
    ],
)
def test_a_setting_that_differs_from_itself_is_a_contradiction(found: list[Any]) -> None:
    outputs = Outputs()
    rows = [make_rows([one], outputs)[0] for one in found]
    assert not rows[-1].same_output
    assert outputs.contradicted
    assert "an earlier run of the same setting" in outputs.differences[0]
