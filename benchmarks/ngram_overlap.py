"""How much of the n-gram reads a prefill still waits for when they run behind its compute.

A table of random rows on disk, prompts of random tokens, the real feed. A chunk's compute is stood
in for by sleeping: a share of it before the n-gram layer (layer 0), the rest after, as long in
all as the case says. Reported: the wait that is left after the first chunk as a share of prefill
time, beside the floor that the disk itself sets (its gather time minus the compute that could hide
it), for chunks of 512 to 8192 tokens and computes from half to four times the gather.

    python benchmarks/ngram_overlap.py [--file FILE] [--gib 4] [--chunks 4] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from ngram_reader import ROW_BYTES, layout_of, write_random

from civetta.ngram.disk_rows import DiskRows
from civetta.ngram.feed import RowFeed
from civetta.ngram.hash import NgramHash, make_hash

SIZES = (512, 1024, 2048, 4096, 8192)
FACTORS = (0.5, 1.25, 2.0, 4.0)
LAYER_0 = 1 / 48  # of a chunk's compute lies before the n-gram layer
VOCAB = 248_320


def hash_for(rows: int) -> NgramHash:
    """The real hash over a table of fewer rows."""
    return make_hash(
        vocab=VOCAB, size=3, heads_per_ngram=8, base=(rows - 65_536) // 16, seed=1234,
        eos_token_id=248_044, divisor=1,
    )  # fmt: skip


def new_feed(path: Path, *, prefetch: bool) -> RowFeed:
    layout = layout_of(path)
    store = DiskRows(layout)
    return RowFeed(hash_for(layout.rows), store, dtype=torch.bfloat16, prefetch=prefetch)


def prefill(feed: RowFeed, ids: list[int], size: int, compute_s: float) -> dict[str, float]:
    """Chunk by chunk, as the trunk does it."""
    waits, began = [], time.perf_counter()
    for start in range(0, len(ids), size):
        chunk, later = ids[start : start + size], ids[start + size : start + 2 * size]
        ticket = feed.begin(chunk, ids[max(0, start - 2) : start])
        time.sleep(compute_s * LAYER_0)
        before = feed.stats().wait_s
        feed.take(ticket)
        waits.append(feed.stats().wait_s - before)
        if later:
            feed.prefetch(later, chunk[-2:])
        time.sleep(compute_s * (1 - LAYER_0))
    return {
        "prefill_s": time.perf_counter() - began,
        "first_wait_s": waits[0],
        "later_wait_s": sum(waits[1:]),
    }


def gather_s(path: Path, size: int) -> float:
    """The disk's own time for a chunk: a cold gather, nothing beside it; median of three."""
    feed, found = new_feed(path, prefetch=False), []
    for seed in range(3):
        ids = np.random.default_rng(100 + seed).integers(0, VOCAB, size).tolist()
        before = feed.stats().wait_s
        feed.take(feed.begin(ids, []))
        found.append(feed.stats().wait_s - before)
    feed.close()
    return statistics.median(found)


def measure(path: Path, chunks: int) -> list[dict]:
    rows = []
    for size in SIZES:
        alone_s = gather_s(path, size)
        for factor in FACTORS:
            compute_s = alone_s * factor
            ids = np.random.default_rng(size).integers(0, VOCAB, size * chunks).tolist()
            case = {"chunk": size, "gather_s": alone_s, "compute_s": compute_s}
            for prefetch in (True, False):
                feed = new_feed(path, prefetch=prefetch)
                result = prefill(feed, ids, size, compute_s)
                feed.close()
                key = "prefetch" if prefetch else "plain"
                case[f"{key}_wait_share"] = result["later_wait_s"] / result["prefill_s"]
                case[f"{key}_prefill_s"] = result["prefill_s"]
            floor_s = max(0.0, alone_s - compute_s) * (chunks - 1)
            case["floor_share"] = floor_s / case["prefetch_prefill_s"]
            rows.append(case)
            print(
                f"{size:6} gather {alone_s * 1e3:7.1f} ms, compute {compute_s * 1e3:7.1f} ms: wait"
                f" {case['prefetch_wait_share']:7.2%} (floor {case['floor_share']:6.2%}),"
                f" without prefetch {case['plain_wait_share']:7.2%}",
                flush=True,
            )
    return rows


def chart(rows: list[dict]) -> str:
    """Gather time and chunk time over the chunk size, logarithmic both ways, as SVG."""
    wide, high, pad = 640, 400, 60
    longest = max(max(r["gather_s"], r["prefetch_chunk_s"]) for r in rows)
    shortest = min(r["gather_s"] for r in rows)
    span = np.log(longest / shortest)

    def point(size: float, seconds: float) -> str:
        x = pad + (wide - 2 * pad) * np.log2(size / SIZES[0]) / np.log2(SIZES[-1] / SIZES[0])
        y = high - pad - (high - 2 * pad) * np.log(seconds / shortest) / span
        return f"{x:.1f},{y:.1f}"

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
        f'<text x="{pad}" y="24">Time a chunk against its gather from disk (both axes logarithmic)'
        "</text>",
    ]
    lines = [("gather alone", "black", lambda r: r["gather_s"], FACTORS[1])]
    colours = ("#c33", "#d80", "#280", "#36c")
    for factor, colour in zip(FACTORS, colours, strict=True):
        name = f"chunk, compute {factor:g} x gather"
        lines.append((name, colour, lambda r: r["prefetch_chunk_s"], factor))
    for n, (name, colour, value, factor) in enumerate(lines):
        mine = [r for r in rows if r["factor"] == factor]
        points = " ".join(point(r["chunk"], value(r)) for r in mine)
        dash = ' stroke-dasharray="5 4"' if n == 0 else ""
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}"{dash}/>')
        y = 44 + 16 * n
        out.append(f'<text x="{pad + 8}" y="{y}" fill="{colour}">{name}</text>')
    for size in SIZES:
        x, y = point(size, shortest).split(",")
        out.append(f'<text x="{x}" y="{float(y) + 20}" text-anchor="middle">{size}</text>')
    for r in (rows[0], rows[-1]):
        x, y = point(r["chunk"], r["gather_s"]).split(",")
        out.append(f'<text x="{x}" y="{float(y) + 14}">{r["gather_s"] * 1e3:.0f} ms</text>')
    return "\n".join([*out, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, help="a large file to read; left out, one is written")
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        path = args.file or Path(name) / "table.bin"
        if args.file is None:
            write_random(path, args.gib)
        print(f"table: {path.stat().st_size / 2**30:.1f} GiB, rows of {ROW_BYTES} bytes")
        rows = measure(path, args.chunks)
    for r in rows:
        r["prefetch_chunk_s"] = r["prefetch_prefill_s"] / args.chunks
        r["factor"] = min(FACTORS, key=lambda f: abs(f - r["compute_s"] / r["gather_s"]))
    if args.plot is not None:
        args.plot.write_text(chart(rows), encoding="utf-8")
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
