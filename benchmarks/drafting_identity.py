"""Drafting changes no token: every way to draft against none, in slices that can be resumed.

    python benchmarks/drafting_identity.py [--kind text] [--prompts 200] [--tokens 16]
        [--depths 0 1 3 7] [--edge] [--sample REPLIES --seed S] [--save FILE] [--minutes M]

A cell is a way to sample (greedy, T 0.7, T 1.0 with filters and penalties), a draft depth (0, 1, 3, 7,
and "adaptive") and users at a time (1, 4, 8). Its engine answers twice: with an empty cache (cold),
then with one that knows the very prompts (warm). What both are compared with are the ids of a reply
computed alone, without drafts and without a cache. A slice is `--slice` prompts of a cell; each
finished one is a line of --save, and a later run does those that are missing. Without --sample,
slices are runs of prompts; with it every cell has its own prompts, as many as the others, drawn
from all by --seed, and a run that ends early has one slice more in some cells than in the others.
Exit status 1 when a token differs.

Kinds: "text" is free, and its replies do not end at end tokens, so that all have `--tokens` tokens;
"schema" and "tools" are bound (drafting_bound.py). The embedded model, or -m. With --edge three of
eight texts are lengthened until they end 1 to EDGE_TOKENS tokens before the 64th, so that short
replies cross the end of a chunk and of a page too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drafting_bench import PROMPTS, SAMPLINGS, Bench, run_all
from drafting_bound import BOUND, bound_request

from civetta.model.embedded import embedded_model_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from civetta.engine.engine import Engine
    from civetta.engine.protocol import GenerateRequest
    from civetta.types import SamplingParams

DEPTHS = ("0", "1", "3", "7", "adaptive")
USERS = (1, 4, 8)
CACHES = ("cold", "warm")
KINDS = ("text", *BOUND)
CACHE_BYTES = 1 << 29
ROUNDS = 4
BLOCK_TOKENS = 64
"""Rows of a chunk of delta-rule state, and of a page of keys."""
EDGE_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Slice:
    """Prompts of one cell, by number."""

    sampling: str
    depth: str
    users: int
    prompts: Sequence[int]

    @property
    def name(self) -> str:
        """What a saved line is known by: a run of prompts by its ends, others by all numbers."""
        numbers = self.prompts
        spelled = f"{numbers[0]}-{numbers[-1] + 1}"
        if list(numbers) != list(range(numbers[0], numbers[-1] + 1)):
            spelled = ",".join(str(number) for number in numbers)
        return f"{self.sampling} | {self.depth} | {self.users} | {spelled}"


def all_slices(prompts: int, size: int, depths: Sequence[str] = DEPTHS) -> Iterator[Slice]:
    """Slices of all cells, in ROUNDS rounds: each has all prompts, and all cells over some of them.

    So the slices that a run gets done in its time are spread evenly.
    """
    cells = list(itertools.product(SAMPLINGS, depths, USERS))
    for turn in range(ROUNDS):
        for place, first in enumerate(range(0, prompts, size)):
            for number, cell in enumerate(cells):
                if (number + place) % ROUNDS == turn:
                    yield Slice(*cell, prompts=range(first, min(first + size, prompts)))


def drawn_slices(
    prompts: int, size: int, depths: Sequence[str], replies: int, seed: int
) -> Iterator[Slice]:
    """Slices of `replies` drawn from the matrix: first one of every cell, then the next of every.

    Each cell has prompts of its own, drawn without repeats; cells come in drawn order. `replies` is
    rounded up to as many for every cell.
    """
    draw = random.Random(seed)
    cells = list(itertools.product(SAMPLINGS, depths, USERS))
    each = min(-(-replies // (len(CACHES) * len(cells))), prompts)
    drawn = [(cell, draw.sample(range(prompts), each)) for cell in cells]
    for first in range(0, each, size):
        for cell, numbers in draw.sample(drawn, len(drawn)):
            yield Slice(*cell, prompts=numbers[first : first + size])


class Identity:
    """Runs slices; the reply to compare with is computed once for each prompt and way to sample."""

    def __init__(
        self, bench: Bench, tokens: int, kind: str = "text", *, edge: bool = False
    ) -> None:
        self.bench, self.tokens, self.kind, self.edge = bench, tokens, kind, edge
        self._alone: dict[tuple[str, int], tuple[GenerateRequest, list[int]]] = {}

    def run(self, part: Slice) -> dict[str, object]:
        """What a slice showed: prompts whose ids differ, and drafts made and accepted."""
        alone = self._replies_alone(part)
        requests = [request for request, _ in alone]
        adaptive = part.depth == "adaptive"
        depth = 7 if adaptive else int(part.depth)
        with self.bench.engine(
            part.users,
            "mtp" if depth else "off",
            depth,
            fixed=not adaptive,
            cache_bytes=CACHE_BYTES,
        ) as engine:
            passes = {cache: run_all(engine, requests) for cache in CACHES}
            stats = engine.stats()
        return {
            "slice": part.name,
            **{f"compared_{cache}": len(replies) for cache, replies in passes.items()},
            "tokens": sum(len(ids) for replies in passes.values() for ids, _ in replies),
            **{
                f"hits_{cache}": sum(end.usage.cached_tokens > 0 for _, end in replies)
                for cache, replies in passes.items()
            },
            "drafted": stats.draft_tokens_total,
            "accepted": stats.draft_tokens_accepted_total,
            "different": [
                f"{number} {cache}"
                for cache, replies in passes.items()
                for number, (ids, _), (_, right) in zip(part.prompts, replies, alone, strict=True)
                if ids != right
            ],
        }

    def _replies_alone(self, part: Slice) -> list[tuple[GenerateRequest, list[int]]]:
        missing = [n for n in part.prompts if (part.sampling, n) not in self._alone]
        if missing:
            with self.bench.engine(1, "off") as engine:
                for number in missing:
                    request = self._request(engine, part.sampling, number)
                    ids = run_all(engine, [request])[0][0]
                    self._alone[part.sampling, number] = request, ids
        return [self._alone[part.sampling, number] for number in part.prompts]

    def _request(self, engine: Engine, sampling: str, number: int) -> GenerateRequest:
        params = SAMPLINGS[sampling]
        if self.kind == "text":
            found = self._text(prompt_of(number), params)
            at_edge = self.edge and number // len(PROMPTS) % 8 in (1, 4, 6)
            words = itertools.cycle(["Tell", "of", "the", "sea", "and", "the", "wind", "too."])
            said = prompt_of(number)
            while at_edge and len(found.prompt_ids) < BLOCK_TOKENS - 1 - number % EDGE_TOKENS:
                said += f" {next(words)}"
                found = self._text(said, params)
            return replace(found, request_id=f"r{number}")
        return bound_request(engine, self.kind, number, params, self.tokens)

    def _text(self, said: str, params: SamplingParams) -> GenerateRequest:
        return self.bench.requests([said], params, self.tokens)[0]


def prompt_of(number: int) -> str:
    """A prompt by number: one of 16 texts, told apart by the number behind it."""
    return f"{PROMPTS[number % len(PROMPTS)]} ({number})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("--kind", choices=KINDS, default="text")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--depths", choices=DEPTHS, nargs="+", default=list(DEPTHS))
    parser.add_argument("--slice", type=int, default=10)
    parser.add_argument("--edge", action="store_true")
    parser.add_argument("--sample", type=int, metavar="REPLIES")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    done = _saved(a.save)
    if a.sample is None:
        parts = list(all_slices(a.prompts, a.slice, a.depths))
    else:
        parts = list(drawn_slices(a.prompts, a.slice, a.depths, a.sample, a.seed))
    bench = Bench(a.model or str(embedded_model_path()), threads=a.threads, context=512)
    identity = Identity(bench, a.tokens, a.kind, edge=a.edge)
    end_s = time.monotonic() + 60 * a.minutes
    for part in parts:
        if part.name in done:
            continue
        if time.monotonic() > end_s:
            break
        found = identity.run(part)
        done[part.name] = found
        line = json.dumps(found)
        print(line, file=sys.stderr)
        if a.save:
            with a.save.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    report = summary(list(done.values()), parts)
    print(json.dumps({"kind": a.kind, **report}, indent=2))
    if report["different"]:
        sys.exit(1)


def summary(found: Sequence[dict[str, object]], parts: Sequence[Slice]) -> dict[str, object]:
    """Counts over all slices done."""
    return {
        "replies_in_all": len(CACHES) * sum(len(part.prompts) for part in parts),
        **{key: sum(int(str(one[key])) for one in found) for key in _COUNTS},
        "different": [(one["slice"], one["different"]) for one in found if one["different"]],
    }


_COUNTS = (
    "compared_cold",
    "compared_warm",
    "hits_cold",
    "hits_warm",
    "tokens",
    "drafted",
    "accepted",
)


def _saved(path: Path | None) -> dict[str, dict[str, object]]:
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["slice"]: line for line in lines}


if __name__ == "__main__":
    main()
