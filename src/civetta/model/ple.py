"""The n-gram layer: table rows in, residual change out (model.md A.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from civetta.state.recurrent import RecurrentState

if TYPE_CHECKING:
    from civetta.kernels.ops import Ops
    from civetta.model.config import ModelConfig, PleConfig
    from civetta.model.inputs import Span
    from civetta.model.weights import PleWeights


def ple(
    ops: Ops,
    c: ModelConfig,
    p: PleConfig,
    w: PleWeights,
    x_TSD: Tensor,
    rows_TE: Tensor,
    spans: tuple[Span, ...],
) -> Tensor:
    """x_TSD plus gated n-gram values plus their short convolution; advances its history."""
    key_TSD = ops.matmul(rows_TE, w.key, torch.float32).view_as(x_TSD)
    value_TD = ops.matmul(rows_TE, w.value, torch.float32)
    gated = ops.ple_gate(x_TSD, key_TSD, value_TD, w.norm_query_SD, w.norm_key_SD, c.rms_eps)
    normed_TW = ops.rms_norm(gated, w.norm_conv_SD, c.rms_eps).flatten(1)
    outs = []
    for span in spans:
        state = span.session.recurrent
        assert isinstance(state, RecurrentState)
        history = state.ple
        outs.append(
            ops.short_conv(normed_TW[span.part], history.last(), w.conv_WK, p.conv_dilation)
        )
        history.push(normed_TW[span.part])
    conv_TW = torch.cat(outs) if len(outs) > 1 else outs[0]
    return x_TSD + gated + conv_TW.view_as(x_TSD)
