"""The vision tower: patches of one image to rows of the trunk's width (model.md D.2).

An encoding goes in steps of bounded work, so that other requests' tokens come between them. Where
the steps are cut depends on the image's size alone, and so do the bits.

Shape suffixes: P patches · D tower width · H heads · A head width · N tokens · W trunk width
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Generator

    from civetta.chat.images import PreparedImage
    from civetta.kernels.ops import Ops
    from civetta.model.vision_config import VisionConfig
    from civetta.model.vision_weights import Affine, Norm, VisionBlockWeights, VisionWeights

STEP_PAIRS = 1 << 22
"""Patches of a step times patches of its image: what bounds a step's attention."""

STEP_PATCHES_MIN, STEP_PATCHES_MAX = 64, 1024


class VisionTower:
    """Weights and ops of the tower; holds no state of any image.

    `dtype` is that of the products' operands, `attended` that of queries, keys and values; sums,
    norms and the residual are float32. With both in bfloat16, attention is the larger part of what
    rounding does (docs/measurements/images.md).
    """

    def __init__(
        self,
        config: VisionConfig,
        weights: VisionWeights,
        ops: Ops,
        dtype: torch.dtype,
        *,
        attended: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.weights, self.ops = config, weights, ops
        self.dtype, self.attended = dtype, attended

    def begin(self, image: PreparedImage) -> ImageEncoding:
        """Start to encode; nothing is computed yet."""
        return ImageEncoding(self._steps(image))

    def encode(self, image: PreparedImage) -> Tensor:
        """All of it at once: rows [N, W] of `dtype`, one a token, row by row of the merged grid."""
        encoding = self.begin(image)
        while not encoding.advance():
            pass
        return encoding.rows_NW

    def _steps(self, image: PreparedImage) -> Generator[None, None, Tensor]:
        count = image.grid_h * image.grid_w
        parts = _parts(count, self.config.merge**2)
        place = self.weights.positions_LD.device
        x_PD = torch.empty(count, self.config.hidden, device=place)
        row_P, col_P = (axis.to(place) for axis in _grid(image, self.config.merge))
        for part in parts:
            x_PD[part] = self._embed(image, part, row_P[part], col_P[part])
            yield
        cos, sin = self._angles(row_P, col_P)
        for block in self.weights.blocks:
            yield from self._block(block, x_PD, parts, cos, sin)
        rows = []
        for part in parts:
            rows.append(self._merge(x_PD[part]))
            yield
        return torch.cat(rows).to(self.dtype)

    def _embed(self, image: PreparedImage, part: slice, row_P: Tensor, col_P: Tensor) -> Tensor:
        pixels = torch.from_numpy(image.normalised(part.start, part.stop)).to(row_P.device)
        x_PD = self._affine(pixels.to(self.dtype), self.weights.patch)
        return x_PD + self._positions(row_P, col_P, image.grid_h, image.grid_w)

    def _positions(self, row_P: Tensor, col_P: Tensor, height: int, width: int) -> Tensor:
        """The learned grid resampled bilinearly, corners on corners: row i at i * 47 / (h - 1)."""
        side = self.config.side
        low_y, high_y, y = _taps(row_P, height, side)
        low_x, high_x, x = _taps(col_P, width, side)
        table = self.weights.positions_LD
        top = table[low_y * side + low_x] * (1 - x) + table[low_y * side + high_x] * x
        bottom = table[high_y * side + low_x] * (1 - x) + table[high_y * side + high_x] * x
        return top * (1 - y) + bottom * y

    def _angles(self, row_P: Tensor, col_P: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [P, head_dim / 2]: half of it turns with the row, half with the
        column."""
        half = self.config.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=row_P.device) / half
        inverse = 1.0 / self.config.rope_theta**exponents
        angle = torch.cat([row_P[:, None] * inverse, col_P[:, None] * inverse], dim=1)
        return angle.cos(), angle.sin()

    def _block(
        self,
        w: VisionBlockWeights,
        x_PD: Tensor,
        parts: list[slice],
        cos: Tensor,
        sin: Tensor,
    ) -> Generator[None, None, None]:
        """One layer, in place: all queries, keys and values first, then what they give."""
        ops, c = self.ops, self.config
        most = torch.finfo(self.attended).max
        qkv = torch.empty(
            3, len(x_PD), c.heads, c.head_dim, dtype=self.attended, device=x_PD.device
        )
        for part in parts:
            new = self._affine(self._norm(x_PD[part], w.norm1), w.qkv)
            q, k, v = new.view(-1, 3, c.heads, c.head_dim).unbind(1)
            qkv[0, part] = ops.rope(q, cos[part], sin[part]).clamp_(-most, most)
            qkv[1, part] = ops.rope(k, cos[part], sin[part]).clamp_(-most, most)
            qkv[2, part] = v.clamp(-most, most)
            yield
        for part in parts:
            o_PHA = ops.attend_image(qkv[0, part], qkv[1], qkv[2])
            x = x_PD[part].add_(self._affine(o_PHA.flatten(1).to(self.dtype), w.out))
            hidden = self._affine(self._norm(x, w.norm2), w.fc1)
            x.add_(self._affine(ops.gelu_tanh(hidden).to(self.dtype), w.fc2))
            yield

    def _merge(self, x_PD: Tensor) -> Tensor:
        """Four neighbours side by side through the merger's two products."""
        merged = self._norm(x_PD, self.weights.merger_norm).view(-1, self.config.merged)
        hidden = self.ops.gelu(self._affine(merged, self.weights.merger_fc1))
        return self._affine(hidden.to(self.dtype), self.weights.merger_fc2)

    def _norm(self, x_PD: Tensor, w: Norm) -> Tensor:
        normed = self.ops.layer_norm(x_PD, w.gain_D, w.shift_D, self.config.norm_eps)
        return normed.to(self.dtype)

    def _affine(self, x_PK: Tensor, w: Affine) -> Tensor:
        return self.ops.matmul(x_PK, w.w, torch.float32).add_(w.bias_N)


class ImageEncoding:
    """One image under way."""

    def __init__(self, steps: Generator[None, None, Tensor]) -> None:
        self._steps = steps
        self._rows_NW: Tensor | None = None

    def advance(self) -> bool:
        """Do one step; True when the rows are there."""
        if self._rows_NW is None:
            with torch.inference_mode():
                try:
                    next(self._steps)
                except StopIteration as end:
                    self._rows_NW = end.value
        return self._rows_NW is not None

    @property
    def rows_NW(self) -> Tensor:
        """Rows of the tower's dtype, one a token; `advance` has returned True."""
        assert self._rows_NW is not None, "the image is not encoded yet"
        return self._rows_NW


def _parts(count: int, unit: int) -> list[slice]:
    """Slices of whole tokens whose work is bounded and follows from `count` alone."""
    step = min(max(STEP_PAIRS // count, STEP_PATCHES_MIN), STEP_PATCHES_MAX)
    step = -(-step // unit) * unit
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _grid(image: PreparedImage, merge: int) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, in the order of the patches."""
    index = torch.arange(image.grid_h * image.grid_w)
    inside, block = index % merge**2, index // merge**2
    blocks_a_row = image.grid_w // merge
    row = block // blocks_a_row * merge + inside // merge
    return row, block % blocks_a_row * merge + inside % merge


def _taps(place_P: Tensor, count: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """The two grid lines around each place, and how near the second is [P, 1]."""
    scaled = place_P * ((side - 1) / max(count - 1, 1))
    low = scaled.floor().long().clamp(max=side - 1)
    return low, (low + 1).clamp(max=side - 1), (scaled - low)[:, None].float()
