"""The vision tower in training: pixels in, one row for each image token out (model.md D.1, D.2).

Parameters are a flat mapping by Hugging Face name. The patch projection is held as one matrix
over a single frame: the two frames of a still picture are equal, so the file has half of it twice.
Legend: N pictures · P patches · V tower width · A head width · D hidden width of the text model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

if TYPE_CHECKING:
    from training.trainer.network import Params

TOWER = "model.visual."
PATCH = TOWER + "patch_embed.proj.weight"
CELLS = "cells.weight"
"""A linear reading of what is in each cell, used while training and left out of the files."""

NORM_EPS = 1e-6
THETA = 1e4
CELL_LABELS = 41
"""Nothing, or one of 5 shapes in one of 8 colours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSizes:
    """The numbers of a `vision_config`."""

    depth: int
    width: int
    heads: int
    inner: int
    patch: int
    merge: int
    out: int
    table_side: int

    @classmethod
    def of(cls, vision: dict[str, Any]) -> TowerSizes:
        """Read a `vision_config`."""
        return cls(
            depth=vision["depth"],
            width=vision["hidden_size"],
            heads=vision["num_heads"],
            inner=vision["intermediate_size"],
            patch=vision["patch_size"],
            merge=vision["spatial_merge_size"],
            out=vision["out_hidden_size"],
            table_side=math.isqrt(vision["num_position_embeddings"]),
        )

    @property
    def merged(self) -> int:
        """Width of the patches of one token side by side."""
        return self.width * self.merge**2


