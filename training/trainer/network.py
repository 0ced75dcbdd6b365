"""The training forward of the text model: rows of packed samples in, hidden rows out.

The maths is model.md A.5, A.6 and E, and civetta's own forward is the oracle (tests). Parameters
are a flat mapping by Hugging Face name, so an export is a copy. Everything local to a token runs
over N = B * T flat rows, which keeps shapes the same whatever the row length.
Legend: N rows · S streams · D hidden · C conv channels · V, H value and key heads · A head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

from civetta.model.rope import RopeTable
from training.trainer.delta import CHUNK, delta_rule
from training.trainer.sparse import attend, chosen, index_loss, seen

if TYPE_CHECKING:
    from civetta.model.config import ModelConfig

Params = Mapping[str, Tensor]
ROOT = "model.language_model."
FORGET = -60.0
"""Log decay at a sample's first token: the state of the sample before is gone."""


@dataclass(slots=True)
class Rows:
    """What the layers know about the rows of one batch; `losses` collects auxiliary terms.

    `positions_B3T` are rotary positions (t, h, w); None for text, where they count up. `images` are
    places among the N rows and the tower's rows that stand there.
    """

    segment_BT: Tensor
    ngram_NH: Tensor
    dtype: torch.dtype
    sparse: bool
    learn: bool
    positions_B3T: Tensor | None = None
    images: tuple[Tensor, Tensor] | None = None
    mask_BTT: Tensor = field(init=False)
    order_N: Tensor = field(init=False)
    place_N: Tensor = field(init=False)
    losses: dict[str, list[Tensor]] = field(default_factory=lambda: {"router": [], "index": []})

    def __post_init__(self) -> None:
        rows, tokens = self.segment_BT.shape
        device = self.segment_BT.device
        self.mask_BTT = seen(self.segment_BT)
        row = torch.arange(rows, device=device)[:, None]
        self.order_N = (row * (tokens + 2) + self.segment_BT).flatten()
        self.place_N = torch.arange(tokens, device=device).repeat(rows)

    def same(self, distance: int) -> Tensor:
        """[N, 1] 1 where the row `distance` earlier belongs to the same sample."""
        equal = torch.zeros_like(self.order_N, dtype=torch.bool)
        equal[distance:] = self.order_N[distance:] == self.order_N[:-distance]
        return equal[:, None]


