"""What the tests of compiled ops share: numbers, instruction sets, poisoned outputs, comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from civetta.kernels import cpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FUSED = ("avx512", "avx2", "neon")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
"""Relative error against the reference; in bfloat16 a result may round to its neighbour."""


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert torch.isfinite(error)
    return float(error)


def poisoned() -> Iterator[None]:
    """Fresh tensors hold NaN or the largest integer, so an element left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def instruction_sets() -> list[str]:
    if not cpu.available():
        return []
    from civetta.kernels import _native

    found = []
    for name in (*FUSED, "generic"):
        try:
            _native.use_instructions(name)
        except ValueError:
            continue
        found.append(name)
    _native.use_instructions("")
    return found


def same_bits_everywhere(call: Callable[[], torch.Tensor]) -> None:
    """Instruction sets with fused multiply-add give the same bits, one thread or three."""
    from civetta.kernels import _native

    before = _native.get_threads()
    wanted = call()
    for name in instruction_sets():
        if name not in FUSED:
            continue
        for threads in (1, 3):
            _native.use_instructions(name)
            _native.set_threads(threads)
            found = call()
            _native.use_instructions("")
            _native.set_threads(before)
            assert torch.equal(found, wanted), (name, threads)