def create_tower(s: TowerSizes, seed: int = 1) -> dict[str, Tensor]:
    """Float32 parameters on the CPU, the same for the same seed."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float | None = None) -> Tensor:
        return torch.randn(shape, generator=g) * (std or 0.7 / math.sqrt(shape[-1]))

    p = {
        PATCH: normal(s.width, 3 * s.patch**2),
        TOWER + "patch_embed.proj.bias": torch.zeros(s.width),
        TOWER + "pos_embed.weight": normal(s.table_side**2, s.width, std=0.1),
    }
    for i in range(s.depth):
        at = f"{TOWER}blocks.{i}."
        for norm in ("norm1", "norm2"):
            p[f"{at}{norm}.weight"], p[f"{at}{norm}.bias"] = (
                torch.ones(s.width),
                torch.zeros(s.width),
            )
        shapes = {
            "attn.qkv": (3 * s.width, s.width),
            "attn.proj": (s.width, s.width),
            "mlp.linear_fc1": (s.inner, s.width),
            "mlp.linear_fc2": (s.width, s.inner),
        }
        for name, (rows, cols) in shapes.items():
            back = 0.4 if name in ("attn.proj", "mlp.linear_fc2") else 1.0
            p[f"{at}{name}.weight"] = normal(rows, cols) * back
            p[f"{at}{name}.bias"] = torch.zeros(rows)
    p[TOWER + "merger.norm.weight"] = torch.ones(s.width)
    p[TOWER + "merger.norm.bias"] = torch.zeros(s.width)
    p[TOWER + "merger.linear_fc1.weight"] = normal(s.merged, s.merged)
    p[TOWER + "merger.linear_fc1.bias"] = torch.zeros(s.merged)
    p[TOWER + "merger.linear_fc2.weight"] = normal(s.out, s.merged)
    p[TOWER + "merger.linear_fc2.bias"] = torch.zeros(s.out)
    p[CELLS] = normal(CELL_LABELS, s.out)
    return p


def to_file(p: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters as the file has them: half of the patch projection for each of two frames."""
    out = {name: value for name, value in p.items() if name != CELLS}
    if PATCH in out:
        width, values = out[PATCH].shape
        side = math.isqrt(values // 3)
        out[PATCH] = (out[PATCH] / 2).view(width, 3, 1, side, side).repeat(1, 1, 2, 1, 1)
    return out


def from_file(name: str, value: Tensor) -> Tensor:
    """A tensor of the file as it is trained."""
    return value.sum(2).flatten(1) if name == PATCH and value.ndim == 5 else value


def patches(pixels_NHWC: Tensor, s: TowerSizes) -> Tensor:
    """float32 [N, P, 3 * patch * patch] in block-major order, from uint8 pictures of one size."""
    n, height, width, _ = pixels_NHWC.shape
    block = s.patch * s.merge
    x = (pixels_NHWC.float() / 255.0 - 0.5) / 0.5
    x = x.view(n, height // block, s.merge, s.patch, width // block, s.merge, s.patch, 3)
    return x.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(n, -1, 3 * s.patch**2)


def tower(p: Params, s: TowerSizes, pixels_NHWC: Tensor, dtype: torch.dtype) -> Tensor:
    """One row for each image token, float32 [N, P / merge², D], for pictures of one size."""
    x_NPF = patches(pixels_NHWC, s).to(dtype)
    grid = (pixels_NHWC.shape[1] // s.patch, pixels_NHWC.shape[2] // s.patch)
    device = pixels_NHWC.device
    spread_PG, place_2P = _grid(grid, s)
    x = _affine(p, TOWER + "patch_embed.proj", x_NPF).float()
    x = x + spread_PG.to(device) @ p[TOWER + "pos_embed.weight"].float()
    angles_PA = _angles(place_2P.to(device), s.width // s.heads)
    for i in range(s.depth):
        at = f"{TOWER}blocks.{i}."
        x = x + _attention(p, at + "attn.", _norm(p, at + "norm1", x, dtype), angles_PA, s).float()
        y = gelu(
            _affine(p, at + "mlp.linear_fc1", _norm(p, at + "norm2", x, dtype)), approximate="tanh"
        )
        x = x + _affine(p, at + "mlp.linear_fc2", y).float()
    y = _norm(p, TOWER + "merger.norm", x, dtype).unflatten(1, (-1, s.merge**2)).flatten(2)
    y = gelu(_affine(p, TOWER + "merger.linear_fc1", y))
    return _affine(p, TOWER + "merger.linear_fc2", y).float()


def _attention(p: Params, at: str, h_NPV: Tensor, angles_PA: Tensor, s: TowerSizes) -> Tensor:
    """Every patch sees every patch of its picture."""
    n, count, _ = h_NPV.shape
    qkv = _affine(p, at + "qkv", h_NPV).view(n, count, 3, s.heads, -1).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    o = scaled_dot_product_attention(_turned(q, angles_PA), _turned(k, angles_PA), v)
    return _affine(p, at + "proj", o.transpose(1, 2).reshape(n, count, -1))


def _turned(x: Tensor, angles_PA: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return (x.float() * angles_PA.cos() + torch.cat([-b, a], -1) * angles_PA.sin()).to(x.dtype)


def _angles(place_2P: Tensor, head: int) -> Tensor:
    """Two-dimensional rotary angles [P, A] (model.md D.2)."""
    step = torch.arange(0, head // 2, 2, device=place_2P.device).float() / (head // 2)
    both = (place_2P[..., None].float() / THETA**step).transpose(0, 1).flatten(1)
    return torch.cat([both, both], -1)


@cache
def _grid(grid: tuple[int, int], s: TowerSizes) -> tuple[Tensor, Tensor]:
    """Weights [P, G] of the position table's rows, and the patch's row and column [2, P]."""
    high, wide = grid
    down, right = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")

    def in_blocks(x: Tensor) -> Tensor:
        m = s.merge
        return x.view(high // m, m, wide // m, m).transpose(1, 2).reshape(-1)

    place = torch.stack([in_blocks(down), in_blocks(right)])
    rows, cols = _between(high, s.table_side)[place[0]], _between(wide, s.table_side)[place[1]]
    return (rows[:, :, None] * cols[:, None, :]).flatten(1), place


def _between(count: int, side: int) -> Tensor:
    """Bilinear weights [count, side] with aligned corners."""
    at = torch.linspace(0.0, side - 1.0, count)
    low = at.long().clamp(max=side - 1)
    high = (low + 1).clamp(max=side - 1)
    part = (at - low).unsqueeze(1)
    eye = torch.eye(side)
    return eye[low] * (1.0 - part) + eye[high] * part


def _affine(p: Params, at: str, x: Tensor) -> Tensor:
    return linear(x, p[at + ".weight"], p[at + ".bias"].to(x.dtype))


def _norm(p: Params, at: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    return layer_norm(x, x.shape[-1:], p[at + ".weight"], p[at + ".bias"], NORM_EPS).to(dtype)
