"""A model of random weights at the real sizes, made where it runs: for speed alone.

Qwen3.8-Flash-Next's sizes (model.md A.2) and the types of published files (C.5). The n-gram table
is a file of random rows, so that every placement of it can be measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from civetta.checkpoint import formats
from civetta.kernels.fused.attend import Gains
from civetta.kernels.fused.embed import EmbeddingTable
from civetta.kernels.fused.mixture import Mixture
from civetta.kernels.packed import PackedHyper, PackedWeight
from civetta.kernels.random_planes import random_packed
from civetta.model.config import ModelConfig, PleConfig
from civetta.model.gpu.weights import GpuBlock, GpuGdn, GpuPle, GpuQsa, GpuWeights
from civetta.model.stored import leaves_of
from civetta.ngram.hash import make_hash
from civetta.ngram.layout import Field, Shard, TableLayout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from civetta.model.config import LayerKind
    from civetta.model.mixes import Mix

LAYERS = 48
NGRAM_BASE = 20_000_000
PATTERN_ROWS = 1 << 16
"""Different rows of a random table; they repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Types:
    """Stored types by tensor. `wide` holds projections and shared experts, `outer` embedding, head,
    streams and the n-gram layer; `odd_*` the layers that keep more bits."""

    wide: str
    outer: str
    gate_up: str
    down: str
    table: str
    odd_gate_up: str
    odd_down: str
    odd_gate_up_layers: tuple[int, ...] = ()
    odd_down_layers: tuple[int, ...] = ()


def _uniform(name: str, outer: str, table: str) -> Types:
    return Types(
        wide=name,
        outer=outer,
        gate_up=name,
        down=name,
        table=table,
        odd_gate_up=name,
        odd_down=name,
    )


TYPES: dict[Mix, Types] = {
    "q4_k_xl": Types(
        wide="Q8_0",
        outer="Q8_0",
        gate_up="Q4_K",
        down="Q5_1",
        table="IQ4_NL",
        odd_gate_up="Q5_K",
        odd_down="Q8_0",
        odd_gate_up_layers=(2,),
        odd_down_layers=(2, 4, 30, 46, 47),
    ),
    "q8_0": _uniform("Q8_0", "Q8_0", "Q8_0"),
    "fp8": _uniform("F8_E4M3", "BF16", "F8_E4M3"),
    "bf16": _uniform("BF16", "BF16", "BF16"),
}


def flash_next_config(layers: int = LAYERS, ngram_base: int = NGRAM_BASE) -> ModelConfig:
    """The real sizes; fewer layers or a smaller n-gram table on request (`layers` at least 2)."""
    eos = 248044
    kinds: tuple[LayerKind, ...] = tuple(
        "qsa" if (i + 1) % 4 == 0 else "gdn" for i in range(layers)
    )
    return ModelConfig(
        hidden=2560,
        vocab=248320,
        context_tokens=262144,
        layer_kinds=kinds,
        rms_eps=1e-6,
        heads=24,
        kv_heads=2,
        head_dim=256,
        rope_dims=64,
        rope_theta=1e7,
        mrope_section=(11, 11, 10),
        index_heads=4,
        index_dim=128,
        index_budget=2048,
        index_ratio=4,
        gdn_key_heads=16,
        gdn_value_heads=48,
        gdn_head_dim=128,
        gdn_conv_kernel=4,
        experts=512,
        experts_a_token=10,
        expert_width=640,
        shared_width=640,
        streams=4,
        stream_rank=320,
        ple=PleConfig(
            layer=1,
            embed=2560,
            conv_kernel=4,
            conv_dilation=3,
            hash=make_hash(
                vocab=248320,
                size=3,
                heads_per_ngram=8,
                base=ngram_base,
                seed=1234,
                eos_token_id=eos,
                divisor=128,
            ),
        ),
        head_order="tiled",
    )


def random_weights(
    config: ModelConfig, mix: Mix, device: torch.device, *, seed: int = 0
) -> GpuWeights:
    """Every weight of the network in the mix's types, packed, on `device`."""
    return _Random(config, TYPES[mix], device, seed).weights()


def write_random_table(config: ModelConfig, mix: Mix, path: Path) -> TableLayout:
    """Write a table of the config's rows to `path`; OSError when the disk has no room."""
    assert config.ple is not None
    fmt = formats.by_name(TYPES[mix].table)
    assert fmt is not None
    rows, cols = config.ple.hash.rows, config.ple.row_values
    pattern = _pattern(fmt.name, PATTERN_ROWS, fmt.row_bytes(cols))
    with path.open("wb") as file:
        for start in range(0, rows, PATTERN_ROWS):
            file.write(pattern[: min(PATTERN_ROWS, rows - start)].tobytes())
    scale = torch.full((1,), 1e-3) if fmt.name == "F8_E4M3" else None
    shard = Shard(path=path, offset=0, rows=rows, scale=scale)
    field = Field(row_bytes=fmt.row_bytes(cols), shards=(shard,))
    return TableLayout(format=fmt, cols=cols, fields=(field,))


