"""`civetta diagnose --benchmark bandwidth|allocation`: how fast memory is copied, and how fast given."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click
import msgspec

from civetta.cli.interrupts import interrupts_deferred
from civetta.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

BACKENDS = ("cpu", "cuda", "hip")
"""Where memory lies; hip is what torch calls cuda on AMD."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """How to measure: runs before, timed runs, when to stop for time, bytes of a run."""

    warmup: int
    repetitions: int
    duration_ms: int
    working_set_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRate:
    """One backend: GB/s (10^9 bytes; a copy counts what it reads and what it writes)."""

    backend: str
    runs: int
    median_gb_s: float
    least_gb_s: float
    most_gb_s: float


def parse_backends(text: str) -> tuple[str, ...]:
    """Names of BACKENDS, separated by commas. Raises UsageError for another name."""
    names = tuple(text.split(","))
    for name in names:
        if name not in BACKENDS:
            raise UsageError(
                f"--backends is {text[:40]!r}: give {', '.join(BACKENDS)}, separated by commas."
            )
    return names


def run_memory_benchmark(
    what: str, backends: tuple[str, ...], case: MemoryCase, *, as_json: bool
) -> int:
    """Measure and print. Raises UsageError for a backend that is not there."""
    rates = [measure(what, backend, case) for backend in backends]
    if as_json:
        report = {"benchmark": what, "case": asdict(case), "rates": [asdict(r) for r in rates]}
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        return 0
    for rate in rates:
        click.echo(
            f"{what} {rate.backend}: {rate.median_gb_s:.2f} GB/s"
            f" ({rate.least_gb_s:.2f} to {rate.most_gb_s:.2f}, {rate.runs} runs of"
            f" {case.working_set_mib} MiB)"
        )
    return 0


def measure(what: str, backend: str, case: MemoryCase) -> MemoryRate:
    """Rates of "bandwidth" (a copy) or "allocation" (fresh memory, every page written)."""
    with interrupts_deferred():
        import torch

    device = "cpu" if backend == "cpu" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--backends {backend}: torch sees no GPU; use --backends cpu.")
    size = case.working_set_mib * _MIB
    run = _copying(torch.device(device), size) if what == "bandwidth" else _giving(device, size)
    moved = 2 * size if what == "bandwidth" else size
    finish: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else _nothing
    for _ in range(case.warmup):
        run()
    finish()
    rates = [moved / s / 1e9 for s in _timed(run, finish, case)]
    return MemoryRate(
        backend=backend,
        runs=len(rates),
        median_gb_s=round(statistics.median(rates), 3),
        least_gb_s=round(min(rates), 3),
        most_gb_s=round(max(rates), 3),
    )


def _timed(run: Callable[[], None], finish: Callable[[], None], case: MemoryCase) -> list[float]:
    """Seconds of each run; fewer than asked when the time is over, at least one."""
    seconds: list[float] = []
    end_s = time.perf_counter() + case.duration_ms / 1000
    while not seconds or (len(seconds) < case.repetitions and time.perf_counter() < end_s):
        started = time.perf_counter()
        run()
        finish()
        seconds.append(time.perf_counter() - started)
    return seconds


def _copying(device: torch.device, size: int) -> Callable[[], None]:
    import torch

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)

    return run


def _giving(device: str, size: int) -> Callable[[], None]:
    import torch

    def run() -> None:
        if device == "cuda":
            torch.cuda.empty_cache()  # else torch hands out what it kept
        torch.zeros(size, dtype=torch.uint8, device=device).fill_(1)

    return run


def _nothing() -> None:
    """A CPU's work is done when the call returns."""
