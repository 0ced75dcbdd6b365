"""`civetta diagnose --benchmark ngram`: how fast this disk answers, and where to keep the table."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import numpy as np

from civetta.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from civetta.ngram.layout import TableLayout
    from civetta.options import ModelOptions

CASES = (
    *(("uring", depth) for depth in (1, 8, 32, 64, 128, 256)),
    *(("pool", threads) for threads in (1, 8, 32, 64, 128)),
    *(("python", threads) for threads in (1, 8, 32)),
)
CASE_S = 1.0
GATHER_ROWS = 2048
DECODE_ROWS = 16
"""Rows a token, model.md A.5; a table's heads may differ, the report uses the table's own."""
SCRATCH_BYTES = 256 << 20
LEAST_BYTES = 64 << 20
"""A smaller table says little about a disk: the drive's own cache would hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One reader at one depth: rows a second in deep gathers, and the time of a token's rows."""

    reader: str
    depth: int
    rows_per_s: float
    token_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Where to keep the table, and what the disk would allow."""

    placement: str
    reason: str
    reader: str
    depth: int
    prefill_tokens_per_s: float


def run_ngram_benchmark(options: ModelOptions, *, as_json: bool) -> int:
    """Measure, print, advise. Raises UsageError for a model without a table, CheckpointError."""
    target = _Target.of(options)
    try:
        rates = list(_measure(target.layout))
        advice = advise(target, rates)
    finally:
        target.close()
    if as_json:
        report: dict[str, Any] = {
            "file": str(target.layout.paths[0]),
            "scratch": target.scratch is not None,
            "direct": target.direct,
            "table_bytes": target.table_bytes,
            "rates": [asdict(rate) for rate in rates],
            "advice": asdict(advice),
        }
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print(target, rates, advice)
    return 0


class _Target:
    """The model's table, or a scratch file of random bytes beside it when that is too small."""

    def __init__(self, table: TableLayout, other_bytes: int, heads: int) -> None:
        self.layout, self.table_bytes, self.other_bytes = table, table.nbytes, other_bytes
        self.heads = heads
        self.scratch: Path | None = None
        if table.nbytes < LEAST_BYTES:
            self.scratch = _write_scratch()
            self.layout = _scratch_layout(self.scratch)
        self.direct = _is_direct(self.layout)

    @classmethod
    def of(cls, options: ModelOptions) -> _Target:
        """The target that --model names."""
        from civetta.model.build import check_checkpoint, table_layout
        from civetta.model.embedded import embedded_model_path

        path = Path(options.model) if options.model is not None else embedded_model_path()
        checked = check_checkpoint(path)
        layout, ple = table_layout(checked), checked.config.ple
        if layout is None or ple is None:
            raise UsageError(f"{path} has no n-gram table; there is nothing to measure.")
        stored_bytes = sum(info.nbytes for info in checked.checkpoint.tensors.values())
        return cls(layout, stored_bytes - layout.nbytes, ple.hash.heads)

    def close(self) -> None:
        """Remove the scratch file."""
        if self.scratch is not None:
            self.scratch.unlink(missing_ok=True)


def advise(target: _Target, rates: list[Rate]) -> Advice:
    """The placement that `auto` would take, and the best reader with the prefill it allows."""
    import torch

    from civetta.ngram.placement import choose, free_memory

    best = max(rates, key=lambda rate: rate.rows_per_s)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    placement, reason = choose(
        target.table_bytes,
        other_bytes=target.other_bytes,
        free=free_memory(device),
        on_gpu=device.type != "cpu",
    )
    return Advice(
        placement=placement,
        reason=reason,
        reader=best.reader,
        depth=best.depth,
        prefill_tokens_per_s=best.rows_per_s / target.heads,
    )


