"""What llama.cpp selects past the budget, put into transformers to prove that nothing else differs.

The model keeps budget/ratio blocks by score plus the incomplete tail of 0 to ratio - 1 tokens
(model.md E.1). llama.cpp takes a fixed count of budget + ratio - 1 tokens, so with a shorter tail
it also attends to ratio - 1 - tail tokens of the next block by score; which of that block's
equally scored tokens is up to its sort, so every choice is tried and the nearest one counts.
"""

from __future__ import annotations

import types
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from peer_checkpoint import BUDGET, RATIO, transformers_logits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEPT = BUDGET // RATIO
CHOICES = 6  # the most ways to take 1, 2 or 3 of 4 tokens

_scores: list[torch.return_types.sort] = []


def stable_topk() -> None:
    """Make torch's top-k take the lower index of equal scores, and remember the block scores.

    Index scores tie at exactly 0 when every head is rectified away (model.md E.1); which of the
    tied blocks enters is otherwise up to torch's sort. The model calls the method once a query
    that has a complete block; its router calls the function, which stays as it is.
    """

    def topk(self: torch.Tensor, k: int, dim: int = -1, **_: Any) -> types.SimpleNamespace:
        order = torch.sort(self, dim=dim, descending=True, stable=True)
        _scores.append(order)
        return types.SimpleNamespace(
            values=order.values.narrow(dim, 0, k), indices=order.indices.narrow(dim, 0, k)
        )

    torch.Tensor.topk = topk  # type: ignore[assignment,method-assign]


def tied_positions(model: torch.nn.Module, ids: list[int]) -> set[int]:
    """Positions whose last kept, next or second next block have equal scores: no defined winner."""
    _scores.clear()
    transformers_logits(model, ids)
    tied = set()
    for position, order in _by_position(len(ids)):
        cut = order.values[KEPT - 1 : KEPT + 2]
        if len(cut) > 1 and bool((cut[1:] == cut[:-1]).any()):
            tied.add(position)
    return tied


def with_filler(model: torch.nn.Module, ids: list[int], wanted: torch.Tensor) -> torch.Tensor:
    """transformers' logits [T, vocab] with the filler tokens that come nearest to `wanted`."""
    indexers = [m for m in model.modules() if hasattr(m, "block_topk")]
    assert len(indexers) == 1, "the records are told apart by query alone"
    best = error = None
    for choice in range(CHOICES):
        plain = indexers[0].forward
        indexers[0].forward = _filling(plain, choice)
        try:
            logits = transformers_logits(model, ids)
        finally:
            indexers[0].forward = plain
        here = (logits - wanted).norm(dim=-1)
        if best is None or error is None:
            best, error = logits, here
        else:
            best = torch.where((here < error)[:, None], logits, best)
            error = torch.minimum(here, error)
    assert best is not None
    return best


def _filling(plain: Callable[..., torch.Tensor], choice: int) -> Callable[..., torch.Tensor]:
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        _scores.clear()
        mask = plain(*args, **kwargs)
        for position, order in _by_position(mask.shape[2]):
            spare = RATIO - 1 - (position + 1) % RATIO
            if spare and len(order.indices) > KEPT:
                ways = list(combinations(range(RATIO), spare))
                first = RATIO * int(order.indices[KEPT])
                for token in ways[choice % len(ways)]:
                    mask[0, 0, position, first + token] = True
        return mask

    return forward


def _by_position(count: int) -> Iterator[tuple[int, torch.return_types.sort]]:
    # The first RATIO - 1 queries see no complete block and are not scored.
    yield from zip(range(RATIO - 1, count), _scores, strict=True)
