"""How long a decoded token waits for its 16 rows, on this disk and on one that answers later.

Rows of a random table, through the store as the engine uses it: duplicates dropped, reads planned,
files verified. Every reader in turn, with and without --answer-us microseconds added to each read,
A B A B. Prints median, best and tenth percentiles in milliseconds; nothing else is read meanwhile.

    python benchmarks/ngram_decode.py [--file FILE] [--gib 1] [--answer-us 100] [--gathers 300]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from ngram_reader import DECODE_ROWS, layout_of, write_random

from civetta.ngram.disk_rows import DiskRows
from civetta.ngram.reader import Fault, available_kinds

FOR_EVER = 1 << 40


def gather_ms(store: DiskRows, rng: np.random.Generator, delay_us: int) -> float:
    store.reader.inject(Fault(delay_us=delay_us, count=FOR_EVER if delay_us else 0))
    began_s = time.perf_counter()
    store.submit(rng.integers(0, store.layout.rows, DECODE_ROWS)).wait()
    return (time.perf_counter() - began_s) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="a large file to read; left out, one is written")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--answer-us", type=int, default=100)
    parser.add_argument("--gathers", type=int, default=300)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = a.file or Path(name) / "table.bin"
        if a.file is None:
            write_random(path, a.gib)
        stores = {
            kind: DiskRows(layout_of(path), reader=kind, cache_bytes=0)
            for kind in available_kinds()
        }
        cases = [(kind, delay_us) for kind in stores for delay_us in (0, a.answer_us)]
        found: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
        rng = np.random.default_rng(0)
        for turn in range(a.gathers + 20):  # the first ones warm up
            for kind, delay_us in cases:
                ms = gather_ms(stores[kind], rng, delay_us)
                if turn >= 20:
                    found[kind, delay_us].append(ms)
        for store in stores.values():
            store.close()
    print(f"{'reader':8}{'added us':>10}{'median':>9}{'least':>9}{'p10':>9}{'p90':>9}")
    for (kind, delay_us), times in found.items():
        p10, median, p90 = np.percentile(times, (10, 50, 90))
        print(f"{kind:8}{delay_us:10}{median:9.3f}{min(times):9.3f}{p10:9.3f}{p90:9.3f}")


if __name__ == "__main__":
    main()
