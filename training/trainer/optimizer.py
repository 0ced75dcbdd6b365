"""Muon for matrices inside layers, Adam for the rest.

Muon: K. Jordan et al. (2024): momentum, then the nearest half-orthogonal matrix by five
Newton-Schulz steps, here for all matrices of one shape at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

MUON_RATE, ADAM_RATE, TABLE_RATE = 0.02, 2e-3, 6e-3
ADAM_NAMES = ("embed_tokens.weight", "lm_head.weight", "shard_0.weight", "pos_embed.weight")
MOMENTUM = 0.95
BETAS, EPS = (0.9, 0.98), 1e-10
DECAY = 0.02
CLIP = 1.0


class Optimizer:
    """Holds the state of both; `step(scale)` applies the gradients and clears them."""

    def __init__(
        self, params: dict[str, Tensor], factor: Callable[[str], float] = lambda _: 1.0
    ) -> None:
        """`factor` slows or speeds a parameter's learning by its name."""
        self.params, self.factor = params, factor
        groups: dict[tuple[int, int], list[str]] = {}
        self.adam: list[str] = []
        for name, value in params.items():
            small = value.ndim < 2 or min(value.shape[-2:]) < 16
            if small or name.endswith(ADAM_NAMES):
                self.adam.append(name)
            else:
                shape = (int(value.shape[-2]), int(value.shape[-1]))
                groups.setdefault(shape, []).append(name)
        self.muon = groups
        self.momentum = {n: torch.zeros_like(params[n]) for names in groups.values() for n in names}
        self.first = {n: torch.zeros_like(params[n]) for n in self.adam}
        self.second = {n: torch.zeros_like(params[n]) for n in self.adam}
        self.count = 0

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with the learning rates times `scale`."""
        self.count += 1
        for shape, names in self.muon.items():
            self._muon(shape, names, scale)
        self._adam(scale)
        for value in self.params.values():
            value.grad = None

    def _muon(self, shape: tuple[int, int], names: list[str], scale: float) -> None:
        grads = [_grad(self.params[n]) for n in names]
        momenta = [self.momentum[n] for n in names]
        torch._foreach_lerp_(momenta, grads, 1.0 - MOMENTUM)
        ahead = torch._foreach_lerp(grads, momenta, MOMENTUM)
        stack = torch.cat([a.view(-1, *shape) for a in ahead])
        update = orthogonal(stack) * max(1.0, shape[0] / shape[1]) ** 0.5
        counts = [a.numel() // (shape[0] * shape[1]) for a in ahead]
        for name, part in zip(names, update.split(counts), strict=True):
            value, rate = self.params[name], MUON_RATE * scale * self.factor(name)
            value.mul_(1.0 - rate * DECAY).sub_(part.view_as(value), alpha=rate)

    def _adam(self, scale: float) -> None:
        names = self.adam
        grads = [_grad(self.params[n]) for n in names]
        first, second = [self.first[n] for n in names], [self.second[n] for n in names]
        torch._foreach_lerp_(first, grads, 1.0 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, grads, grads, 1.0 - BETAS[1])
        fix1, fix2 = 1.0 - BETAS[0] ** self.count, 1.0 - BETAS[1] ** self.count
        roots = torch._foreach_sqrt(torch._foreach_div(second, fix2))
        torch._foreach_add_(roots, EPS)
        for name, m, root in zip(names, first, roots, strict=True):
            rate = (
                TABLE_RATE
                if name.endswith(("embed_tokens.weight", "shard_0.weight"))
                else ADAM_RATE
            )
            rate *= scale * self.factor(name) / fix1
            self.params[name].addcdiv_(m, root, value=-rate)

    def state(self) -> dict[str, Any]:
        """Everything needed to go on."""
        return {
            "momentum": self.momentum,
            "first": self.first,
            "second": self.second,
            "count": self.count,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up the state of an earlier run."""
        for mine, saved in (
            (self.momentum, state["momentum"]),
            (self.first, state["first"]),
            (self.second, state["second"]),
        ):
            for name, value in saved.items():
                mine[name].copy_(value)
        self.count = int(state["count"])


def _grad(value: Tensor) -> Tensor:
    return value.grad if value.grad is not None else torch.zeros_like(value)


def orthogonal(g_BMN: Tensor) -> Tensor:
    """Near the closest half-orthogonal matrix, by the quintic iteration of Muon."""
    a, b, c = 3.4445, -4.7750, 2.0315
    dtype = torch.bfloat16 if g_BMN.is_cuda else torch.float32
    x = g_BMN.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-12).to(dtype)
    for _ in range(5):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(-1, -2) if tall else x).float()