def _pattern(name: str, rows: int, row_bytes: int) -> np.ndarray:
    """Random stored rows of finite values."""
    random = np.random.default_rng(0)
    if name == "BF16":
        bits = random.standard_normal((rows, row_bytes // 2), np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8)
    data = random.integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    if name == "F8_E4M3":
        return data & 0xF7
    step = 18 if name == "IQ4_NL" else 34
    half = np.full((rows, row_bytes // step), 0.01, np.float16).view(np.uint8)
    data.reshape(rows, -1, step)[:, :, :2] = half.reshape(rows, -1, 2)
    return data


class _Random:
    def __init__(self, c: ModelConfig, types: Types, device: torch.device, seed: int) -> None:
        self._c, self._types, self._device = c, types, device
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def weights(self) -> GpuWeights:
        c, outer = self._c, self._types.outer
        return GpuWeights(
            embed=self._table(outer, c.vocab, c.hidden),
            blocks=tuple(self._block(i) for i in range(c.layers)),
            mixer=self._hyper(ends=True),
            head=self._matrix(outer, c.vocab, c.hidden),
        )

    def _block(self, layer: int) -> GpuBlock:
        c = self._c
        with_ngram = c.ple is not None and c.ple.layer == layer
        return GpuBlock(
            attn_hyper=self._hyper(),
            mixer=self._gdn() if c.layer_kinds[layer] == "gdn" else self._qsa(),
            mlp_hyper=self._hyper(),
            moe=self._mixture(layer),
            ple=self._ple() if with_ngram else None,
        )

    def _hyper(self, *, ends: bool = False) -> PackedHyper:
        c, outer = self._c, self._types.outer
        return PackedHyper(
            gain_SD=self._gain(c.streams, c.hidden),
            down=self._matrix(outer, c.stream_rank, c.wide),
            up=self._matrix(outer, c.hidden, c.stream_rank, c.streams),
            inject=None if ends else self._normal(c.streams, c.wide) * c.wide**-0.5,
        )

    def _gdn(self) -> GpuGdn:
        c, wide = self._c, self._types.wide
        values = c.gdn_value_heads * c.gdn_head_dim
        return GpuGdn(
            proj=self._matrix(wide, c.gdn_channels + values, c.hidden),
            gates=self._matrix("F32", 2 * c.gdn_value_heads, c.hidden),
            conv_CK=self._normal(c.gdn_channels, c.gdn_conv_kernel) * 0.5,
            decay_scale_V=-self._uniform(c.gdn_value_heads) - 0.1,
            dt_bias_V=self._normal(c.gdn_value_heads) * 0.1,
            norm_A=self._gain(c.gdn_head_dim),
            out=self._matrix(wide, c.hidden, values),
        )

    def _qsa(self) -> GpuQsa:
        c, wide = self._c, self._types.wide
        return GpuQsa(
            proj=self._matrix(wide, 2 * (c.heads + c.kv_heads) * c.head_dim, c.hidden),
            index=self._matrix("BF16", (c.index_heads + 1) * c.index_dim, c.hidden),
            gains=Gains(
                q=self._gain(c.head_dim),
                k=self._gain(c.head_dim),
                index_q=self._gain(c.index_dim),
                index_k=self._gain(c.index_dim),
            ),
            out=self._matrix(wide, c.hidden, c.heads * c.head_dim),
        )

    def _mixture(self, layer: int) -> Mixture:
        c, t = self._c, self._types
        gate_up = t.odd_gate_up if layer in t.odd_gate_up_layers else t.gate_up
        down = t.odd_down if layer in t.odd_down_layers else t.down
        return Mixture(
            router=self._matrix("F32", c.experts + 1, c.hidden),
            gate_up=self._matrix(gate_up, 2 * c.expert_width, c.hidden, c.experts, pair=True),
            down=self._matrix(down, c.hidden, c.expert_width, c.experts),
            shared_gate_up=self._matrix(t.wide, 2 * c.shared_width, c.hidden, pair=True),
            shared_down=self._matrix(t.wide, c.hidden, c.shared_width),
            slots=c.experts_a_token,
        )

    def _ple(self) -> GpuPle:
        c = self._c
        assert c.ple is not None
        return GpuPle(
            proj=self._matrix(self._types.outer, c.wide + c.hidden, c.ple.embed),
            norm_key_SD=self._gain(c.streams, c.hidden),
            norm_query_SD=self._gain(c.streams, c.hidden),
            norm_conv_SD=self._gain(c.streams, c.hidden),
            conv_WK=self._normal(c.wide, c.ple.conv_kernel) * 0.5,
        )

    def _matrix(
        self, name: str, rows: int, cols: int, experts: int = 1, *, pair: bool = False
    ) -> PackedWeight:
        return random_packed(name, rows, cols, self._generator, experts=experts, pair=pair)

    def _table(self, name: str, rows: int, cols: int) -> EmbeddingTable:
        if name != "Q8_0":
            plain = torch.randn(
                rows, cols, generator=self._generator, device=self._device, dtype=torch.bfloat16
            )
            return EmbeddingTable(codes=plain.mul_(cols**-0.5))
        codes = torch.randint(
            256, (rows, cols), generator=self._generator, device=self._device, dtype=torch.uint8
        )
        d = torch.full((rows, cols // 32), cols**-0.5 / 74, dtype=torch.float16)
        return EmbeddingTable(codes=codes, d=d.to(self._device))

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._generator, device=self._device)

    def _uniform(self, *size: int) -> Tensor:
        return torch.rand(*size, generator=self._generator, device=self._device)

    def _gain(self, *size: int) -> Tensor:
        return 1.0 + 0.1 * self._normal(*size)


def weight_bytes(weights: GpuWeights) -> int:
    """Bytes of all packed matrices."""
    return sum(w.nbytes for w in _matrices(weights))


def parameters(weights: GpuWeights) -> int:
    """Numbers that the packed matrices stand for."""
    return sum(w.numbers for w in _matrices(weights))


def _matrices(part: object) -> Iterator[PackedWeight | EmbeddingTable]:
    return leaves_of(part, (PackedWeight, EmbeddingTable))
