"""Drafting: what drafts cost and bring on this machine, A B A B.

    python benchmarks/drafting.py speed [-m MODEL] [--mode mtp] [--users 1 2 4 8] [--save FILE]
    python benchmarks/drafting.py steps [-m MODEL] [--save FILE]

speed: tokens a second of decoding over those without drafts (sum over users; median of the rounds' ratios
and where it lies 19 times of 20), and how many drafts stood by depth, on prose, on text that repeats
itself, and on noise that cannot be foreseen, where drafting can only lose.
steps: a launch of 1 to 8 rows, a draft step, and the acceptance at which drafts of each length pay.
That no reply changes is drafting_identity.py's matter; both sides' replies are compared all the same.

--cpu-time counts the step thread's processor time with one thread, for a machine that others use.
--useless shifts every draft by one token id: as sure as before, and never right.
Without -m the embedded model; --random-head adds an untrained draft head to a Hugging Face folder
without one: the worst case, in which drafting can only lose.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from drafting_bench import KINDS, Bench, with_random_head
from drafting_steps import step_report
from drafting_turns import Turns, take_turns

from civetta.model.embedded import embedded_model_path

if TYPE_CHECKING:
    from civetta.engine.protocol import EngineStats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("speed", "steps"):
        command = commands.add_parser(name)
        command.add_argument("-m", "--model")
        command.add_argument("--random-head", action="store_true")
        command.add_argument("--threads", type=int, default=os.cpu_count() or 1)
        command.add_argument("--context", type=int, default=1024)
        command.add_argument("--cpu-time", action="store_true")
        command.add_argument("--save", type=Path)
        command.add_argument("--useless", action="store_true")
        if name == "speed":
            command.add_argument("--mode", choices=("mtp", "lookup"), default="mtp")
            command.add_argument("--kinds", choices=tuple(KINDS), nargs="+", default=list(KINDS))
            command.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8])
            command.add_argument("--tokens", type=int, default=128)
            command.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = a.model or str(embedded_model_path())
        if a.random_head:
            model = str(with_random_head(Path(model), Path(folder)))
        run = {"speed": speed, "steps": steps}[a.command]
        bench = Bench(
            model,
            mode=getattr(a, "mode", "mtp"),
            threads=a.threads,
            context=a.context,
            cpu_time=a.cpu_time,
        )
        if a.useless:
            bench.spoil_drafts()
        report = {"command": a.command, **run(bench, a)}
    text = json.dumps(report, indent=2)
    print(text)
    if a.save:
        a.save.write_text(text + "\n", encoding="utf-8")


def speed(bench: Bench, a: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {"mode": a.mode, "tokens": a.tokens, "rounds": a.rounds}
    for kind in a.kinds:
        for users in a.users:
            found = _compare(bench, kind, users, a)
            report[f"{kind}, {users} users"] = found
            print(kind, users, found, file=sys.stderr)
    return report


def _compare(bench: Bench, kind: str, users: int, a: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turn, step by step; `a.rounds` times the requests, the first time apart."""
    texts, sampling = KINDS[kind]
    chosen = [texts[i % len(texts)] for i in range(max(users, 4))]
    requests = bench.requests(chosen, sampling, a.tokens)
    loops = bench.loop(users, "off"), bench.loop(users, a.mode)
    first = take_turns(loops, users, requests)
    before = first.stats
    found = take_turns(loops, users, requests * a.rounds)
    depths = np.array(found.stats.draft_depths) - np.array(before.draft_depths)
    off_s, on_s = found.seconds_N2.sum(axis=0)
    rounds = found.stats.decode_rounds_total - before.decode_rounds_total
    return {
        "off_tokens_s": round(float(found.tokens / off_s), 1),
        "drafting_tokens_s": round(float(found.tokens / on_s), 1),
        "ratio": round(found.ratio, 3),
        "ratio_95": [round(x, 3) for x in found.interval()],
        "ratio_at_first": round(first.ratio, 3),
        "tokens": found.tokens,
        "rounds": rounds,
        "drafts": found.stats.drafts_total - before.drafts_total,
        "drafted_by_depth": depths[:, 0].tolist(),
        "accepted_by_depth": depths[:, 1].tolist(),
        "tokens_a_launch": _tokens_a_launch(found, before),
    }


def _tokens_a_launch(found: Turns, before: EngineStats) -> float:
    """Tokens of a reply for each of its rows without drafts."""
    tokens = found.stats.generated_tokens_total - before.generated_tokens_total
    rows = found.stats.decoded_rows_total - before.decoded_rows_total
    return round((tokens - len(found.replies)) / rows, 2)


def steps(bench: Bench, a: argparse.Namespace) -> dict[str, Any]:
    del a
    return step_report(bench.with_head.trunk, bench.clock)


if __name__ == "__main__":
    main()
