"""What stored state saves: the second turn of a conversation, and identical prompts at once.

    python benchmarks/reuse.py [-m MODEL] [--turn 12000] [--prompt 8000] [--long 15000] [--rounds 3]
                               [--save FILE]

A length of 0 leaves that part out.

- second turn: time to the first token of a prompt that goes on where an earlier reply ended,
  over that of the same prompt computed cold (`use_cache` off), the aim being 0.03;
- four identical prompts at once over one alone (both cold), in turn and in swapped order every
  second time, the aim being 1.3: by the clock and by the processor time of the process, which other
  programs on the machine touch less;
- a stream's largest gap between tokens while another user prefills --long tokens, over one chunk.
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
from civetta.engine.protocol import Finished, GenerateRequest, TokenEvent
from civetta.options import EngineOptions, ModelOptions, Settings
from civetta.types import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("--turn", type=int, default=12_000)
    parser.add_argument("--prompt", type=int, default=8_000)
    parser.add_argument("--long", type=int, default=15_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    logging.getLogger("civetta").setLevel(logging.ERROR)
    model = ModelOptions(model=a.model, threads=a.threads)
    settings = Settings(model=model, engine=EngineOptions(sessions=4, prefill_chunk=512))
    with load_engine(settings) as engine:
        run = Bench(engine)
        run.ask(run.prompt(512))
        report = {
            "threads": a.threads,
            "second_turn": [run.second_turn(a.turn) for _ in range(a.rounds if a.turn else 0)],
            "identical": [run.identical(a.prompt, swapped=n % 2 == 1) for n in range(a.rounds)],
            "gap": [run.gap(a.long)] if a.long else [],
        }
    if a.turn:
        report["second_turn_ratio"] = median(report["second_turn"], "ratio")
    report["identical_ratio"] = median(report["identical"], "ratio")
    report["identical_cpu_ratio"] = median(report["identical"], "cpu_ratio")
    text = json.dumps(report, indent=2)
    print(text)
    if a.save:
        a.save.write_text(text + "\n")


def median(rows: list[dict[str, float]], key: str) -> float:
    return round(statistics.median(row[key] for row in rows), 4)


class Bench:
    """Asks one engine for replies; every prompt is one that it has not seen."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self._seed = 0

    def prompt(self, n_tokens: int) -> tuple[int, ...]:
        self._seed += 1
        vocab = self._engine.info.vocab_size - 64
        return tuple((self._seed * 7919 + i * i * 31 + i) % vocab for i in range(n_tokens))

    def ask(self, ids, *, use_cache=True, max_tokens=8, client="a"):
        return self._engine.submit(
            GenerateRequest(
                request_id=f"b{self._seed}-{time.perf_counter_ns()}",
                prompt_ids=tuple(ids),
                sampling=SamplingParams(temperature=0),
                max_tokens=max_tokens,
                ignore_eos=True,
                use_cache=use_cache,
                client_id=client,
            )
        )

    def read(self, stream) -> tuple[float, list[int], int]:
        """Seconds to the first token, the tokens, and how many prompt tokens were cached."""
        began_s, first_s, tokens, cached = time.perf_counter(), None, [], 0
        for event in stream:
            if isinstance(event, TokenEvent):
                first_s = first_s or time.perf_counter() - began_s
                tokens.append(event.token_id)
            elif isinstance(event, Finished):
                cached = event.usage.cached_tokens
        return first_s, tokens, cached

    def second_turn(self, n_tokens: int) -> dict[str, float]:
        first = self.prompt(n_tokens)
        _, reply, _ = self.read(self.ask(first, max_tokens=32))
        turn = (*first, *reply, *self.prompt(24))
        warm_s, warm, cached = self.read(self.ask(turn))
        cold_s, cold, _ = self.read(self.ask(turn, use_cache=False))
        assert warm == cold, "a reply depends on the cache"
        return {
            "tokens": len(turn),
            "cached": cached,
            "warm_s": round(warm_s, 4),
            "cold_s": round(cold_s, 4),
            "ratio": round(warm_s / cold_s, 4),
        }

    def identical(self, n_tokens: int, *, swapped: bool) -> dict[str, float]:
        times, cpu = {}, {}
        for count in (4, 1) if swapped else (1, 4):
            ids = self.prompt(n_tokens)
            began_s, cpu_began_s = time.perf_counter(), time.process_time()
            streams = [self.ask(ids, client=str(i)) for i in range(count)]
            readers = [threading.Thread(target=self.read, args=(s,)) for s in streams]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            times[count] = time.perf_counter() - began_s
            cpu[count] = time.process_time() - cpu_began_s
        return {
            "one_s": round(times[1], 3),
            "four_s": round(times[4], 3),
            "ratio": round(times[4] / times[1], 3),
            "one_cpu_s": round(cpu[1], 3),
            "four_cpu_s": round(cpu[4], 3),
            "cpu_ratio": round(cpu[4] / cpu[1], 3),
        }

    def gap(self, n_tokens: int) -> dict[str, float]:
        """The talker's gaps while another user prefills."""
        times, stop = [], threading.Event()
        talker = self.ask(self.prompt(16), max_tokens=20_000, client="talker")

        def listen() -> None:
            for event in talker:
                if isinstance(event, TokenEvent):
                    times.append(time.perf_counter())
                if stop.is_set():
                    talker.cancel()

        listener = threading.Thread(target=listen)
        listener.start()
        while len(times) < 50:
            time.sleep(0.01)
        began_s = time.perf_counter()
        first_s, _, _ = self.read(self.ask(self.prompt(n_tokens), max_tokens=1, client="reader"))
        ended_s = time.perf_counter()
        stop.set()
        listener.join()
        during = [t for t in times if began_s <= t <= ended_s]
        gaps = sorted(b - a for a, b in itertools.pairwise(during))
        tenth = len(gaps) // 10
        return {
            "prefill_tokens": n_tokens,
            "prefill_s": round(first_s, 2),
            "tokens_meanwhile": len(during),
            "gap_median_s": round(statistics.median(gaps), 4),
            "gap_p90_s": round(gaps[-tenth - 1], 4),
            "gap_max_s": round(gaps[-1], 4),
        }


if __name__ == "__main__":
    main()
