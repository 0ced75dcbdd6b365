"""Rotary positions of packed rows with pictures (model.md D.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from training.data.encode import TOKEN_SIDE

if TYPE_CHECKING:
    from collections.abc import Iterable


def rotary_positions(
    rows: int, tokens: int, images: Iterable[tuple[int, int, tuple[int, int]]]
) -> np.ndarray:
    """Positions (t, h, w) of every token, int64 [B, 3, T].

    `images` names a row, the index of the first placeholder, and the picture's height and width in
    pixels. Positions run through a packed row: a sample sees differences only.
    """
    positions = np.broadcast_to(np.arange(tokens), (rows, 3, tokens)).copy()
    for row, start, (height, width) in sorted(images):
        high, wide = height // TOKEN_SIDE, width // TOKEN_SIDE
        stop, now = start + high * wide, positions[row, 0, start]
        positions[row, :, stop:] -= high * wide - max(high, wide)
        down, right = np.divmod(np.arange(high * wide), wide)
        positions[row, :, start:stop] = now + np.stack([np.zeros_like(down), down, right])
    return positions
