"""Whether images leave text as fast, and text images: decoding time in every order of requests.

    python benchmarks/image_transitions.py [--cycles 8] [--tokens 64]
        [--modes off,fixed,mtp] [--save FILE]

One engine gets long texts and pictures by turns, in a circle that has every order of three requests:
text, text, text, images, images, images, text, images. Each of its requests runs at the same time as
the same request on an engine that only ever sees this kind; the ratio of their decoding times a token
goes to the order of the last three requests, and their replies have to be the same.

Time is the step threads' processor time, one thread each. Side by side the two suffer alike from
whatever else the machine does: the same request against itself gave ratios that spread by 1.4 % side
by side and by 10.6 % one after the other, with sixteen programs on two cores. Without a cache, so that
each request is computed. Runs the embedded model: without drafts ("off"), with three drafts of its
head a round ("fixed"), and with lengths chosen as when serving ("mtp"). The last one learns from every
reply what drafts bring, so that engines with different pasts choose differently.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafting_bench import Bench, run_all
from images import conversation

from civetta.model.embedded import embedded_model_path

if TYPE_CHECKING:
    from civetta.engine.engine import Engine
    from civetta.engine.protocol import GenerateRequest

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
    """What each order's last request took, against the engine that knows its kind alone."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    replies: dict[str, list[int]] = {}
    with made(bench, mode) as mixed, made(bench, mode) as text:  # noqa: SIM117
        with made(bench, mode) as images:
            alone = {"text": text, "images": images}
            asked = {kind: conversation(mixed, kind, tokens) for kind in alone}
            for kind, engine in alone.items():  # first requests bring weights and caches in
                side_by_side((mixed, engine), asked[kind])
            for cycle in range(cycles):
                for place, kind in enumerate(CIRCLE):
                    pair = (mixed, alone[kind]) if cycle % 2 else (alone[kind], mixed)
                    first, second = side_by_side(pair, asked[kind])
                    assert first[1] == second[1] == replies.setdefault(kind, first[1]), (
                        "a reply depends on what came before"
                    )
                    times = (first[0], second[0]) if cycle % 2 else (second[0], first[0])
                    # Negative places reach back into the cycle before.
                    order = (CIRCLE[place - 2], CIRCLE[place - 1], kind)
                    if cycle or place >= 2:
                        found[", ".join(order)].append(times)
                print(mode, cycle, summary(found), file=sys.stderr)
    return summary(found)


def made(bench: Bench, mode: str) -> Engine:
    """An engine for one reply at a time."""
    if mode == "fixed":
        return bench.engine(1, "mtp", FIXED_DRAFTS, fixed=True)
    return bench.engine(1, mode)


def side_by_side(
    engines: tuple[Engine, Engine], request: GenerateRequest
) -> list[tuple[float, list[int]]]:
    """Decoding milliseconds a token and reply of each engine, both at work at the same time."""
    found: dict[int, tuple[float, list[int]]] = {}

    def one(number: int, engine: Engine) -> None:
        before_s = engine.stats().decode_s_total
        ids, _ = run_all(engine, [request])[0]
        found[number] = 1e3 * (engine.stats().decode_s_total - before_s) / len(ids), ids

    threads = [threading.Thread(target=one, args=item) for item in enumerate(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[0], found[1]]


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
