"""Interleaved multimodal rotary positions (model.md D.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.state.spans import ImageSpan


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


def rope_positions(images: Sequence[ImageSpan], first: int, count: int) -> Tensor:
    """Positions (t, h, w) of tokens [first, first + count), int64 [3, count] (model.md D.3).

    Text counts up on all three; the tokens of an image share t, and h and w are their row and
    column; text goes on after the image's longer side. `images` ascend.
    """
    places_T = torch.arange(first, first + count)
    found_3T = places_T.expand(3, -1)
    shift = 0  # what the images before a token take away from its place in the sequence
    for image in images:
        if image.start >= first + count:
            break
        begin = image.start + shift
        shift += image.advance - image.tokens
        if image.stop <= first:
            found_3T = places_T.expand(3, -1) + shift
            continue
        inside = (places_T >= image.start) & (places_T < image.stop)
        index = places_T - image.start
        own_3T = torch.stack([torch.zeros_like(index), index // image.cols, index % image.cols])
        later_3T = torch.where(places_T >= image.stop, places_T + shift, found_3T)
        found_3T = torch.where(inside, own_3T + begin, later_3T)
    return found_3T