class Network:
    """The forward pass; `fast` wraps its token-local parts with torch.compile."""

    def __init__(self, config: ModelConfig, *, fast: bool = False) -> None:
        self.c = config
        self.rope = RopeTable(config.rope_dims, config.rope_theta, config.mrope_section)
        wrap: Callable[[Any], Any] = torch.compile if fast else (lambda f: f)
        self.read, self.write, self.moe = wrap(hyper_read), wrap(hyper_write), wrap(moe)
        self.gate, self.conv = wrap(ple_gate), wrap(short_conv)
        self.split, self.finish = wrap(gdn_split), wrap(gdn_finish)

    def hidden(self, p: Params, ids_BT: Tensor, rows: Rows) -> Tensor:
        """h [N, D] before the head."""
        return self.mixed(p, self.wide(p, ids_BT, rows), rows)

    def mixed(self, p: Params, x_NSD: Tensor, rows: Rows) -> Tensor:
        """The end of the trunk: streams to one row."""
        at = ROOT + "hyper_connection_mixer."
        return self.read(x_NSD, *hyper_weights(p, at), None, self.c.rms_eps, rows.dtype)[0]

    def wide(self, p: Params, ids_BT: Tensor, rows: Rows) -> Tensor:
        """The streams [N, S, D] after the last layer."""
        c = self.c
        x_ND = token_rows(p, ids_BT, rows)
        x_NSD = x_ND.unsqueeze(1).repeat(1, c.streams, 1)
        for i, kind in enumerate(c.layer_kinds):
            at = f"{ROOT}layers.{i}."
            if c.ple is not None and c.ple.layer == i:
                x_NSD = self._ple(p, at + "ple.", x_NSD, rows)
            site = at + "attn_hyper_connection."
            inject = p[site + "block_inject_weight.weight"]
            h, strength = self.read(x_NSD, *hyper_weights(p, site), inject, c.rms_eps, rows.dtype)
            y = self._gdn(p, at, h, rows) if kind == "gdn" else self._qsa(p, at, h, rows)
            x_NSD = self.write(x_NSD, y, strength)
            x_NSD = self.mlp(p, at, x_NSD, rows)
        return x_NSD

    def mlp(self, p: Params, at: str, x_NSD: Tensor, rows: Rows) -> Tensor:
        c, site = self.c, at + "mlp_hyper_connection."
        inject = p[site + "block_inject_weight.weight"]
        h, strength = self.read(x_NSD, *hyper_weights(p, site), inject, c.rms_eps, rows.dtype)
        names = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
        shared = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
        weights = [p[f"{at}mlp.{n}"] for n in names]
        weights += [p[f"{at}mlp.shared_expert.{n}"] for n in shared]
        y, balance = self.moe(
            h, *weights, p[at + "mlp.shared_expert_gate.weight"], c.experts_a_token
        )
        rows.losses["router"].append(balance)
        return self.write(x_NSD, y, strength)

    def _gdn(self, p: Params, at: str, h_ND: Tensor, rows: Rows) -> Tensor:
        c, at = self.c, at + "linear_attn."
        u_NC = linear(h_ND, p[at + "in_proj_qkv.weight"])
        same = [rows.same(d) for d in (3, 2, 1)]
        mixed = self.conv(u_NC, p[at + "conv1d.weight"], same, (3, 2, 1))
        gates = [p[at + n] for n in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")]
        sizes = (c.gdn_key_heads, c.gdn_value_heads, c.gdn_head_dim)
        parts = self.split(mixed, h_ND, *gates, same[2], sizes)
        count = rows.segment_BT.shape[0]
        o = delta_rule(*(x.unflatten(0, (count, -1)) for x in parts))
        z_NW = linear(h_ND, p[at + "in_proj_z.weight"])
        y_NW = self.finish(o.flatten(0, 1), z_NW, p[at + "norm.weight"], c.rms_eps)
        return linear(y_NW, p[at + "out_proj.weight"])

    def _qsa(self, p: Params, at: str, h_ND: Tensor, rows: Rows) -> Tensor:
        c, at = self.c, at + "self_attn."
        b, t = rows.segment_BT.shape
        angles = self.angles(rows)
        q, k, v, gate = self.queries(p, at, h_ND, angles)
        iq, keys = self.indexer(p, at + "indexer.", h_ND.detach(), (b, t), angles)
        mask = rows.mask_BTT
        if rows.sparse and t > c.index_budget:
            mask = mask & chosen(c, iq, keys, rows.segment_BT)
        if rows.learn:
            loss = index_loss(c, q.detach(), k.detach(), iq, keys, rows.segment_BT)
            rows.losses["index"].append(loss)
        o = attend(q, k, v, mask).transpose(1, 2)
        gated = o.float() * gate.float().sigmoid()
        return linear(gated.to(rows.dtype).reshape(b * t, -1), p[at + "o_proj.weight"])

    def queries(
        self, p: Params, at: str, h_ND: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [B, Q, T, A], k and v [B, G, T, A], and the output gate [B, T, Q, A]."""
        c, t = self.c, angles[0].shape[1]
        both = linear(h_ND, p[at + "q_proj.weight"]).view(-1, t, c.heads, 2, c.head_dim)
        k = linear(h_ND, p[at + "k_proj.weight"]).view(-1, t, c.kv_heads, c.head_dim)
        v = linear(h_ND, p[at + "v_proj.weight"]).view(-1, t, c.kv_heads, c.head_dim)
        q = roped(both[:, :, :, 0], p[at + "q_norm.weight"], c.rms_eps, *angles)
        k = roped(k, p[at + "k_norm.weight"], c.rms_eps, *angles)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), both[:, :, :, 1]

    def indexer(
        self,
        p: Params,
        at: str,
        h_ND: Tensor,
        size: tuple[int, ...],
        angles: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Index queries [B, T, I, X] and pooled block keys [B, T / ratio, X] (model.md E.1)."""
        c, (cos, sin) = self.c, angles
        qk = linear(h_ND, p[at + "index_qk_proj.weight"]).view(*size, -1)
        q, k = qk.split([c.index_heads * c.index_dim, c.index_dim], dim=-1)
        q = q.unflatten(2, (c.index_heads, c.index_dim))
        q = roped(q, p[at + "q_layernorm.weight"], c.rms_eps, cos, sin)
        mean = k.float().unflatten(1, (-1, c.index_ratio)).mean(2).to(k.dtype).unsqueeze(2)
        step = slice(None, None, c.index_ratio)
        k = roped(mean, p[at + "k_layernorm.weight"], c.rms_eps, cos[:, step], sin[:, step])
        return q, k.squeeze(2)

    def angles(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """cos and sin [1 or B, T, R]."""
        inverse = self.rope.inverse_R.to(rows.segment_BT.device)
        if rows.positions_B3T is None:
            place_T = rows.place_N[: rows.segment_BT.shape[1]]
            angle = (place_T[:, None].float() * inverse).unsqueeze(0)
        else:
            axis = self.rope.axis_R.to(inverse.device)
            angle = rows.positions_B3T[:, axis].transpose(1, 2).float() * inverse
        return angle.cos(), angle.sin()

    def _ple(self, p: Params, at: str, x_NSD: Tensor, rows: Rows) -> Tensor:
        c = self.c
        assert c.ple is not None
        table = p[at + "ple_embedding.ngram_embedding.shard_0.weight"]
        e_NE = table[rows.ngram_NH].flatten(1).to(rows.dtype)
        key = linear(e_NE, p[at + "key_proj.weight"])
        value = linear(e_NE, p[at + "value_proj.weight"])
        norms = [p[at + f"norm_{n}.weight"] for n in ("query", "key", "conv")]
        gated, normed = self.gate(x_NSD, key, value, *norms, c.rms_eps)
        step = c.ple.conv_dilation
        distances = (3 * step, 2 * step, step)
        same = [rows.same(d) for d in distances]
        conv = self.conv(normed.flatten(1), p[at + "conv1d.weight"], same, distances)
        return x_NSD + gated + conv.view_as(x_NSD)


def token_rows(p: Params, ids_BT: Tensor, rows: Rows) -> Tensor:
    """What the first layer reads [N, D], float32: embeddings, and pictures in their places."""
    x_ND = p[ROOT + "embed_tokens.weight"][ids_BT.flatten()].float()
    if rows.images is None:
        return x_ND
    return x_ND.index_copy(0, *rows.images)


def hyper_weights(p: Params, at: str) -> tuple[Tensor, Tensor, Tensor]:
    names = ("hc_norm", "input_mix_weight_down", "input_mix_weight_up")
    return p[f"{at}{names[0]}.weight"], p[f"{at}{names[1]}.weight"], p[f"{at}{names[2]}.weight"]


def rms(x: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)


def roped(x: Tensor, shift: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Norm with 1 + w, then rotate the first 2R columns; x [B, T, heads, A], cos [1 or B, T, R]."""
    half = cos.shape[-1]
    y = rms(x, eps) * (1.0 + shift)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


def hyper_read(
    x_NSD: Tensor,
    shift_W: Tensor,
    down: Tensor,
    up: Tensor,
    inject: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """One row of the streams, and the strength of writing back [N, S] (model.md A.6)."""
    streams = x_NSD.shape[1]
    n_NSD = rms(x_NSD, eps) * (1.0 + shift_W.view(x_NSD.shape[1:]))
    flat = n_NSD.flatten(1).to(dtype)
    mix = silu(linear(flat, down).float() / streams).to(dtype)
    gate = linear(mix, up).float().sigmoid().view_as(n_NSD)
    h_ND = (gate * n_NSD).mean(1).to(dtype)
    if inject is None:
        return h_ND, None
    return h_ND, 2.0 * (linear(flat, inject).float() / streams).sigmoid()


def hyper_write(x_NSD: Tensor, y_ND: Tensor, strength_NS: Tensor) -> Tensor:
    """Add a layer's output to every stream."""
    return x_NSD + strength_NS.unsqueeze(-1) * y_ND.float().unsqueeze(1)


def moe(
    h_ND: Tensor,
    router: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    shared_gate: Tensor,
    shared_up: Tensor,
    shared_down: Tensor,
    shared_mix: Tensor,
    slots: int,
) -> tuple[Tensor, Tensor]:
    """Every expert on every row, weighted by 0 where not chosen; and the balance loss.

    At this size the wasted products cost less than sorting rows by expert.
    """
    experts, _, width = down_EDF.shape
    probs = linear(h_ND.float(), router.float()).softmax(-1)
    best, ids = probs.topk(slots, dim=-1)
    chosen_NE = torch.zeros_like(probs).scatter(1, ids, 1.0)
    weight_NE = probs * chosen_NE / best.sum(-1, keepdim=True)
    balance = experts * (chosen_NE.mean(0) * probs.mean(0)).sum() / slots
    both = linear(h_ND, gate_up_EFD.flatten(0, 1)).unflatten(1, (experts, 2, width))
    hidden = silu(both[:, :, 0].float()) * both[:, :, 1].float()
    hidden = (hidden * weight_NE.unsqueeze(-1)).to(h_ND.dtype).flatten(1)
    routed = hidden @ down_EDF.transpose(1, 2).flatten(0, 1)
    inner = silu(linear(h_ND, shared_gate).float()) * linear(h_ND, shared_up).float()
    shared = linear(inner.to(h_ND.dtype), shared_down).float()
    mix = linear(h_ND.float(), shared_mix.float()).sigmoid()
    return routed.float() + mix * shared, balance


def short_conv(
    u_NC: Tensor, w_C1K: Tensor, same: list[Tensor], distances: tuple[int, ...]
) -> Tensor:
    """silu of the causal depthwise convolution that stays inside samples."""
    w_CK = w_C1K.squeeze(1).float()
    total = u_NC.float() * w_CK[:, -1]
    for k, distance in enumerate(distances):
        earlier = torch.roll(u_NC, distance, 0).float()
        total = total + torch.where(same[k], earlier, 0.0) * w_CK[:, k]
    return silu(total).to(u_NC.dtype)


def gdn_split(
    mixed_NC: Tensor,
    h_ND: Tensor,
    a_w: Tensor,
    b_w: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    same_N1: Tensor,
    sizes: tuple[int, int, int],
) -> tuple[Tensor, ...]:
    """q, k, v [N / 64, V, 64, A] and log decay, beta [N / 64, V, 64], float32 (model.md E.2)."""
    keys, values, width = sizes
    x = mixed_NC.float().view(-1, CHUNK, 2 * keys + values, width).transpose(1, 2)
    q, k, v = x.split([keys, keys, values], dim=1)
    q, k = (
        (y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(
            values // keys, dim=1
        )
        for y in (q, k)
    )
    decay = -a_log.exp() * softplus(linear(h_ND.float(), a_w.float()) + dt_bias)
    decay = torch.where(same_N1, decay, FORGET)
    beta = linear(h_ND.float(), b_w.float()).sigmoid()
    gates = [g.view(-1, CHUNK, values).transpose(1, 2).contiguous() for g in (decay, beta)]
    return q.contiguous(), k.contiguous(), v.contiguous(), *gates


def gdn_finish(o_KVCA: Tensor, z_NW: Tensor, gain_A: Tensor, eps: float) -> Tensor:
    """Per-head norm, gated by sigmoid(z), [N, V * A]."""
    o = (rms(o_KVCA, eps) * gain_A).transpose(1, 2).reshape(z_NW.shape)
    return (o * z_NW.float().sigmoid()).to(z_NW.dtype)


def ple_gate(
    x_NSD: Tensor,
    key_NW: Tensor,
    value_ND: Tensor,
    norm_query: Tensor,
    norm_key: Tensor,
    norm_conv: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Gated n-gram values [N, S, D], and the same normed for the convolution (model.md A.5)."""
    shape = x_NSD.shape[1:]
    query = rms(x_NSD, eps) * (1.0 + norm_query.view(shape))
    key = rms(key_NW.view(x_NSD.shape), eps) * (1.0 + norm_key.view(shape))
    s = (query * key).sum(-1, keepdim=True) * shape[1] ** -0.5
    gate = (s.abs().clamp(min=1e-6).sqrt() * s.sign()).sigmoid()
    gated = gate * value_ND.float().unsqueeze(1)
    return gated, (rms(gated, eps) * (1.0 + norm_conv.view(shape))).to(key_NW.dtype)