def _measure(layout: TableLayout) -> Iterator[Rate]:
    from civetta.ngram.disk_rows import DiskRows
    from civetta.ngram.reader import available_kinds

    rng = np.random.default_rng(0)
    for kind, depth in CASES:
        if kind not in available_kinds():
            continue
        store = DiskRows(layout, reader=kind, depth=depth, cache_bytes=0)
        try:
            yield Rate(
                reader=kind,
                depth=depth,
                rows_per_s=_rows_per_s(store, rng, layout.rows),
                token_ms=_token_ms(store, rng, layout.rows),
            )
        finally:
            store.close()


def _rows_per_s(store: Any, rng: np.random.Generator, rows: int) -> float:
    """Gathers of many rows, one queued behind the other, for about a second."""
    began_s, done = time.perf_counter(), 0
    ahead = store.submit(_pick(rng, rows, GATHER_ROWS))
    while time.perf_counter() - began_s < CASE_S:
        ticket, ahead = ahead, store.submit(_pick(rng, rows, GATHER_ROWS))
        done += len(ticket.wait().rows_N)
    done += len(ahead.wait().rows_N)
    return done / (time.perf_counter() - began_s)


def _token_ms(store: Any, rng: np.random.Generator, rows: int) -> float:
    """The median time of a token's rows, nothing else under way."""
    times_s = []
    for _ in range(30):
        began_s = time.perf_counter()
        store.submit(_pick(rng, rows, DECODE_ROWS)).wait()
        times_s.append(time.perf_counter() - began_s)
    return float(np.median(times_s)) * 1e3


def _pick(rng: np.random.Generator, rows: int, count: int) -> NDArray[np.int64]:
    return rng.integers(0, rows, count)


def _is_direct(layout: TableLayout) -> bool:
    from civetta.ngram.table_files import TableFiles

    files = TableFiles(layout)
    files.close()
    return files.direct


def _write_scratch() -> Path:
    """A file of random bytes in the working folder's filesystem, else among temporary files."""
    folder = Path.cwd()
    try:
        return _write_random(folder)
    except OSError:
        return _write_random(Path(tempfile.gettempdir()))


def _write_random(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="civetta-ngram-", delete=False) as file:
        path = Path(file.name)
        try:
            for _ in range(SCRATCH_BYTES // (8 << 20)):
                file.write(rng.bytes(8 << 20))
        except OSError:
            path.unlink()
            raise
    return path


def _scratch_layout(path: Path) -> TableLayout:
    """Rows as the table of the released model has them: 160 values in 90 bytes."""
    from civetta.checkpoint.formats import IQ4_NL
    from civetta.ngram.layout import Field, Shard, TableLayout

    shard = Shard(path=path, offset=0, rows=SCRATCH_BYTES // 90)
    return TableLayout(format=IQ4_NL, cols=160, fields=(Field(row_bytes=90, shards=(shard,)),))


def _print(target: _Target, rates: list[Rate], advice: Advice) -> None:
    what = "a scratch file beside you" if target.scratch is not None else "the model's table"
    how = (
        "past the page cache" if target.direct else "through the page cache (direct reads refused)"
    )
    click.echo(f"Reading {what}, {how}: {target.layout.paths[0]}")
    click.echo(f"{'reader':8}{'depth':>6}{'rows/s':>10}{'prefill tok/s':>15}{'a token, ms':>13}")
    for rate in rates:
        click.echo(
            f"{rate.reader:8}{rate.depth:6}{rate.rows_per_s:10.0f}"
            f"{rate.rows_per_s / target.heads:15.0f}{rate.token_ms:13.3f}"
        )
    click.echo(
        f"At its best ({advice.reader}, {advice.depth} reads in flight) this disk allows a prefill of"
        f" {advice.prefill_tokens_per_s:.0f} tokens a second when no row repeats:"
        f" {target.heads} rows a token, {4096 * target.heads} a chunk of 4,096."
    )
    click.echo(
        f"Advice: --ngram-placement {advice.placement}; the table of {target.table_bytes} bytes"
        f" {advice.reason}."
    )
