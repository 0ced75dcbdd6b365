"""The gated delta rule over whole rows of packed samples, in a form that trains fast.

Same maths as civetta.kernels.gdn.reference.chunk_step. Everything inside a chunk is computed for
all chunks at once; from chunk to chunk the state follows S' = M S + N, one product a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 64


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 of strictly lower L [..., n, n], n a power of two, by doubling inverted blocks."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        """Inverse blocks X of size s give those of 2s: X - X L_s X, L_s the blocks between."""
        n = lower.shape[-1]
        place = torch.arange(n, device=lower.device)
        x = torch.eye(n, device=lower.device, dtype=lower.dtype).expand_as(lower)
        size = 1
        while size < n:
            pair, half = place // (2 * size), place // size % 2
            between = (pair[:, None] == pair) & (half[:, None] == 1) & (half == 0)
            part = lower * between
            x = x - (part if size == 1 else x @ part @ x)
            size *= 2
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """d(A^-1) = -A^-1 dA A^-1."""
        (x,) = ctx.saved_tensors
        t = x.transpose(-1, -2)
        return -(t @ grads[0] @ t).tril(-1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """o [B, n, V, 64, A] for unit q, k and v of that shape and gates [B, n, V, 64], float32."""
    decay = log_decay.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    pair = (decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, -1e9).exp()
    k_beta = k * beta[..., None]
    since_start = decay.exp()[..., None]
    k_t = k.transpose(-1, -2)
    inverse = UnitLowerInverse.apply(((k_beta @ k_t) * pair).tril(-1))
    both = inverse @ torch.cat([v * beta[..., None], k_beta * since_start], dim=-1)
    u, w = both.split(v.shape[-1], dim=-1)
    scaled_q = q * q.shape[-1] ** -0.5
    within = (scaled_q @ k_t) * pair
    to_end_t = k_t * (decay[..., -1:] - decay).exp()[..., None, :]
    written = to_end_t @ both
    add, forget = written.split(v.shape[-1], dim=-1)
    eye = torch.eye(q.shape[-1], device=q.device)
    keep = eye * decay[..., -1, None, None].exp() - forget
    state = _states(keep, add)
    return (scaled_q * since_start) @ state + within @ (u - w @ state)


def _states(keep: Tensor, add: Tensor) -> Tensor:
    """The state [B, n, V, A, A] before each chunk."""
    rows, chunks = keep.shape[:2]
    keeps = keep.transpose(0, 1).flatten(1, 2).contiguous().unbind(0)
    adds = add.transpose(0, 1).flatten(1, 2).contiguous().unbind(0)
    states = [torch.zeros_like(adds[0])]
    for i in range(chunks - 1):
        states.append(torch.baddbmm(adds[i], keeps[i], states[i]))
    return torch.stack(states).unflatten(1, (rows, -1)).transpose(0, 1)
