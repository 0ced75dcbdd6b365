"""Throughput of several users against one at a time, in one run, A B B A.

    python benchmarks/serving_load.py [-m MODEL] [--users 1 2 4 8] [--prompt 256] [--reply 64]
                                      [--rounds 3] [--threads 2] [--save FILE]

Each measurement serves the same `--requests` distinct prompts. "together" runs them with
--sessions = users, "alone" one after the other. The cache is passed, so every prompt is computed.
Prints tokens a second (prompt and reply), the ratio, the median time to the first token and
between tokens; and the processor time of the process a token with its ratio, alone over together,
which other programs on the machine touch less: each round's own, then their median.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import threading
import time
from pathlib import Path

from civetta.engine.load import load_engine
from civetta.engine.protocol import GenerateRequest, TokenEvent
from civetta.options import EngineOptions, ModelOptions, Settings
from civetta.types import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--reply", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    logging.getLogger("civetta").setLevel(logging.ERROR)
    report = {
        "prompt_tokens": a.prompt,
        "reply_tokens": a.reply,
        "requests": a.requests,
        "rounds": a.rounds,
        "threads": a.threads,
        "users": [compare(a, users) for users in a.users],
    }
    text = json.dumps(report, indent=2)
    print(text)
    if a.save:
        a.save.write_text(text + "\n")


def compare(a: argparse.Namespace, users: int) -> dict[str, object]:
    model = ModelOptions(model=a.model, threads=a.threads, context=a.prompt + a.reply + 64)
    sides = {}
    for name, sessions in (("alone", 1), ("together", users)):
        options = EngineOptions(sessions=sessions, max_pending=a.requests)
        sides[name] = load_engine(Settings(model=model, engine=options))
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(a.rounds + 1):
        order = list(sides.items())
        for name, engine in order[::-1] if turn % 2 else order:
            runs[name].append(serve(engine, a))
    for engine in sides.values():
        engine.close()
    kept = {name: results[1:] for name, results in runs.items()}  # the first one warms up
    median = {
        name: {key: round(statistics.median(r[key] for r in results), 4) for key in results[0]}
        for name, results in kept.items()
    }
    ratio = median["together"]["tokens_s"] / median["alone"]["tokens_s"]
    pairs = zip(kept["alone"], kept["together"], strict=True)
    cpu_ratios = [round(a["cpu_ms_a_token"] / b["cpu_ms_a_token"], 3) for a, b in pairs]
    return {
        "users": users,
        "ratio": round(ratio, 2),
        "cpu_ratio": round(statistics.median(cpu_ratios), 3),
        "cpu_ratios": cpu_ratios,
        **median,
    }


def serve(engine, a: argparse.Namespace) -> dict[str, float]:
    vocab = engine.info.vocab_size
    streams, firsts, gaps = [], [], []
    began_s, cpu_began_s = time.perf_counter(), time.process_time()

    def read(stream) -> None:
        times = [time.perf_counter() for event in stream if isinstance(event, TokenEvent)]
        firsts.append(times[0] - began_s)
        gaps.extend(b - a for a, b in itertools.pairwise(times))

    for number in range(a.requests):
        ids = tuple((number * 7919 + i * 104_729) % (vocab - 64) for i in range(a.prompt))
        request = GenerateRequest(
            request_id=f"b{number}",
            prompt_ids=ids,
            sampling=SamplingParams(temperature=0),
            max_tokens=a.reply,
            ignore_eos=True,
            use_cache=False,
            client_id=str(number),
        )
        streams.append(engine.submit(request))
    readers = [threading.Thread(target=read, args=(stream,)) for stream in streams]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    spent_s = time.perf_counter() - began_s
    cpu_s = time.process_time() - cpu_began_s
    return {
        "cpu_ms_a_token": 1e3 * cpu_s / (a.requests * (a.prompt + a.reply)),
        "tokens_s": a.requests * (a.prompt + a.reply) / spent_s,
        "reply_tokens_s": a.requests * a.reply / spent_s,
        "first_token_s": statistics.median(firsts),
        "gap_ms": 1000 * statistics.median(gaps),
    }


if __name__ == "__main__":
    main()
