"""The layers of a launch through the fused kernels; the order of model/trunk.py, op by op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from civetta.kernels.fused import embed as embedding
from civetta.kernels.fused import launch
from civetta.kernels.fused.attend import Angles, Pages, attend
from civetta.kernels.fused.attention import AttentionSizes
from civetta.kernels.fused.delta import DeltaPlaces, DeltaSizes, delta
from civetta.kernels.fused.mixture import mixture
from civetta.kernels.fused.ngram import ngram_layer
from civetta.kernels.fused.streams import Written, enter, mix, settle
from civetta.kernels.matmul.triton import Product, product, two_products
from civetta.model.gpu.weights import GpuGdn
from civetta.model.rope import RopeTable
from civetta.state.device_state import DeviceLayout

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.kernels.fused.launch import Batch
    from civetta.kernels.packed import PackedHyper, PackedWeight
    from civetta.model.config import ModelConfig
    from civetta.model.gpu.weights import GpuBlock, GpuPle, GpuQsa, GpuWeights
    from civetta.state.pages import PagePool
    from civetta.state.recurrent import RecurrentShape

SETTLE_ROWS = 16
"""From so many rows on, a row's experts are added up once and not in every stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a forward stands: streams, and a layer's output that is not in them yet."""

    x_TSD: Tensor
    written: Written | None
    angles: Angles


class GpuLayers:
    """Weights and sizes; `pool` is the sessions' pages. Holds no state."""

    def __init__(
        self,
        config: ModelConfig,
        weights: GpuWeights,
        shape: RecurrentShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self.weights, self.dtype, self.device = config, weights, dtype, device
        self.layout = DeviceLayout(shape, dtype)
        self._rope = RopeTable(config.rope_dims, config.rope_theta, config.mrope_section, device)
        kinds = config.layer_kinds
        self._index = tuple(kinds[:i].count(kind) for i, kind in enumerate(kinds))
        self._like = torch.zeros(1, dtype=dtype, device=device)
        self.delta_sizes = DeltaSizes(
            key_heads=config.gdn_key_heads,
            value_heads=config.gdn_value_heads,
            width=config.gdn_head_dim,
            taps=config.gdn_conv_kernel,
            ring=self.layout.conv_ring,
            tiled=config.head_order == "tiled",
        )
        self.attention_sizes = AttentionSizes(
            heads=config.heads,
            kv_heads=config.kv_heads,
            width=config.head_dim,
            index_heads=config.index_heads,
            index_width=config.index_dim,
            ratio=config.index_ratio,
            keep=config.index_budget // config.index_ratio,
        )

    @property
    def ngram_at(self) -> int:
        """Layers before the n-gram layer: where a forward is cut in two."""
        return 0 if self.config.ple is None else self.config.ple.layer

    def begin(self, batch: Batch) -> Progress:
        """Angles and embeddings of all rows."""
        half = self._rope.inverse_R.numel()
        cos = torch.empty((batch.rows, half), dtype=torch.float32, device=self.device)
        angles = Angles(
            cos_TR=cos,
            sin_TR=torch.empty_like(cos),
            inverse_R=self._rope.inverse_R,
            axis_R=self._rope.axis_R,
        )
        launch.angles(batch, angles.inverse_R, angles.axis_R, cos, angles.sin_TR)
        x_TSD = torch.empty(
            (batch.rows, self.config.streams, self.config.hidden),
            dtype=torch.float32,
            device=self.device,
        )
        embedding.embed(batch, self.weights.embed, x_TSD, self._like)
        return Progress(x_TSD=x_TSD, written=None, angles=angles)

    def run(
        self, batch: Batch, at: Progress, pool: PagePool, start: int, stop: int | None = None
    ) -> Progress:
        """Layers [start, stop) without the n-gram layer before `start`."""
        written = at.written
        at = Progress(x_TSD=at.x_TSD, written=None, angles=at.angles)
        for i, w in enumerate(self.weights.blocks[start:stop], start):
            h_TD, inject = self._read(batch, at, w.attn_hyper, written)
            written = None  # outputs are large: none lies in memory once it is in the streams
            written = self._mixed(batch, w, at, h_TD, inject, pool, self._index[i])
            h_TD, inject = self._read(batch, at, w.mlp_hyper, written)
            written = None
            written = mixture(batch, w.moe, h_TD, inject)
            if batch.rows > SETTLE_ROWS:
                written = settle(written)
        return Progress(x_TSD=at.x_TSD, written=written, angles=at.angles)

    def ngram(self, batch: Batch, at: Progress, rows_TE: Tensor) -> Progress:
        """The n-gram layer; every output before it is written first."""
        c, w = self.config, self.weights.blocks[self.ngram_at].ple
        assert c.ple is not None
        assert w is not None
        if at.written is not None:
            hyper = self.weights.blocks[self.ngram_at].attn_hyper
            enter(at.x_TSD, hyper, c.rms_eps, self.dtype, at.written)
        self._add_ngram(batch, w, at.x_TSD, rows_TE)
        return Progress(x_TSD=at.x_TSD, written=None, angles=at.angles)

    def finish(
        self, at: Progress, wanted_N: Tensor | None, counts: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Logits float32 [N, vocab] of the rows `wanted_N`, or of all; into `out` if given."""
        c, hyper = self.config, self.weights.mixer
        entered = enter(at.x_TSD, hyper, c.rms_eps, self.dtype, at.written)
        x_TSD = at.x_TSD
        if wanted_N is not None:
            entered, x_TSD = entered.rows(wanted_N), x_TSD[wanted_N]
        if not len(x_TSD):
            return torch.zeros(0, c.vocab, device=self.device)
        h_ND = mix(x_TSD, entered, hyper, counts)
        logits = out
        if logits is None:
            logits = torch.empty((len(h_ND), c.vocab), dtype=torch.float32, device=self.device)
        product(h_ND, self.weights.head, logits, counts)
        return logits

    def _mixed(
        self,
        batch: Batch,
        w: GpuBlock,
        at: Progress,
        h_TD: Tensor,
        inject: Tensor,
        pool: PagePool,
        index: int,
    ) -> Written:
        if isinstance(w.mixer, GpuGdn):
            y_TX = self._gdn(batch, w.mixer, h_TD, index)
        else:
            y_TX = self._qsa(batch, w.mixer, h_TD, at.angles, pool, index)
        return Written(y=self._product(batch, y_TX, w.mixer.out, torch.float32), inject=inject)

    def _read(
        self, batch: Batch, at: Progress, hyper: PackedHyper, written: Written | None
    ) -> tuple[Tensor, Tensor]:
        """What a mixer or the experts read of the streams, and their output's strengths; what was
        `written` goes into the streams first."""
        entered = enter(at.x_TSD, hyper, self.config.rms_eps, self.dtype, written)
        assert entered.inject is not None
        return mix(at.x_TSD, entered, hyper, batch.counts), entered.inject

    def _gdn(self, batch: Batch, w: GpuGdn, h_TD: Tensor, index: int) -> Tensor:
        gates = torch.empty((len(h_TD), w.gates.rows), dtype=torch.float32, device=self.device)
        proj = self._beside(batch, w.proj, Product(x_TK=h_TD, w=w.gates, y_MN=gates, wide=True))
        part = {name: place.at for name, place in self.layout.gdn[index].items()}
        places = DeltaPlaces(
            state=part["s"],
            k=part["k"],
            v=part["v"],
            log_decay=part["log_decay"],
            beta=part["beta"],
            conv=part["conv"],
        )
        channels = self.delta_sizes.channels
        return delta(
            batch,
            self.delta_sizes,
            places,
            proj[:, :channels],
            proj[:, channels:],
            gates,
            w.conv_CK,
            w.decay_scale_V,
            w.dt_bias_V,
            w.norm_A,
            self.config.rms_eps,
        )

    def _qsa(
        self, batch: Batch, w: GpuQsa, h_TD: Tensor, angles: Angles, pool: PagePool, index: int
    ) -> Tensor:
        layer = pool.layers[index]
        raw = torch.empty((len(h_TD), w.index.rows), dtype=self.dtype, device=self.device)
        proj = self._beside(batch, w.proj, Product(x_TK=h_TD, w=w.index, y_MN=raw))
        return attend(
            batch,
            self.attention_sizes,
            Pages(k=layer.k, v=layer.v, raw=layer.index_raw, key=layer.index_key),
            angles,
            w.gains,
            proj,
            raw,
            self.config.rms_eps,
        )

    def _add_ngram(self, batch: Batch, w: GpuPle, x_TSD: Tensor, rows_TE: Tensor) -> None:
        assert self.config.ple is not None
        ngram_layer(
            batch,
            x_TSD,
            self._product(batch, rows_TE, w.proj, torch.float32),
            w.norm_query_SD,
            w.norm_key_SD,
            w.norm_conv_SD,
            w.conv_WK,
            self.config.rms_eps,
            dilation=self.config.ple.conv_dilation,
            place=self.layout.ple.at,
            ring=self.layout.ple_ring,
        )

    def _beside(self, batch: Batch, w: PackedWeight, small: Product) -> Tensor:
        """The product of `small`'s rows with w, beside `small` itself."""
        x_TK = small.x_TK
        y_TN = torch.empty((len(x_TK), w.rows), dtype=self.dtype, device=self.device)
        two_products(Product(x_TK=x_TK, w=w, y_MN=y_TN), small, batch.counts)
        return y_TN

    def _product(self, batch: Batch, x_TK: Tensor, w: PackedWeight, dtype: torch.dtype) -> Tensor:
        y_TN = torch.empty((len(x_TK), w.rows), dtype=dtype, device=self.device)
        product(x_TK, w, y_TN, batch.counts)
        return y_TN
