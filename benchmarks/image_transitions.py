"""Whether images leave text as fast, and text images: decoding time in every order of requests.

    python benchmarks/image_transitions.py [--cycles 8] [--tokens 64]
        [--modes off,fixed,mtp] [--save FILE]

One step loop gets long texts and pictures by turns, in a circle that has every order of three
requests: text, text, text, images, images, images, text, images. Each of its requests is answered in
turn, step by step, with a loop that only ever sees this kind, in one thread; the ratio of their
decoding times a token goes to the order of the last three requests, and their replies have to be the
same.

Time is processor time. Without a cache, so that each request is computed. Runs the embedded model:
without drafts ("off"), with three drafts of its head a round ("fixed"), and with lengths chosen as when
serving ("mtp"). The last one learns from what rounds took, so that loops may choose differently; what
it learns from replies alone does not cross from one kind to the other
(tests/engine/test_image_lengths.py).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafting_bench import Bench
from drafting_turns import take_turns
from images import conversation

from civetta.model.embedded import embedded_model_path

if TYPE_CHECKING:
    from civetta.engine.loop import StepLoop

CIRCLE = ("text", "text", "text", "images", "images", "images", "text", "images")
BOUND = 1.03
FIXED_DRAFTS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--modes", default="off,fixed,mtp")
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    bench = Bench(str(embedded_model_path()), threads=1, context=4096, cpu_time=True)
    report: dict[str, Any] = {"cycles": a.cycles, "tokens": a.tokens}
    for mode in a.modes.split(","):
        report[mode] = measured(bench, mode, a.cycles, a.tokens)
        if a.save:
            a.save.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


def measured(bench: Bench, mode: str, cycles: int, tokens: int) -> dict[str, Any]:
    """What each order's last request took, against the loop that knows its kind alone."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with bench.engine(1, "off") as engine:
        asked = {kind: conversation(engine, kind, tokens) for kind in ("text", "images")}
    mixed, alone = made(bench, mode), {kind: made(bench, mode) for kind in asked}
    for kind, loop in alone.items():  # first requests bring weights and caches in
        take_turns((loop, mixed), 1, [asked[kind]])
    for cycle in range(cycles):
        for place, kind in enumerate(CIRCLE):
            pair = (mixed, alone[kind])
            before_s = [loop.stats().decode_s_total for loop in pair]
            take_turns(pair[:: 1 if cycle % 2 else -1], 1, [asked[kind]])
            mixed_ms, alone_ms = (
                1e3 * (loop.stats().decode_s_total - s) / tokens
                for loop, s in zip(pair, before_s, strict=True)
            )
            # Negative places reach back into the cycle before.
            order = (CIRCLE[place - 2], CIRCLE[place - 1], kind)
            if cycle or place >= 2:
                found[", ".join(order)].append((mixed_ms, alone_ms))
        print(mode, cycle, json.dumps(summary(found)), file=sys.stderr)
    return summary(found)


def made(bench: Bench, mode: str) -> StepLoop:
    """A step loop for one reply at a time."""
    if mode == "fixed":
        return bench.loop(1, "mtp", FIXED_DRAFTS, fixed=True)
    return bench.loop(1, mode)


def summary(found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """A line an order: mean ratio with twice its standard error, and the times' medians."""
    return {
        order: {
            "ratio": round(math.exp(mean), 4),
            "plus_minus": round(2 * error, 4),
            "median": round(statistics.median(mixed / alone for mixed, alone in times), 4),
            "within": math.exp(mean) <= BOUND,
            "mixed_ms": round(statistics.median(mixed for mixed, _ in times), 3),
            "alone_ms": round(statistics.median(alone for _, alone in times), 3),
            "ratios": [round(mixed / alone, 3) for mixed, alone in times],
        }
        for order, times in sorted(found.items())
        for mean, error in [_mean([math.log(mixed / alone) for mixed, alone in times])]
    }


def _mean(values: list[float]) -> tuple[float, float]:
    """The mean and its standard error; nan for one value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


if __name__ == "__main__":
    main()
