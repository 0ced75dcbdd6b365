"""The draft head (MTP) in training: rows from the trunk in, drafts of several depths out.

The maths is model.md B.1 and B.2. The chain that starts at row p drafts t[p+2], t[p+3], …: its
first link reads the trunk's streams, each further link the streams that the link before left, and
sees the first links up to p and its own chain. All chains of a batch run side by side.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from training.trainer.network import Network, Params, Rows, hyper_weights, rms, token_rows
from training.trainer.parameters import hyper, moe, qsa
from training.trainer.sparse import chosen, index_loss

if TYPE_CHECKING:
    from civetta.model.config import ModelConfig

DRAFT = "mtp."
LAYER = DRAFT + "layers.0."


def create_draft(c: ModelConfig, seed: int = 2) -> dict[str, Tensor]:
    """Float32 parameters on the CPU: one attention layer and what joins it to the trunk."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float | None = None) -> Tensor:
        return torch.randn(shape, generator=g) * (std or 0.7 / math.sqrt(shape[-1]))

    p = {
        DRAFT + "fc_embedding.weight": normal(c.hidden, c.hidden),
        DRAFT + "fc_hidden.weight": normal(c.hidden, c.hidden),
        DRAFT + "pre_fc_norm_embedding.weight": torch.zeros(c.hidden),
        DRAFT + "pre_fc_norm_hidden.weight": torch.zeros(c.wide),
    }
    hyper(p, c, DRAFT + "hyper_connection_mixer.", normal, inject=False)
    for site in ("attn", "mlp"):
        hyper(p, c, f"{LAYER}{site}_hyper_connection.", normal, inject=True)
    qsa(p, c, LAYER + "self_attn.", normal)
    moe(p, c, LAYER + "mlp.", normal)
    return p


class Chains:
    """The chains of one batch; `link` is called once a depth and gives rows before the head."""

    def __init__(self, net: Network, p: Params, x_NSD: Tensor, ids_BT: Tensor, rows: Rows) -> None:
        self.net, self.p, self.rows = net, p, rows
        self.x_NSD, self.e_ND = x_NSD, token_rows(p, ids_BT, rows)
        self.depth = 0
        self.mask_BTT: Tensor | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def link(self) -> Tensor:
        """Hidden rows [N, D] of the next depth: row p of depth k drafts token p + 2 + k."""
        p, c, eps = self.p, self.net.c, self.net.c.rms_eps
        self.depth += 1
        token = later(self.e_ND, self.depth, self.rows)
        e = rms(token, eps) * (1.0 + p[DRAFT + "pre_fc_norm_embedding.weight"])
        e = linear(e.to(self.rows.dtype), p[DRAFT + "fc_embedding.weight"])
        h = rms(self.x_NSD.flatten(1), eps) * (1.0 + p[DRAFT + "pre_fc_norm_hidden.weight"])
        h = h.view_as(self.x_NSD).to(self.rows.dtype)
        x = (linear(h, p[DRAFT + "fc_hidden.weight"]) + e.unsqueeze(1)).float()
        site = LAYER + "attn_hyper_connection."
        inject = p[site + "block_inject_weight.weight"]
        row, strength = self.net.read(x, *hyper_weights(p, site), inject, eps, self.rows.dtype)
        assert strength is not None
        x = self.net.write(x, self._attend(row), strength)
        self.x_NSD = self.net.mlp(p, LAYER, x, self.rows)
        at = DRAFT + "hyper_connection_mixer."
        return self.net.read(self.x_NSD, *hyper_weights(p, at), None, c.rms_eps, self.rows.dtype)[0]

    def _attend(self, h_ND: Tensor) -> Tensor:
        c, p, at = self.net.c, self.p, LAYER + "self_attn."
        b, t = self.rows.segment_BT.shape
        q, k, v, gate = self.net.queries(p, at, h_ND, self._angles(self.depth - 1))
        if self.mask_BTT is None:
            self.mask_BTT = self._mask(at, h_ND, q, k)
        self.keys.append(k)
        self.values.append(v)
        o = attend_chain(q, self.keys, self.values, self.mask_BTT).transpose(1, 2)
        gated = o.float() * gate.float().sigmoid()
        out = gated.to(self.rows.dtype).reshape(b * t, c.heads * c.head_dim)
        return linear(out, p[at + "o_proj.weight"])

    def _angles(self, ahead: int) -> tuple[Tensor, Tensor]:
        """The chain of row p stands at the position of row p + ahead."""
        cos, sin = self.net.angles(self.rows)
        if ahead == 0:
            return cos, sin
        return tuple(torch.roll(x, -ahead, dims=1) for x in (cos, sin))  # type: ignore[return-value]

    def _mask(self, at: str, h_ND: Tensor, q_BQTA: Tensor, k_BGTA: Tensor) -> Tensor:
        """What the first link sees; further links of a chain see the same of the first links."""
        c, rows = self.net.c, self.rows
        size = tuple(rows.segment_BT.shape)
        iq, keys = self.net.indexer(p=self.p, at=at + "indexer.", h_ND=h_ND.detach(), size=size,
                                    angles=self._angles(0))  # fmt: skip
        if rows.learn:
            lost = index_loss(c, q_BQTA.detach(), k_BGTA.detach(), iq, keys, rows.segment_BT)
            rows.losses["index"].append(lost)
        if rows.sparse and size[1] > c.index_budget:
            return rows.mask_BTT & chosen(c, iq, keys, rows.segment_BT)
        return rows.mask_BTT


def later(x_NW: Tensor, distance: int, rows: Rows) -> Tensor:
    """The row `distance` further on in the same packed row (the first ones again at its end)."""
    b, t = rows.segment_BT.shape
    return torch.roll(x_NW.view(b, t, -1), -distance, dims=1).reshape(x_NW.shape)


def attend_chain(
    q_BQTA: Tensor, keys: list[Tensor], values: list[Tensor], mask_BTT: Tensor
) -> Tensor:
    """Attention [B, Q, T, A] over the first links under a mask, and over the chain's own links."""
    share = q_BQTA.shape[1] // keys[0].shape[1]
    wide_k, wide_v = ([x.repeat_interleave(share, dim=1) for x in xs] for xs in (keys, values))
    scale = q_BQTA.shape[-1] ** -0.5
    scores = (q_BQTA @ wide_k[0].transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~mask_BTT.unsqueeze(1), -1e9)
    own = [(q_BQTA.float() * k.float()).sum(-1, keepdim=True) * scale for k in wide_k[1:]]
    share_BQTK = torch.cat([scores, *own], -1).softmax(-1)
    t = scores.shape[-1]
    o = share_BQTK[..., :t].to(q_BQTA.dtype) @ wide_v[0]
    for j, v in enumerate(wide_v[1:]):
        o = o + share_BQTK[..., t + j : t + j + 1].to(v.dtype) * v
    return o
