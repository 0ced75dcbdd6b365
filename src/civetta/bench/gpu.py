"""What measuring needs of a GPU: whether one is in use, its end of work, its clock, its memory."""

from __future__ import annotations

import torch


def in_use() -> bool:
    """Whether this process has begun to use a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch has no types


def settle() -> None:
    """Wait for what a GPU still does, if one is in use."""
    if in_use():
        torch.cuda.synchronize()


def mark() -> torch.cuda.Event:
    """A point in the GPU's work, behind all that was launched before; costs no waiting."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
    event.record()
    return event


def seconds_between(began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    """The GPU's time between two points that it has passed."""
    return float(began.elapsed_time(ended)) / 1000


def forget_peak() -> None:
    """Let `peak_bytes` begin anew."""
    if in_use():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Most bytes of GPU memory that tensors took since `forget_peak`; 0 without a GPU."""
    return int(torch.cuda.max_memory_allocated()) if in_use() else 0
