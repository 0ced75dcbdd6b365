"""The vision tower's parameters and where they lie: HF `model.visual.*` and mmproj names.

Matrices are [out, in] in any stored format, biases and norms float32 (model.md A.4, C.8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from civetta.model.vision_config import CHANNELS

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.checkpoint.quant import Weight
    from civetta.model.binder import Binder
    from civetta.model.vision_config import VisionConfig

HF_PREFIX = "model.visual."


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """x w^T + bias: w [N, K], bias float32 [N]."""

    w: Weight
    bias_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """Layer norm's gain and shift, float32."""

    gain_D: Tensor
    shift_D: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionBlockWeights:
    """One layer; qkv rows are q, k, v, each head by head."""

    norm1: Norm
    qkv: Affine
    out: Affine
    norm2: Norm
    fc1: Affine
    fc2: Affine


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionWeights:
    """The tower: patch is [D, channels * temporal * patch**2], positions_LD the learned grid."""

    patch: Affine
    positions_LD: Tensor
    blocks: tuple[VisionBlockWeights, ...]
    merger_norm: Norm
    merger_fc1: Affine
    merger_fc2: Affine


def bind_hf_vision(b: Binder, c: VisionConfig) -> VisionWeights:
    """All tensors of a Hugging Face tower; raises the CheckpointError of the first at fault."""
    at = HF_PREFIX
    size = (c.hidden, CHANNELS, c.temporal, c.patch, c.patch)
    kernel = b.vector(at + "patch_embed.proj.weight", *size)
    return VisionWeights(
        patch=Affine(
            w=kernel.reshape(c.hidden, -1) if len(kernel) else kernel,
            bias_N=b.vector(at + "patch_embed.proj.bias", c.hidden),
        ),
        positions_LD=b.vector(at + "pos_embed.weight", c.positions, c.hidden),
        blocks=tuple(_hf_block(b, c, f"{at}blocks.{i}.") for i in range(c.layers)),
        merger_norm=_norm(b, at + "merger.norm", c.hidden),
        merger_fc1=_affine(b, at + "merger.linear_fc1", c.merged, c.merged),
        merger_fc2=_affine(b, at + "merger.linear_fc2", c.out_width, c.merged),
    )


def bind_gguf_vision(b: Binder, c: VisionConfig) -> VisionWeights:
    """All tensors of an mmproj file; raises the CheckpointError of the first at fault."""
    size = (c.hidden, CHANNELS, c.patch, c.patch)
    names = [patch_name(frame) for frame in range(c.temporal)]
    kernels = [b.vector(name, *size) for name in names]
    return VisionWeights(
        patch=Affine(
            w=torch.stack(kernels, dim=2).reshape(c.hidden, -1) if len(kernels[0]) else kernels[0],
            bias_N=b.vector("v.patch_embd.bias", c.hidden),
        ),
        positions_LD=b.vector("v.position_embd.weight", c.positions, c.hidden),
        blocks=tuple(_gguf_block(b, c, f"v.blk.{i}.") for i in range(c.layers)),
        merger_norm=_norm(b, "v.post_ln", c.hidden),
        merger_fc1=_affine(b, "mm.0", c.merged, c.merged),
        merger_fc2=_affine(b, "mm.2", c.out_width, c.merged),
    )


def patch_name(frame: int) -> str:
    """The mmproj tensor that a patch's frame number `frame` goes through (C.8)."""
    return "v.patch_embd.weight" if frame == 0 else f"v.patch_embd.weight.{frame}"


def _hf_block(b: Binder, c: VisionConfig, at: str) -> VisionBlockWeights:
    return VisionBlockWeights(
        norm1=_norm(b, at + "norm1", c.hidden),
        qkv=_affine(b, at + "attn.qkv", 3 * c.hidden, c.hidden),
        out=_affine(b, at + "attn.proj", c.hidden, c.hidden),
        norm2=_norm(b, at + "norm2", c.hidden),
        fc1=_affine(b, at + "mlp.linear_fc1", c.mlp_width, c.hidden),
        fc2=_affine(b, at + "mlp.linear_fc2", c.hidden, c.mlp_width),
    )


def _gguf_block(b: Binder, c: VisionConfig, at: str) -> VisionBlockWeights:
    return VisionBlockWeights(
        norm1=_norm(b, at + "ln1", c.hidden),
        qkv=_affine(b, at + "attn_qkv", 3 * c.hidden, c.hidden),
        out=_affine(b, at + "attn_out", c.hidden, c.hidden),
        norm2=_norm(b, at + "ln2", c.hidden),
        fc1=_affine(b, at + "ffn_up", c.mlp_width, c.hidden),
        fc2=_affine(b, at + "ffn_down", c.hidden, c.mlp_width),
    )


def _affine(b: Binder, name: str, rows: int, cols: int) -> Affine:
    return Affine(w=b.matrix(name + ".weight", rows, cols), bias_N=b.vector(name + ".bias", rows))


def _norm(b: Binder, name: str, width: int) -> Norm:
    return Norm(gain_D=b.vector(name + ".weight", width), shift_D=b.vector(name + ".bias", width))
