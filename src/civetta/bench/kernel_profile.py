"""Launches and device times of a run, kernel by kernel, on a GPU.

Launches are seen where Triton makes them, times come from torch's profiler. Graphs are set aside
for the run: a replay has no launches, and its kernels are the same.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in __all__

from civetta.bench.kernel_costs import cost_of
from civetta.bench.kernel_table import Ceilings, KernelRow, Launch, Timed, kernel_rows
from civetta.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from civetta.model.trunk import Trunk

COPY_BYTES = 1 << 30
PRODUCT_WIDTH = 8192
TRIES = 5


@contextmanager
def launches_of(kind: type) -> Iterator[list[Launch]]:
    """Collects what Triton launches through kernels of class `kind` while the block runs."""
    found: list[Launch] = []
    real: Callable[..., Any] = kind.run  # type: ignore[attr-defined]

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if not warmup:
            arguments = dict(zip(self.arg_names, args, strict=False)) | named
            found.append(Launch(kernel=self.__name__, cost=cost_of(self.__name__, arguments)))
        return real(self, *args, grid=grid, warmup=warmup, **named)

    kind.run = run  # type: ignore[attr-defined]
    try:
        yield found
    finally:
        kind.run = real  # type: ignore[attr-defined]


def profile_kernels(trunk: Trunk, run: Callable[[], object], ceilings: Ceilings) -> list[KernelRow]:
    """Rows of one `run` of the trunk, which has run once before so that all is compiled.

    Raises UsageError for a trunk that is not on a GPU.
    """
    require_gpu(trunk.device)
    from triton.runtime.jit import JITFunction

    from civetta.model.gpu.trunk import GpuTrunk

    assert isinstance(trunk, GpuTrunk)
    with trunk.without_graphs():
        run()
        torch.cuda.synchronize()
        with launches_of(JITFunction) as launches:
            run()
        torch.cuda.synchronize()
        times = _times(run)
    return kernel_rows(launches, times, ceilings)


def require_gpu(device: torch.device) -> None:
    """Raises UsageError for a device that has no kernels to profile."""
    if device.type != "cuda":
        raise UsageError(
            "--profile lists a GPU's kernels: add --device cuda; on a CPU, --phases tells the parts."
        )


def measured_ceilings() -> Ceilings:
    """What the current GPU reaches: a copy, bytes read and written, and a float16 product."""
    device = torch.device("cuda")
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
    copy_s = _fastest(source.clone)
    square = (PRODUCT_WIDTH, PRODUCT_WIDTH)
    a, b = (torch.randn(square, dtype=torch.float16, device=device) for _ in range(2))
    product_s = _fastest(lambda: a @ b)
    return Ceilings(bytes_a_s=2 * COPY_BYTES / copy_s, flop_a_s=2 * PRODUCT_WIDTH**3 / product_s)


def _fastest(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(TRIES):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch has no types
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        seconds.append(float(began.elapsed_time(ended)) / 1000)
    return min(seconds)


def _times(run: Callable[[], object]) -> list[Timed]:
    """What the device ran, in the order of time."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    raw = profiler.profiler
    assert raw is not None
    events = [
        event for event in raw.kineto_results.events() if event.device_type() == DeviceType.CUDA
    ]
    events.sort(key=lambda event: event.start_ns())
    return [Timed(kernel=event.name(), seconds=event.duration_ns() / 1e9) for event in events]
