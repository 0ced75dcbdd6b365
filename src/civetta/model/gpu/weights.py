"""The network's weights as the fused kernels read them: packed, and joined where one product reads
the same rows.

Legend: N outputs, K inputs, S streams, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.checkpoint.quant import QuantTensor
from civetta.kernels.dequant.reference import as_numbers
from civetta.kernels.fused.attend import Gains
from civetta.kernels.fused.embed import EmbeddingTable, embedding_table
from civetta.kernels.fused.mixture import Mixture
from civetta.kernels.packed import (
    STORED,
    TOGETHER,
    PackedHyper,
    PackedWeight,
    pack,
    pack_stack,
    stacked,
)
from civetta.kernels.packed_size import packed_bytes
from civetta.model.gpu.upload import Uploader
from civetta.model.stored import matrices_of, stored_bytes
from civetta.model.weights import GdnWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from civetta.checkpoint.quant import Weight
    from civetta.kernels.ops import HyperWeights
    from civetta.model.config import ModelConfig
    from civetta.model.gpu.upload import Place
    from civetta.model.weights import (
        BlockWeights,
        MoeWeights,
        PleWeights,
        QsaWeights,
        TrunkWeights,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGdn:
    """proj: rows of q, k, v, then z; gates float32: decay rows, then strength."""

    proj: PackedWeight
    gates: PackedWeight
    conv_CK: Tensor
    decay_scale_V: Tensor
    dt_bias_V: Tensor
    norm_A: Tensor
    out: PackedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuQsa:
    """proj: rows of queries and gates, keys, values; index: index queries, then the index key."""

    proj: PackedWeight
    index: PackedWeight
    gains: Gains
    out: PackedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPle:
    """proj: rows of the streams' keys, then the value."""

    proj: PackedWeight
    norm_key_SD: Tensor
    norm_query_SD: Tensor
    norm_conv_SD: Tensor
    conv_WK: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBlock:
    """One layer."""

    attn_hyper: PackedHyper
    mixer: GpuGdn | GpuQsa
    mlp_hyper: PackedHyper
    moe: Mixture
    ple: GpuPle | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWeights:
    """The whole text network on one device."""

    embed: EmbeddingTable
    blocks: tuple[GpuBlock, ...]
    mixer: PackedHyper
    head: PackedWeight


def gpu_weights(
    stored: TrunkWeights,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    placed: Callable[[int], None] = lambda _: None,
    *,
    place: Place = lambda *_: None,
) -> GpuWeights:
    """Pack a network for `device`, one block at a time; `dtype` is that of the products' operands.

    `placed` is told how many stored bytes each part had; `place` finds the files that tensors are
    mapped from (upload.py). Parts are read from there while the one before is packed. Raises
    CheckpointNotFound and CheckpointMalformed when that fails.
    """
    packer = _Packer(config, device, dtype)
    ends = (stored.mixer, stored.head)
    blocks = []
    with Uploader((stored.embed, *stored.blocks, ends), device, place) as uploader:
        embed = embedding_table(uploader.take(), dtype, device)
        placed(stored_bytes(stored.embed))
        for block in stored.blocks:
            blocks.append(packer.block(uploader.take()))
            placed(stored_bytes(block))
        mixer, head = packer.ends(*uploader.take())
    placed(stored_bytes(ends))
    return GpuWeights(embed=embed, blocks=tuple(blocks), mixer=mixer, head=head)


def device_bytes(stored: TrunkWeights, dtype: torch.dtype) -> int:
    """About what `gpu_weights` will take on the device; nothing is read or allocated."""
    packed = sum(packed_bytes(w, dtype) for w in matrices_of(stored))
    embed = stored.embed
    if isinstance(embed, QuantTensor) and embed.format.name not in {"Q8_0", *STORED}:
        packed += embed.rows * embed.cols * dtype.itemsize - packed_bytes(embed, dtype)
    return packed


