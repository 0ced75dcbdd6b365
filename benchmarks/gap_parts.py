"""What a decoding stream waits for beside a long prompt, part by part, in processor time.

    python benchmarks/gap_parts.py [-m MODEL] [--long 26000] [--chunk 512] [--users 1] [--threads 1]
                                   [--rounds 3] [--save FILE]

One reply decodes while `--users` others prefill `--long` tokens each. Every step of the loop is
taken apart on its thread: the decoding round, the launches of prompt tokens, keeping states, the
rest; each by the clock and by the thread's processor time, which other programs on the machine touch
less. Between two rounds of the reply lies one step, so a step's time is a gap of the stream. Printed
are, for all steps in which the reply decoded and somebody prefilled: the most prompt tokens a step
computed, quartiles of each part, and the longest steps with their parts, in units of the median
launch of a whole chunk (a chunk that is cut where a state is kept takes two launches).
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import threading
import time
from collections import defaultdict
from pathlib import Path

from civetta.engine.load import load_engine
from civetta.engine.protocol import GenerateRequest, TokenEvent
from civetta.options import EngineOptions, ModelOptions, Settings
from civetta.types import SamplingParams

LONGEST = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("--long", type=int, default=26_000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    logging.getLogger("civetta").setLevel(logging.ERROR)
    settings = Settings(
        model=ModelOptions(model=a.model, threads=a.threads),
        engine=EngineOptions(sessions=a.users + 1, prefill_chunk=a.chunk),
    )
    report = {"prompt_tokens": a.long, "chunk": a.chunk, "users": a.users, "threads": a.threads}
    with load_engine(settings) as engine:
        book = Book(engine)
        rounds = [play(engine, book, a, number) for number in range(a.rounds + 1)]
    report["rounds"] = [summary(steps, a.chunk) for steps in rounds[1:]]  # the first warms up
    text = json.dumps(report, indent=2)
    print(text)
    if a.save:
        a.save.write_text(text + "\n")


class Book:
    """Every step's parts: name to (wall s, processor s), and the prompt tokens it computed."""

    def __init__(self, engine) -> None:
        loop = engine._loop
        self.steps: list[dict] = []
        self._parts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._prompt_tokens, self._launches, self._in_round = 0, 0, False
        step, decode, keep = loop.step, loop._decoding.run, loop._cache.keep
        forward = loop._model.forward_pieces

        def timed_step():
            self._parts.clear()
            self._prompt_tokens = self._launches = 0
            done = self._time("step", step)
            self.steps.append(
                {
                    "parts": {name: tuple(times) for name, times in self._parts.items()},
                    "prompt_tokens": self._prompt_tokens,
                    "launches": self._launches,
                }
            )
            return done

        def timed_round(jobs):
            self._in_round = True
            try:
                return self._time("round", decode, jobs)
            finally:
                self._in_round = False

        def timed_forward(pieces):
            if self._in_round:
                return forward(pieces)
            self._prompt_tokens += sum(len(piece.ids) for piece in pieces)
            self._launches += 1
            return self._time("prompt", forward, pieces)

        loop.step, loop._decoding.run, loop._model.forward_pieces = (
            timed_step,
            timed_round,
            timed_forward,
        )
        loop._cache.keep = lambda *args: self._time("keep", keep, *args)

    def _time(self, name: str, action, *args):
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        try:
            return action(*args)
        finally:
            part = self._parts[name]
            part[0] += time.perf_counter() - wall_s
            part[1] += time.thread_time() - cpu_s


def play(engine, book: Book, a: argparse.Namespace, number: int) -> list[dict]:
    """The steps in which the talker decoded and prompt tokens were computed."""
    ready = threading.Event()
    talker = engine.submit(request(f"talk{number}", prompt(engine, 16, number), "talker", 20_000))

    def listen() -> None:
        for event in talker:
            if isinstance(event, TokenEvent):
                ready.set()

    listener = threading.Thread(target=listen)
    listener.start()
    ready.wait()
    first = len(book.steps)
    readers = []
    for user in range(a.users):
        ids = prompt(engine, a.long, 100 * number + user + 1)
        stream = engine.submit(request(f"long{number}.{user}", ids, f"reader{user}", 1))
        readers.append(threading.Thread(target=list, args=(stream,)))
        readers[-1].start()
    for reader in readers:
        reader.join()
    talker.cancel()
    listener.join()
    return [s for s in book.steps[first:] if "round" in s["parts"] and s["prompt_tokens"]]


def prompt(engine, n_tokens: int, seed: int) -> tuple[int, ...]:
    vocab = engine.info.vocab_size - 64
    return tuple((seed * 7919 + i * i * 31 + i) % vocab for i in range(n_tokens))


def request(name: str, ids, client: str, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=ids,
        sampling=SamplingParams(temperature=0),
        max_tokens=max_tokens,
        ignore_eos=True,
        client_id=client,
    )


def summary(steps: list[dict], chunk: int) -> dict:
    whole = [s for s in steps if s["prompt_tokens"] == chunk and s["launches"] == 1]
    unit = [statistics.median(s["parts"]["prompt"][kind] for s in whole) for kind in (0, 1)]
    shown: dict = {
        "steps": len(steps),
        "most_prompt_tokens_between_two_rounds": max(s["prompt_tokens"] for s in steps),
        "chunk_wall_s": round(unit[0], 4),
        "chunk_cpu_s": round(unit[1], 4),
    }
    for kind, name in ((0, "wall"), (1, "cpu")):
        order = sorted(steps, key=lambda s: s["parts"]["step"][kind], reverse=True)
        chunks = [s["parts"]["step"][kind] / unit[kind] for s in order]
        shown[f"gap_in_chunks_{name}"] = {
            "median": round(statistics.median(chunks), 3),
            "p90": round(chunks[len(chunks) // 10], 3),
            "largest": round(chunks[0], 3),
        }
        shown[f"longest_{name}"] = [in_chunks(s, kind, unit[kind]) for s in order[:LONGEST]]
    return shown


def in_chunks(step: dict, kind: int, unit_s: float) -> dict:
    parts = {name: times[kind] / unit_s for name, times in step["parts"].items()}
    rest = 2 * parts["step"] - sum(parts.values())
    parts = {**parts, "rest": rest}
    return {
        "prompt_tokens": step["prompt_tokens"],
        "launches": step["launches"],
        **{name: round(value, 3) for name, value in parts.items()},
    }


if __name__ == "__main__":
    main()
