"""The kernel table: launches and their times joined, summed up, and set beside the roofline."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from civetta.bench.kernel_costs import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the card reaches: bytes a second of a large copy, FLOP a second of a large product."""

    bytes_a_s: float
    flop_a_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel that was launched; no cost where it is not known."""

    kernel: str
    cost: Cost | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A kernel that the device ran."""

    kernel: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """All launches of one kernel with one detail.

    `nbytes`, `flop` and `share` (the roofline's time over the measured one) are None when a launch
    among them has no known cost.
    """

    kernel: str
    calls: int
    seconds: float
    nbytes: float | None
    flop: float | None
    share: float | None


def kernel_rows(
    launches: Iterable[Launch], times: Iterable[Timed], ceilings: Ceilings
) -> list[KernelRow]:
    """One row a kernel and detail, the longest first.

    A stream runs kernels in the order of their launches, so the i-th time of a name belongs to its
    i-th launch. A time without a launch (a library's kernel, a copy) has no cost.
    """
    waiting: dict[str, deque[Cost | None]] = defaultdict(deque)
    for launch in launches:
        waiting[launch.kernel].append(launch.cost)
    sums: dict[str, list[tuple[float, Cost | None]]] = defaultdict(list)
    for timed in times:
        queue = waiting[timed.kernel]
        cost = queue.popleft() if queue else None
        detail = f" {cost.detail}" if cost is not None and cost.detail else ""
        sums[timed.kernel + detail].append((timed.seconds, cost))
    rows = [_row(name, found, ceilings) for name, found in sums.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def _row(name: str, found: Sequence[tuple[float, Cost | None]], ceilings: Ceilings) -> KernelRow:
    seconds = sum(s for s, _ in found)
    costs = [cost for _, cost in found if cost is not None]
    if len(costs) < len(found):
        return KernelRow(
            kernel=name, calls=len(found), seconds=seconds, nbytes=None, flop=None, share=None
        )
    floor_s = sum(floor_of(cost, ceilings) for cost in costs)
    return KernelRow(
        kernel=name,
        calls=len(found),
        seconds=seconds,
        nbytes=sum(cost.nbytes for cost in costs),
        flop=sum(cost.flop for cost in costs),
        share=floor_s / seconds if seconds else None,
    )


def floor_of(cost: Cost, ceilings: Ceilings) -> float:
    """Seconds that no version of the launch goes below: moving or computing, the longer one."""
    return max(cost.nbytes / ceilings.bytes_a_s, cost.flop / ceilings.flop_a_s)


def table_text(title: str, rows: Sequence[KernelRow], ceilings: Ceilings) -> str:
    """The table in Markdown, with the sum of all rows and what the roofline is made of."""
    total_s = sum(row.seconds for row in rows)
    lines = [
        f"{title}: kernels take {1e3 * total_s:.3f} ms; roofline of this card:"
        f" {ceilings.bytes_a_s / 1e12:.2f} TB/s, {ceilings.flop_a_s / 1e12:.0f} TFLOP/s",
        "",
        "| kernel | calls | us | of all | us a call | MB | GFLOP | of the roofline |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            row.kernel.replace("|", "\\|"),
            str(row.calls),
            f"{1e6 * row.seconds:.1f}",
            f"{100 * row.seconds / total_s:.1f} %" if total_s else "-",
            f"{1e6 * row.seconds / row.calls:.1f}",
            "-" if row.nbytes is None else f"{row.nbytes / 1e6:.2f}",
            "-" if row.flop is None else f"{row.flop / 1e9:.2f}",
            "-" if row.share is None else f"{100 * row.share:.0f} %",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
