"""Comparing sequences of token ids. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    # Halving with slices compares at C speed; token by token would be slow for long prompts.
    while low + 1 < high:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
