"""`Row`: one line of results, the same fields in every format; and the check of equal outputs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from civetta.bench.phases import PHASES
from civetta.bench.spread import Spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from civetta.bench.run import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case with one setting. Rates are tokens a second of all sessions together, over the
    repetitions; `session_rate` is one session's share. `ratio_*` compares with setting A, pair by
    pair: this rate over A's of the same turn. Hashes are those of the first session; `same_output`
    says whether every session's agree with setting A, with all repetitions, and with the same
    session among fewer. What was not asked for is None.
    """

    test: str
    setting: str
    kind: str
    tokens: int
    depth: int
    sessions: int
    repetitions: int
    rate_mean: float
    rate_median: float
    rate_min: float
    rate_max: float
    rate_sd: float
    session_rate: float
    seconds_mean: float
    seconds: tuple[float, ...]
    ratio_median: float | None
    ratio_mean: float | None
    ratio_min: float | None
    ratio_max: float | None
    ratio_sd: float | None
    ids_sha256: str
    logits_sha256: str
    same_output: bool
    depth_reached_by: str
    model: str
    model_bytes: int
    parameters: int
    format: str
    device: str
    backend: str
    dtype: str
    threads: int
    prefill_batch: int
    rss_peak_bytes: int | None
    device_peak_bytes: int | None
    threads_peak: int | None
    phases_s: dict[str, float] | None
    speculative: str
    draft_tokens: int | None
    draft_tokens_accepted: int | None


FIELDS = tuple(field.name for field in fields(Row))


class Outputs:
    """What came out of every case so far, by case and session, to say where two runs disagree."""

    def __init__(self) -> None:
        self._first: dict[tuple[object, ...], tuple[str, str]] = {}
        self._own: dict[tuple[object, ...], tuple[str, str]] = {}
        self.contradicted = False
        self.differences: list[str] = []

    def agrees(self, found: Measurement) -> bool:
        """Whether a measurement's outputs are those seen before; notes it when they are not."""
        case, label = found.case, found.subject.label
        places = []
        for sample in found.samples:
            for session, hashes in enumerate(
                zip(sample.output.ids, sample.output.logits, strict=True)
            ):
                key = (case.kind, case.tokens, case.depth, session)
                itself = _same(self._own.setdefault((*key, label), hashes), hashes)
                self.contradicted |= not itself
                if not itself or not _same(self._first.setdefault(key, hashes), hashes):
                    places.append((session, itself))
        if places:
            session, itself = places[0]
            other = "the other setting" if itself else "an earlier run of the same setting"
            self.differences.append(
                f"{case.name} with {case.sessions} sessions, setting {label}: the output of"
                f" session {session} differs from that of {other}."
            )
        return not places


def _same(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether ids are equal, and logits where both have any: replies that draft tell none."""
    return one[0] == other[0] and (one[1] == other[1] or "" in (one[1], other[1]))


def make_rows(found: Sequence[Measurement], outputs: Outputs) -> list[Row]:
    """Rows of one case, one a setting."""
    return [_row(one, found[0], outputs.agrees(one)) for one in found]


def _row(found: Measurement, base: Measurement, same_output: bool) -> Row:
    case, samples, usage = found.case, found.samples, found.usage
    rate = Spread.of(found.rates)
    ratio = None
    if found is not base:
        ratio = Spread.of([b / a for a, b in zip(base.rates, found.rates, strict=True)])
    facts: dict[str, Any] = found.subject.facts()
    return Row(
        test=case.name,
        setting=found.subject.label,
        kind=case.kind,
        tokens=case.tokens,
        depth=case.depth,
        sessions=case.sessions,
        repetitions=len(samples),
        rate_mean=rate.mean,
        rate_median=rate.median,
        rate_min=rate.low,
        rate_max=rate.high,
        rate_sd=rate.sd,
        session_rate=rate.mean / case.sessions,
        seconds_mean=Spread.of([s.seconds for s in samples]).mean,
        seconds=tuple(s.seconds for s in samples),
        ratio_median=None if ratio is None else ratio.median,
        ratio_mean=None if ratio is None else ratio.mean,
        ratio_min=None if ratio is None else ratio.low,
        ratio_max=None if ratio is None else ratio.high,
        ratio_sd=None if ratio is None else ratio.sd,
        ids_sha256=samples[0].output.ids[0],
        logits_sha256=samples[0].output.logits[0],
        same_output=same_output,
        depth_reached_by="prefill once, then forks" if case.depth else "",
        rss_peak_bytes=None if usage is None else usage.rss_peak_bytes,
        device_peak_bytes=None if usage is None else usage.device_peak_bytes,
        threads_peak=None if usage is None else usage.threads_peak,
        phases_s=_mean_phases([s.phases_s for s in samples]),
        draft_tokens=_drafts(found, 0),
        draft_tokens_accepted=_drafts(found, 1),
        **facts,
    )


def _drafts(found: Measurement, which: int) -> int | None:
    counts = [sample.drafts[which] for sample in found.samples if sample.drafts is not None]
    return sum(counts) if counts else None


def _mean_phases(samples: Iterable[dict[str, float]]) -> dict[str, float] | None:
    kept = [phases for phases in samples if phases]
    if not kept:
        return None
    return {name: Spread.of([phases[name] for phases in kept]).mean for name in PHASES}
