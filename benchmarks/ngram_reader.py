"""Our readers of table rows against a plain C pool and against Python threads, on one disk.

Random rows of a file, one page each, O_DIRECT. Every round measures every contestant once, in
turn, each round beginning with another; the figures are medians over rounds, the ratios are taken
round by round.

    python benchmarks/ngram_reader.py [--file FILE] [--gib 4] [--rounds 5] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from civetta.checkpoint import formats
from civetta.ngram.layout import Field, RowLocator, Shard, TableLayout
from civetta.ngram.reader import PAGE_BYTES, available_kinds, open_reader
from civetta.ngram.table_files import TableFiles

READS = 65_536  # 16 rows of each of 4,096 tokens
DECODE_ROWS = 16
ROW_BYTES = 90  # IQ4_NL, 160 values
POOL = "c pool"


def layout_of(path: Path) -> TableLayout:
    shard = Shard(path=path, offset=0, rows=path.stat().st_size // ROW_BYTES)
    return TableLayout(
        format=formats.IQ4_NL, cols=160, fields=(Field(row_bytes=ROW_BYTES, shards=(shard,)),)
    )


def write_random(path: Path, gib: float) -> None:
    """Data that no layer below can compress or share."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(int(gib * 64)):
            file.write(rng.bytes(16 << 20))


def compile_pool(folder: Path) -> Path:
    source = Path(__file__).with_name("ngram_pool.cpp")
    program = folder / "ngram_pool"
    subprocess.run(
        ["c++", "-O3", "-std=c++20", "-pthread", str(source), "-o", str(program)], check=True
    )
    return program


def page_rows(rng: np.random.Generator, layout: TableLayout, count: int) -> np.ndarray:
    """Rows in `count` different pages, none over a page's end, ascending."""
    pages = np.sort(rng.choice(layout.nbytes // PAGE_BYTES - 1, count, replace=False))
    return -(-pages * PAGE_BYTES // ROW_BYTES)


def time_pool(program: Path, path: Path, rows: np.ndarray, threads: int, folder: Path) -> tuple:
    offsets = folder / "offsets"
    (rows * ROW_BYTES // PAGE_BYTES * PAGE_BYTES).astype("<i8").tofile(offsets)
    done = subprocess.run(
        [str(program), str(path), str(offsets), str(threads)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    seconds, cpu_s, _ = done.stdout.split()
    return float(seconds), float(cpu_s)


class Ours:
    """One of our readers at one depth."""

    def __init__(self, kind: str, depth: int, layout: TableLayout) -> None:
        self.files = TableFiles(layout)
        self.locator = RowLocator(layout)
        self.reader = open_reader(self.files.fds, largest_bytes=ROW_BYTES, kind=kind, depth=depth)

    def gather(self, rows: np.ndarray) -> tuple[float, float]:
        began, cpu = time.perf_counter(), time.process_time()
        job = self.reader.submit(self.locator.pieces(rows), len(rows) * ROW_BYTES)
        while not job.wait(1.0):
            pass
        assert job.state == "done", job.failure
        return time.perf_counter() - began, time.process_time() - cpu

    def close(self) -> None:
        self.reader.close()
        self.files.close()


def measure(path: Path, rounds: int, folder: Path) -> list[dict]:
    layout, program = layout_of(path), compile_pool(folder)
    depths = {"uring": (128, 256), "pool": (32, 128), "python": (8, 32)}
    ours = {
        (kind, depth): Ours(kind, depth, layout)
        for kind in available_kinds()
        for depth in depths[kind]
    }
    cases: list[tuple[str, int]] = [(POOL, 32), (POOL, 128), *ours]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    decode: dict[tuple[str, int], list[float]] = {case: [] for case in ours}
    rng = np.random.default_rng(1)
    for turn in range(rounds + 1):  # the first is a warm-up
        first = turn % len(cases)  # nobody is always the one after the disk has rested
        for case in cases[first:] + cases[:first]:
            rows = page_rows(rng, layout, READS)
            time.sleep(0.5)
            if case in ours:
                seconds, cpu_s = ours[case].gather(rows)
            else:
                seconds, cpu_s = time_pool(program, path, rows, case[1], folder)
            if turn:
                found[case].append((READS / seconds, cpu_s / READS * 1e6))
        for case, reader in ours.items():
            for _ in range(40):
                decode[case].append(reader.gather(page_rows(rng, layout, DECODE_ROWS))[0])
        print(".", end="", flush=True, file=sys.stderr)
    for reader in ours.values():
        reader.close()
    return [
        {
            "reader": kind,
            "depth": depth,
            "reads_per_s": [rate for rate, _ in rates],
            "median_reads_per_s": statistics.median(rate for rate, _ in rates),
            "cpu_us_a_read": statistics.median(cpu for _, cpu in rates),
            "gather_16_ms": statistics.median(decode[kind, depth]) * 1e3
            if (kind, depth) in decode
            else None,
        }
        for (kind, depth), rates in found.items()
    ]


def best(cases: list[dict], kind: str) -> dict:
    return max((c for c in cases if c["reader"] == kind), key=lambda c: c["median_reads_per_s"])


def ratio(a: dict, b: dict) -> float:
    pairs = zip(a["reads_per_s"], b["reads_per_s"], strict=True)
    return statistics.median(x / y for x, y in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, help="a large file to read; left out, one is written")
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = args.file or folder / "table.bin"
        if args.file is None:
            write_random(path, args.gib)
        cases = measure(path, args.rounds, folder)
    print(f"\n{'reader':8}{'depth':>6}{'reads/s':>10}{'CPU us/read':>13}{'16 rows, ms':>13}")
    for c in cases:
        small = "" if c["gather_16_ms"] is None else f"{c['gather_16_ms']:.3f}"
        print(
            f"{c['reader']:8}{c['depth']:6}{c['median_reads_per_s']:10.0f}"
            f"{c['cpu_us_a_read']:13.2f}{small:>13}"
        )
    pool, python = best(cases, POOL), best(cases, "python")
    ratios = {
        f"{kind} {other['reader']}": ratio(best(cases, kind), other)
        for kind in available_kinds()
        if kind != "python"
        for other in (pool, python)
    }
    for name, value in ratios.items():
        kind, other = name.split(" ", 1)
        print(f"{kind} at its best over {other} at its best: {value:.2f}x")
    if args.out is not None:
        args.out.write_text(
            json.dumps({"cases": cases, "ratios": ratios}, indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
