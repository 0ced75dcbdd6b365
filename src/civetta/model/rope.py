"""Interleaved multimodal rotary positions (model.md D.3)."""

from __future__ import annotations

import torch
from torch import Tensor


class RopeTable:
    """Angles of R = dims / 2 frequencies; frequency i follows t, h or w by its place."""

    def __init__(
        self,
        dims: int,
        theta: float,
        section: tuple[int, int, int],
        device: torch.device | None = None,
    ) -> None:
        half = dims // 2
        exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
        self.inverse_R = (1.0 / (theta**exponents)).to(device)
        axis = torch.zeros(half, dtype=torch.int64)
        for i in range(half):
            for which in (1, 2):
                if i % 3 == which and i < 3 * section[which]:
                    axis[i] = which
        self.axis_R = axis.to(device)

    def angles(self, positions_3T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, R], for integer positions (t, h, w) [3, T]."""
        angle_TR = positions_3T[self.axis_R].t().float() * self.inverse_R
        return angle_TR.cos(), angle_TR.sin()
