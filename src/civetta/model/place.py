"""Weights moved to a GPU: matrices packed into planes, experts stacked, vectors copied.

One block at a time, so that host memory holds no second copy of the model. The embedding table keeps
its stored form: only single rows are read from it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from civetta.checkpoint.quant import QuantTensor
from civetta.kernels.dequant.reference import as_numbers
from civetta.kernels.ops import ExpertWeights, HyperWeights
from civetta.kernels.packed import PackedExperts, PackedHyper, pack, pack_stack

if TYPE_CHECKING:
    from civetta.checkpoint.quant import Weight
    from civetta.kernels.packed import PackedWeight
    from civetta.model.vision_weights import VisionWeights
    from civetta.model.weights import MtpWeights, TrunkWeights

# Vectors and small kernels that ops read as they are, by field name of the weight classes.
_VECTORS = frozenset(
    {
        "conv_CK",
        "conv_WK",
        "decay_scale_V",
        "dt_bias_V",
        "norm_A",
        "q_norm_A",
        "k_norm_A",
        "index_q_norm_X",
        "index_k_norm_X",
        "norm_key_SD",
        "norm_query_SD",
        "norm_conv_SD",
        "bias_N",
        "gain_D",
        "shift_D",
        "positions_LD",
    }
)

_Part = TypeVar("_Part")


def place(weights: TrunkWeights, device: torch.device, dtype: torch.dtype) -> TrunkWeights:
    """The same network on `device` for the GPU table of ops.

    A field that the CPU table reads as a matrix holds a `PackedWeight` (a site, experts: a
    `PackedHyper`, `PackedExperts`), which is what the GPU's ops take.
    """
    return replace(
        weights,
        embed=_moved(weights.embed, device),
        blocks=tuple(_placed(block, device, dtype) for block in weights.blocks),
        mixer=_placed(weights.mixer, device, dtype),
        head=_placed(weights.head, device, dtype),
    )


def place_head(
    head: MtpWeights,
    stored: TrunkWeights,
    shared: PackedWeight,
    device: torch.device,
    dtype: torch.dtype,
) -> MtpWeights:
    """The draft head beside a trunk whose output matrix is `shared`; it is moved once.

    The embedding table keeps its stored form here, for single rows are read from it.
    """
    own = replace(
        head,
        embed_norm_D=head.embed_norm_D.to(device),
        hidden_norm_SD=head.hidden_norm_SD.to(device),
        embed_in=_placed(head.embed_in, device, dtype),
        hidden_in=_placed(head.hidden_in, device, dtype),
        block=_placed(head.block, device, dtype),
        mixer=_placed(head.mixer, device, dtype),
    )
    output: object = shared if head.head is stored.head else _placed(head.head, device, dtype)
    return replace(own, embed=_moved(head.embed, device), head=cast("Weight", output))


def place_tower(weights: VisionWeights, device: torch.device, dtype: torch.dtype) -> VisionWeights:
    """The vision tower on `device` for the GPU table of ops; matrices are packed."""
    return _placed(weights, device, dtype)


def _placed(part: _Part, device: torch.device, dtype: torch.dtype) -> _Part:
    """A weight, or a dataclass of weights, in the form the GPU's ops read."""
    if part is None:
        return part
    if isinstance(part, (Tensor, QuantTensor)):
        return cast("_Part", pack(part, dtype, device))
    if isinstance(part, tuple):
        return cast("_Part", tuple(_placed(one, device, dtype) for one in part))
    if isinstance(part, HyperWeights):
        return cast("_Part", _hyper(part, device, dtype))
    if isinstance(part, ExpertWeights):
        return cast("_Part", _experts(part, device, dtype))
    values = {}
    for field in fields(part):  # type: ignore[arg-type]  # the weight classes are dataclasses
        value = getattr(part, field.name)
        if field.name in _VECTORS:
            values[field.name] = value.to(device)
        else:
            values[field.name] = _placed(value, device, dtype)
    return type(part)(**values)


def _hyper(w: HyperWeights, device: torch.device, dtype: torch.dtype) -> PackedHyper:
    inject = None
    if w.inject is not None:  # read in float32 (model.md A.6)
        inject = as_numbers(w.inject, torch.float32).to(device).contiguous()
    return PackedHyper(
        gain_SD=w.gain_SD.to(device),
        down=pack(w.down, dtype, device),
        up=pack(w.up, dtype, device),
        inject=inject,
    )


def _experts(w: ExpertWeights, device: torch.device, dtype: torch.dtype) -> PackedExperts:
    return PackedExperts(
        gate=pack_stack(w.gate, dtype, device),
        up=pack_stack(w.up, dtype, device),
        down=pack_stack(w.down, dtype, device),
    )


def _moved(w: Weight, device: torch.device) -> Weight:
    if isinstance(w, Tensor):
        return w.to(device)
    scale = None if w.scale is None else w.scale.to(device)
    scale_2 = None if w.scale_2 is None else w.scale_2.to(device)
    return replace(w, data_RB=w.data_RB.to(device), scale=scale, scale_2=scale_2)
