"""The precision of an expert's hidden row, between its products."""

from __future__ import annotations

import torch


def hidden_dtype(dtype: torch.dtype) -> torch.dtype:
    """What silu(gate) * up is rounded to when other operands have `dtype`.

    No norm bounds a gate times an up row, and float16 ends at 65504: bfloat16 in its place.
    """
    return torch.bfloat16 if dtype == torch.float16 else dtype
