"""Time to the first token of a second turn, cold against restored from RAM and from disk.

    python benchmarks/continuation.py --tokens 12000 --rounds 3

The embedded model, one thread pool of the machine's cores; medians over rounds, each round its own
conversation: cold, restored, cold, restored. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from civetta.cache.protocol import KeepKind
from civetta.cache.setup import build_cache, plan_cache
from civetta.kernels.ops import PAGE_TOKENS
from civetta.kernels.select import select
from civetta.model.build import load_trunk
from civetta.model.embedded import embedded_model_path
from civetta.options import CacheOptions


class Bench:
    def __init__(self, trunk, tokens, folder=None):
        self.trunk = trunk
        options = CacheOptions(cache_ram_bytes=4 << 30, cache_disk=folder)
        page_bytes = trunk.state_shape.pages.page_bytes(trunk.dtype)
        plan = plan_cache(options, page_bytes, available_bytes=0)
        context_tokens = tokens + 512
        self.store = trunk.store(
            sessions=1,
            context_tokens=context_tokens,
            pages=context_tokens // PAGE_TOKENS + 1 + plan.spare_pages,
        )
        self.cache = build_cache(options, plan, self.store, model=lambda: "ab" * 32)

    def turn(self, prompt, reply):
        """Seconds to the first row of logits, cached tokens, seconds spent on keeping."""
        session, keep_s, began_s = self.store.open(), 0.0, time.perf_counter()
        restore = self.cache.begin(self.cache.find(prompt), session)
        while not restore.advance():
            restore.wait(1)
        for start in range(session.position, len(prompt), 2048):
            self.trunk.forward(session, prompt[start : start + 2048], "last")
        first_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        self.cache.keep(session, KeepKind.PROMPT)
        keep_s = time.perf_counter() - began_s
        self.trunk.forward(session, reply, "last")
        self.cache.keep(session, KeepKind.REPLY)
        session.close()
        return first_s, restore.tokens, keep_s


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--new", type=int, default=30, help="tokens of the second turn's message")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    trunk = load_trunk(embedded_model_path(), ops=select("cpu", os.cpu_count() or 1))
    cold_s, ram_s, disk_s, same_s, keep_s = [], [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            chosen = random.Random(number)
            ids = [chosen.randrange(300, 4000) for _ in range(arguments.tokens)]
            first, reply, more = ids[: -arguments.new], ids[:8], ids[-arguments.new :]
            second = [*first, *reply, *more]
            path = str(Path(folder) / str(number))
            bench = Bench(trunk, len(second), path)
            cold_s.append(bench.turn(first, reply)[0])
            spent_s, cached, kept_s = bench.turn(second, reply)
            assert cached == len(first) + len(reply)
            ram_s.append(spent_s)
            keep_s.append(kept_s)
            spent_s, cached, _ = bench.turn(second, reply)
            assert cached == len(second) - 1
            same_s.append(spent_s)
            bench.cache.close(drain_s=600)
            bench = Bench(trunk, len(second), path)
            spent_s, cached, _ = bench.turn([*second, *reply, *more], reply)
            assert cached == len(second) + len(reply)
            disk_s.append(spent_s)
            bench.cache.close()
    cold = statistics.median(cold_s)
    report = {"tokens": arguments.tokens, "new": arguments.new, "cold_s": round(cold, 3)}
    for name, values in (("ram", ram_s), ("disk", disk_s), ("same", same_s), ("keep", keep_s)):
        median = statistics.median(values)
        report[f"{name}_s"] = round(median, 4)
        report[f"{name}_of_cold"] = round(median / cold, 4)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
