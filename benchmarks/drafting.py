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
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from drafting_bench import KINDS, Bench, with_random_head
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


# ---- speed ------------------------------------------------------------------------------------------


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
    first = take_turns(bench, a.mode, users, requests, loops=loops)
    before = first.stats
    found = take_turns(bench, a.mode, users, requests * a.rounds, loops=loops)
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


# ---- steps ------------------------------------------------------------------------------------------


def steps(bench: Bench, a: argparse.Namespace) -> dict[str, Any]:
    """Medians of several calibrations with a finer grid."""
    del a
    trunk = bench.with_head.trunk
    store = trunk.store(sessions=1, context_tokens=256)
    session = store.open()
    trunk.forward(session, list(range(1, 101)), "none")
    launch_s = {
        rows: _median(lambda rows=rows: _launch(bench, session, rows)) for rows in range(1, 9)
    }
    step_s = {n: _median(lambda n=n: _draft(bench, session, n)) for n in range(1, 8)}
    break_even = {}
    for n in range(1, 8):
        need = (launch_s[1 + n] + step_s[n]) / launch_s[
            1
        ]  # tokens a round that drafting has to bring
        break_even[n] = _acceptance(need - 1, n)
    return {
        "launch_ms": {n: round(s * 1e3, 3) for n, s in launch_s.items()},
        "draft_ms": {n: round(s * 1e3, 3) for n, s in step_s.items()},
        "break_even_acceptance": break_even,
    }


def _acceptance(tokens: float, n: int) -> float | None:
    """p with p + p^2 + ... + p^n = tokens; None when even p = 1 does not reach it."""
    grid = np.linspace(0, 1, 1001)
    total = sum(grid**k for k in range(1, n + 1))
    enough = np.flatnonzero(total >= tokens)
    return round(float(grid[enough[0]]), 3) if len(enough) else None


def _median(once: Any, repeats: int = 15) -> float:
    once()
    return statistics.median(once() for _ in range(repeats))


def _launch(bench: Bench, session: Any, rows: int) -> float:
    began_s = bench.clock()
    bench.with_head.trunk.forward(session, range(1, rows + 1), "all")
    seconds = bench.clock() - began_s
    session.rewind(rows)
    return seconds


def _draft(bench: Bench, session: Any, n: int) -> float:
    head = bench.with_head.trunk.head
    session.reserve(1 + n)
    began_s = bench.clock()
    _, chain = head.begin([session], [1])
    for _ in range(n - 1):
        _, chain = head.extend(chain, [1])
    seconds = bench.clock() - began_s
    session.trim()
    return seconds


if __name__ == "__main__":
    main()
