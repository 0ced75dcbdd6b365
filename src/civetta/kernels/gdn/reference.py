"""Gated delta rule in plain torch: the chunk form that serves, the recurrent form that checks it.

Sources: model.md E.2; Yang et al., "Gated Delta Networks" (2024) for the chunk form, written here
with the unit lower triangular system solved once a chunk. A chunk always has 64 rows, anchored at a
multiple of 64; missing rows are zeros. Row t uses rows <= t only and every product has one shape, so
a row's bits do not depend on how many later rows the launch holds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from civetta.kernels.elementwise import sigmoid, silu, softplus
from civetta.kernels.ops import GDN_CHUNK

NORM_EPS = 1e-6


def short_conv(u_TC: Tensor, history_JC: Tensor, w_CK: Tensor, dilation: int) -> Tensor:
    """silu of a causal depthwise convolution over history and u; see `Ops.short_conv`."""
    rows, taps = u_TC.shape[0], w_CK.shape[1]
    padded = torch.cat([history_JC.float(), u_TC.float()])
    total = padded[:rows] * w_CK[:, 0]
    for k in range(1, taps):
        total = total + padded[k * dilation : k * dilation + rows] * w_CK[:, k]
    return silu(total).to(u_TC.dtype)


def gdn_gates(
    a_TV: Tensor, b_TV: Tensor, decay_scale_V: Tensor, dt_bias_V: Tensor
) -> tuple[Tensor, Tensor]:
    """Log decay and write strength of each head; see `Ops.gdn_gates`."""
    return decay_scale_V * softplus(a_TV.float() + dt_bias_V), sigmoid(b_TV.float())


def gdn_norm(o_TVA: Tensor, z_TVA: Tensor, gain_A: Tensor, eps: float) -> Tensor:
    """Per-head RMS norm gated by sigmoid(z); see `Ops.gdn_norm`."""
    o = o_TVA.float()
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + eps) * gain_A
    return (o * sigmoid(z_TVA.float())).to(z_TVA.dtype)


def gdn_chunks(
    q_THA: Tensor,
    k_THA: Tensor,
    v_TVA: Tensor,
    log_decay_TV: Tensor,
    beta_TV: Tensor,
    state_VAA: Tensor,
    tiled: bool,
    first_new: int,
    fold: int,
) -> tuple[Tensor, Tensor]:
    """Outputs of the new rows and the state after row `fold`; see `Ops.gdn_chunks`."""
    rows, value_heads = beta_TV.shape
    outputs = []
    state = folded = state_VAA
    for start in range(0, rows, GDN_CHUNK):
        stop = min(start + GDN_CHUNK, rows)
        part = slice(start, stop)
        q, k = (_spread(_unit(x[part]), value_heads, tiled) for x in (q_THA, k_THA))
        out_VCA, state = chunk_step(
            _by_head(q),
            _by_head(k),
            _by_head(v_TVA[part].float()),
            _gate_by_head(log_decay_TV[part]),
            _gate_by_head(beta_TV[part]),
            state,
        )
        if stop == fold:
            folded = state
        if stop > first_new:
            outputs.append(out_VCA[:, max(first_new - start, 0) : stop - start])
    return torch.cat(outputs, dim=1).transpose(0, 1).to(v_TVA.dtype), folded


def chunk_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk for many heads: q, k, v [..., 64, A], gates [..., 64], state [..., A, A].

    q and k are unit vectors; returns (out [..., 64, A], state after the chunk). float32.
    """
    decay = log_decay.cumsum(-1)
    lower = torch.ones(GDN_CHUNK, GDN_CHUNK, dtype=torch.bool, device=q.device).tril()
    pair = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    k_beta = k * beta.unsqueeze(-1)
    since_start = decay.exp().unsqueeze(-1)
    read = v * beta.unsqueeze(-1) - (k_beta * since_start) @ state
    system = (k_beta @ k.transpose(-1, -2)) * pair
    v_new = torch.linalg.solve_triangular(system, read, upper=False, unitriangular=True)
    scaled_q = q * q.shape[-1] ** -0.5
    out = (scaled_q * since_start) @ state
    out = out + ((scaled_q @ k.transpose(-1, -2)) * pair) @ v_new
    to_end = (decay[..., -1:] - decay).exp().unsqueeze(-1)
    after = state * decay[..., -1:].exp().unsqueeze(-1) + (k * to_end).transpose(-1, -2) @ v_new
    return out, after


def gdn_recurrent(
    q_THA: Tensor,
    k_THA: Tensor,
    v_TVA: Tensor,
    log_decay_TV: Tensor,
    beta_TV: Tensor,
    state_VAA: Tensor,
    tiled: bool,
) -> tuple[Tensor, Tensor]:
    """The rule as model.md E.2 states it, one row at a time, in the dtype of `state`: the oracle."""
    dtype, heads = state_VAA.dtype, beta_TV.shape[1]
    q = _spread(_unit(q_THA.to(dtype)), heads, tiled) * q_THA.shape[-1] ** -0.5
    k = _spread(_unit(k_THA.to(dtype)), heads, tiled)
    outputs, state = [], state_VAA
    for t in range(beta_TV.shape[0]):
        state = state * log_decay_TV[t].to(dtype).exp()[:, None, None]
        missing = v_TVA[t].to(dtype) - torch.einsum("vkd,vk->vd", state, k[t])
        state = state + torch.einsum("vk,vd->vkd", k[t], missing * beta_TV[t].to(dtype)[:, None])
        outputs.append(torch.einsum("vkd,vk->vd", state, q[t]))
    return torch.stack(outputs), state


def _unit(x_THA: Tensor) -> Tensor:
    x = x_THA if x_THA.dtype == torch.float64 else x_THA.float()
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + NORM_EPS)


def _spread(x_THA: Tensor, value_heads: int, tiled: bool) -> Tensor:
    """Key heads repeated to the value heads that read them."""
    ratio = value_heads // x_THA.shape[1]
    return x_THA.repeat(1, ratio, 1) if tiled else x_THA.repeat_interleave(ratio, dim=1)


def _by_head(x_TVA: Tensor) -> Tensor:
    """[T, V, A] -> [V, 64, A], padded with zero rows."""
    return pad(x_TVA.transpose(0, 1), (0, 0, 0, GDN_CHUNK - x_TVA.shape[0])).contiguous()


def _gate_by_head(x_TV: Tensor) -> Tensor:
    return pad(x_TV.t(), (0, GDN_CHUNK - x_TV.shape[0])).contiguous()
