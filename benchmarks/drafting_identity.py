"""Drafting changes no token: every way to draft against none, in slices that can be resumed.

    python benchmarks/drafting_identity.py [--prompts 200] [--tokens 16] [--save FILE] [--minutes M]

A cell is a way to sample (greedy, T 0.7, T 1.0 with filters and penalties), a draft depth (0, 1, 3, 7,
and "adaptive"), users at a time (1, 4, 8) and the cache (cold, or warm: the very prompt was asked
before, in the same engine). What is compared with are the ids of a reply computed alone, without
drafts and without a cache. A slice is `--slice` prompts of a cell; each finished one is a line of
--save, and a later run does those that are missing. Exit status 1 when a token differs.

Replies do not end at end tokens, so that all have `--tokens` tokens. The embedded model, or -m.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drafting_bench import PROMPTS, SAMPLINGS, Bench, run_all

from civetta.model.embedded import embedded_model_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEPTHS = ("0", "1", "3", "7", "adaptive")
USERS = (1, 4, 8)
CACHES = ("cold", "warm")
CACHE_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class Slice:
    """Prompts [first, last) of one cell."""

    sampling: str
    depth: str
    users: int
    cache: str
    first: int
    last: int

    @property
    def name(self) -> str:
        """What a saved line is known by."""
        return f"{self.sampling} | {self.depth} | {self.users} | {self.cache} | {self.first}-{self.last}"


def all_slices(prompts: int, size: int) -> Iterator[Slice]:
    """Slices of all cells; those of one slice of prompts come together, so that any part is even."""
    for first in range(0, prompts, size):
        for cell in itertools.product(SAMPLINGS, DEPTHS, USERS, CACHES):
            yield Slice(*cell, first=first, last=min(first + size, prompts))


class Identity:
    """Runs slices; the replies to compare with are computed once for each slice of prompts."""

    def __init__(self, bench: Bench, tokens: int) -> None:
        self.bench, self.tokens = bench, tokens
        self._wanted: dict[tuple[str, int], list[list[int]]] = {}

    def run(self, part: Slice) -> dict[str, object]:
        """What a slice showed: prompts whose ids differ, and drafts made and accepted."""
        texts = prompts_of(part.first, part.last)
        requests = self.bench.requests(texts, SAMPLINGS[part.sampling], self.tokens)
        wanted = self._replies_alone(part, texts)
        adaptive = part.depth == "adaptive"
        depth = 7 if adaptive else int(part.depth)
        with self.bench.engine(
            part.users,
            "mtp" if depth else "off",
            depth,
            fixed=not adaptive,
            cache_bytes=CACHE_BYTES if part.cache == "warm" else 0,
        ) as engine:
            if part.cache == "warm":
                run_all(engine, requests)
            replies = run_all(engine, requests)
            stats = engine.stats()
        hits = sum(end.usage.cached_tokens > 0 for _, end in replies)
        return {
            "slice": part.name,
            "compared": len(texts),
            "cache_hits": hits,
            "drafted": stats.draft_tokens_total,
            "accepted": stats.draft_tokens_accepted_total,
            "different": [
                part.first + i
                for i, ((ids, _), right) in enumerate(zip(replies, wanted, strict=True))
                if ids != right
            ],
        }

    def _replies_alone(self, part: Slice, texts: Sequence[str]) -> list[list[int]]:
        key = (part.sampling, part.first)
        if key not in self._wanted:
            self._wanted = {k: v for k, v in self._wanted.items() if k[1] == part.first}
            requests = self.bench.requests(texts, SAMPLINGS[part.sampling], self.tokens)
            with self.bench.engine(1, "off") as engine:
                self._wanted[key] = [run_all(engine, [request])[0][0] for request in requests]
        return self._wanted[key]


def prompts_of(first: int, last: int) -> list[str]:
    """Prompts by number: 16 texts, told apart by the number behind them."""
    return [f"{PROMPTS[i % len(PROMPTS)]} ({i})" for i in range(first, last)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--slice", type=int, default=10)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    done = _saved(a.save)
    left = [part for part in all_slices(a.prompts, a.slice) if part.name not in done]
    bench = Bench(a.model or str(embedded_model_path()), threads=a.threads, context=512)
    identity, end_s = Identity(bench, a.tokens), time.monotonic() + 60 * a.minutes
    for part in left:
        if time.monotonic() > end_s:
            break
        found = identity.run(part)
        done[part.name] = found
        line = json.dumps(found)
        print(line, file=sys.stderr)
        if a.save:
            with a.save.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    report = summary(list(done.values()), a.prompts, a.slice)
    print(json.dumps(report, indent=2))
    if report["different"]:
        sys.exit(1)


def summary(found: Sequence[dict[str, object]], prompts: int, size: int) -> dict[str, object]:
    """Counts over all slices done."""
    total = sum(part.last - part.first for part in all_slices(prompts, size))
    return {
        "replies_in_all": total,
        **{key: sum(int(str(one[key])) for one in found) for key in _COUNTS},
        "different": [one["slice"] for one in found if one["different"]],
    }


_COUNTS = ("compared", "cache_hits", "drafted", "accepted")


def _saved(path: Path | None) -> dict[str, dict[str, object]]:
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["slice"]: line for line in lines}


if __name__ == "__main__":
    main()