class _Packer:
    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._device, self._dtype = config, device, dtype

    def matrix(self, w: Weight) -> PackedWeight:
        return pack(w, self._dtype, self._device)

    def block(self, w: BlockWeights) -> GpuBlock:
        mixer = self._gdn(w.mixer) if isinstance(w.mixer, GdnWeights) else self._qsa(w.mixer)
        return GpuBlock(
            attn_hyper=self.hyper(w.attn_hyper),
            mixer=mixer,
            mlp_hyper=self.hyper(w.mlp_hyper),
            moe=self._mixture(w.moe),
            ple=None if w.ple is None else self._ple(w.ple),
        )

    def ends(self, mixer: HyperWeights, head: Weight) -> tuple[PackedHyper, PackedWeight]:
        return self.hyper(mixer), self.matrix(head)

    def hyper(self, w: HyperWeights) -> PackedHyper:
        return PackedHyper(
            gain_SD=self._vector(w.gain_SD),
            down=self.matrix(w.down),
            up=pack_stack(_slices(w.up, w.gain_SD.shape[0]), self._dtype, self._device),
            inject=None if w.inject is None else self._own(w.inject),
        )

    def _gdn(self, w: GdnWeights) -> GpuGdn:
        return GpuGdn(
            proj=self._joined(w.in_qkv, w.in_z),
            gates=self._float32(w.in_a, w.in_b),
            conv_CK=self._vector(w.conv_CK),
            decay_scale_V=self._vector(w.decay_scale_V),
            dt_bias_V=self._vector(w.dt_bias_V),
            norm_A=self._vector(w.norm_A),
            out=self.matrix(w.out),
        )

    def _qsa(self, w: QsaWeights) -> GpuQsa:
        return GpuQsa(
            proj=self._joined(w.q, w.k, w.v),
            index=self._joined(w.index_q, w.index_k),
            gains=Gains(
                q=self._vector(w.q_norm_A),
                k=self._vector(w.k_norm_A),
                index_q=self._vector(w.index_q_norm_X),
                index_k=self._vector(w.index_k_norm_X),
            ),
            out=self.matrix(w.out),
        )

    def _mixture(self, w: MoeWeights) -> Mixture:
        return Mixture(
            router=self._float32(w.router, w.shared_mix),
            gate_up=self._pairs(w.experts.gate, w.experts.up),
            down=pack_stack(w.experts.down, self._dtype, self._device),
            shared_gate_up=pack(
                joined([w.shared_gate, w.shared_up], self._dtype),
                self._dtype,
                self._device,
                pair=True,
            ),
            shared_down=self.matrix(w.shared_down),
            slots=self._config.experts_a_token,
        )

    def _pairs(self, gates: Sequence[Weight], ups: Sequence[Weight]) -> PackedWeight:
        """Gate and up of every expert as one; joined for some experts at a time."""
        made = []
        for at in range(0, len(gates), TOGETHER):
            some = zip(gates[at : at + TOGETHER], ups[at : at + TOGETHER], strict=True)
            pairs = [joined(pair, self._dtype) for pair in some]
            made.append(pack_stack(pairs, self._dtype, self._device, pair=True))
        return stacked(made)

    def _ple(self, w: PleWeights) -> GpuPle:
        return GpuPle(
            proj=self._joined(w.key, w.value),
            norm_key_SD=self._vector(w.norm_key_SD),
            norm_query_SD=self._vector(w.norm_query_SD),
            norm_conv_SD=self._vector(w.norm_conv_SD),
            conv_WK=self._vector(w.conv_WK),
        )

    def _joined(self, *matrices: Weight) -> PackedWeight:
        return self.matrix(joined(matrices, self._dtype))

    def _float32(self, *matrices: Weight) -> PackedWeight:
        whole = torch.cat([as_numbers(w, torch.float32) for w in matrices])
        return pack(whole, torch.float32, self._device)

    def _own(self, w: Weight) -> Tensor:
        """float32 in memory of its own: a view would keep all that was brought with it."""
        return as_numbers(w, torch.float32).to(self._device, copy=True)

    def _vector(self, x: Tensor) -> Tensor:
        return x.to(self._device).contiguous()


def joined(matrices: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """Matrices of one width under one another.

    Stored bytes stay as they are when the formats agree; else all become numbers of `dtype`, which
    a product rounds its operands to anyway.
    """
    tensors = [w for w in matrices if isinstance(w, Tensor)]
    if len(tensors) == len(matrices) and len({w.dtype for w in tensors}) == 1:
        return torch.cat(tensors)
    stored = [w for w in matrices if not isinstance(w, Tensor)]
    if len(stored) == len(matrices) and _alike(stored):
        scales = [w.scale for w in stored if w.scale is not None]
        return replace(
            stored[0],
            data_RB=torch.cat([w.data_RB for w in stored]),
            scale=torch.cat(scales) if scales else None,
        )
    return torch.cat([as_numbers(w, dtype) for w in matrices])


def _alike(stored: Sequence[QuantTensor]) -> bool:
    """Whether stored bytes and scales may simply follow one another."""
    if len({w.format.name for w in stored}) > 1:
        return False
    if all(w.scale is None for w in stored):
        return True
    name = stored[0].format.name
    if name == "F8_E4M3":
        blocks = all(w.scale is not None and w.scale.ndim == 2 for w in stored)
        return (
            blocks
            and all(w.rows % 128 == 0 and w.row_offset % 128 == 0 for w in stored)
            and all(w.scale is not None and w.scale.shape[0] == w.rows // 128 for w in stored)
        )
    if name == "NVFP4":
        firsts = [w.scale_2 for w in stored if w.scale_2 is not None]
        return len(firsts) == len(stored) and all(torch.equal(s, firsts[0]) for s in firsts)
    return False


def _slices(w: Weight, count: int) -> list[Weight]:
    """A matrix cut into `count` equal runs of rows."""
    if isinstance(w, Tensor):
        return list(w.chunk(count))
    rows = w.rows // count
    return [w.slice_rows(i * rows, (i + 1) * rows) for i in range(count)]
