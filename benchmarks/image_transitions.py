"""Whether images leave text as fast, and text images: decoding time in every order of requests.

    python benchmarks/image_transitions.py [--loops 6] [--cycles 2] [--tokens 64]
        [--modes off,fixed,mtp] [--save FILE]

One step loop gets long texts and pictures by turns, in a circle that has every order of three
requests: text, text, text, images, images, images, text, images. Each of its requests is answered
step by step in turn with two loops that only ever see this kind, in one thread. Of these two, one is
the measure and the other the null control: what its time over the measure's is besides 1 is not
what the other kind does, but how far two equal loops differ. Replies have to be the same.

Beside the times stand counts, which no busy machine moves: launches, rows in them, and tokens drafted
and accepted. With lengths chosen ("mtp") loops learn from what rounds took, so that two equal ones may
choose differently for as long as they live: each of `--loops` times all loops are new, and the means
are over these. What is learnt from replies alone does not cross from one kind to the other
(tests/engine/test_image_lengths.py).

Time is processor time. Without a cache, so that each request is computed. Runs the embedded model:
without drafts ("off"), with three drafts of its head a round ("fixed"), and as when serving ("mtp").
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from drafting_bench import Bench
from drafting_turns import answer
from images import conversation

from civetta.model.embedded import embedded_model_path

if TYPE_CHECKING:
    from collections.abc import Iterable

    from civetta.engine.loop import StepLoop
    from civetta.engine.protocol import EngineStats, GenerateRequest

CIRCLE = ("text", "text", "text", "images", "images", "images", "text", "images")
BOUND = 1.03
FIXED_DRAFTS = 3
LOOPS = ("mixed", "alone", "control")
COUNTS = ("launches", "rows", "drafted", "accepted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What one request cost each of LOOPS: decoding seconds [3] and COUNTS [3, 4]."""

    group: int  # which loops answered; each has its own
    order: str
    seconds_L: np.ndarray
    counts_LC: np.ndarray

    @property
    def kind(self) -> str:
        return self.order.rsplit(", ", 1)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loops", type=int, default=6)
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--modes", default="off,fixed,mtp")
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    bench = Bench(str(embedded_model_path()), threads=1, context=4096, cpu_time=True)
    with bench.engine(1, "off") as engine:
        asked = {kind: conversation(engine, kind, a.tokens) for kind in ("text", "images")}
    report: dict[str, Any] = {"loops": a.loops, "cycles": a.cycles, "tokens": a.tokens}
    found: dict[str, list[Answered]] = defaultdict(list)
    for group in range(a.loops):
        for mode in a.modes.split(","):
            found[mode] += group_of_loops(bench, mode, group, a.cycles, asked)
            report[mode] = summary(found[mode])
            print(mode, group, json.dumps(report[mode]["kinds"]), file=sys.stderr)
        if a.save:
            a.save.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


def group_of_loops(
    bench: Bench, mode: str, group: int, cycles: int, asked: dict[str, GenerateRequest]
) -> list[Answered]:
    """New loops, and what each request of so many circles cost them."""
    mixed = made(bench, mode)
    own = {kind: (made(bench, mode), made(bench, mode)) for kind in asked}
    for kind, pair in own.items():  # first requests bring weights and caches in
        answer([*pair, mixed], [asked[kind]])
    places = itertools.cycle(itertools.permutations(range(len(LOOPS))))
    found = []
    for cycle, (place, kind) in itertools.product(range(cycles), enumerate(CIRCLE)):
        loops = (mixed, *own[kind])
        before = [loop.stats() for loop in loops]
        answer([loops[i] for i in next(places)], [asked[kind]])
        after = [loop.stats() for loop in loops]
        if cycle or place >= 2:  # negative places reach back into the cycle before
            found.append(
                Answered(
                    group=group,
                    order=", ".join((CIRCLE[place - 2], CIRCLE[place - 1], kind)),
                    seconds_L=np.array(_seconds(after)) - np.array(_seconds(before)),
                    counts_LC=np.array(_counts(after)) - np.array(_counts(before)),
                )
            )
    return found


def made(bench: Bench, mode: str) -> StepLoop:
    """A step loop for one reply at a time."""
    if mode == "fixed":
        return bench.loop(1, "mtp", FIXED_DRAFTS, fixed=True)
    return bench.loop(1, mode)


def _seconds(stats: Iterable[EngineStats]) -> list[float]:
    return [one.decode_s_total for one in stats]


def _counts(stats: Iterable[EngineStats]) -> list[list[int]]:
    return [
        [
            one.decode_rounds_total,
            one.decoded_rows_total + one.draft_tokens_total,
            one.draft_tokens_total,
            one.draft_tokens_accepted_total,
        ]
        for one in stats
    ]


# ---- figures ----------------------------------------------------------------------------------------


def summary(answers: list[Answered]) -> dict[str, Any]:
    """By kind and by order of three requests: ratios to the loop that is the measure."""
    by_kind: dict[str, list[Answered]] = defaultdict(list)
    by_order: dict[str, list[Answered]] = defaultdict(list)
    for one in answers:
        by_kind[one.kind].append(one)
        by_order[one.order].append(one)
    return {
        "kinds": {kind: _figures(own) for kind, own in sorted(by_kind.items())},
        "orders": {order: _figures(own) for order, own in sorted(by_order.items())},
    }


def _figures(answers: list[Answered]) -> dict[str, Any]:
    seconds_NL = np.array([one.seconds_L for one in answers])
    counts_LC = np.array([one.counts_LC for one in answers]).mean(axis=0)
    groups = np.array([one.group for one in answers])
    figures: dict[str, Any] = {"requests": len(answers)}
    for loop in ("mixed", "control"):
        log_N = np.log(seconds_NL[:, LOOPS.index(loop)] / seconds_NL[:, LOOPS.index("alone")])
        ratio, plus_minus = _mean_of_groups(log_N, groups)
        figures[f"{loop}/alone"] = {
            "ratio": ratio,
            "plus_minus": plus_minus,
            "median": round(float(np.exp(np.median(log_N))), 4),
            "within": ratio <= BOUND,
        }
    figures["a_request"] = {
        loop: {"ms": round(1e3 * ms, 1), **dict(zip(COUNTS, row, strict=True))}
        for loop, ms, row in zip(
            LOOPS,
            np.median(seconds_NL, axis=0).tolist(),
            counts_LC.round(2).tolist(),
            strict=True,
        )
    }
    return figures


def _mean_of_groups(log_N: np.ndarray, groups_N: np.ndarray) -> tuple[float, float]:
    """Geometric mean of the groups' means, and twice its standard error; nan for one group."""
    means = [float(log_N[groups_N == group].mean()) for group in np.unique(groups_N)]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
    return round(math.exp(statistics.fmean(means)), 4), round(2 * error, 4)


if __name__ == "__main__":
    main()
