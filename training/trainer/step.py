"""One batch through the network: hashes of its n-grams, its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from training.trainer.network import Network, Params, Rows

if TYPE_CHECKING:
    from civetta.model.config import ModelConfig

ROUTER_WEIGHT = 0.001
Z_WEIGHT = 1e-5


def ngram_rows(c: ModelConfig, ids_BT: np.ndarray) -> np.ndarray:
    """Table rows of every token [B * T, heads]; rows of a batch do not see each other."""
    assert c.ple is not None
    return np.concatenate([c.ple.hash.row_ids(row, []) for row in ids_BT])


def forward_rows(
    c: ModelConfig,
    ids_BT: Tensor,
    segment_BT: Tensor,
    dtype: torch.dtype,
    *,
    sparse: bool,
    learn: bool,
    ngram_NH: Tensor | None = None,
    positions_B3T: Tensor | None = None,
    images: tuple[Tensor, Tensor] | None = None,
) -> Rows:
    """What the layers need of a batch; hashes it unless that was done elsewhere."""
    if ngram_NH is None:
        ngram_NH = torch.from_numpy(ngram_rows(c, ids_BT.cpu().numpy())).to(ids_BT.device)
    return Rows(
        segment_BT=segment_BT,
        ngram_NH=ngram_NH,
        dtype=dtype,
        sparse=sparse,
        learn=learn,
        positions_B3T=positions_B3T,
        images=images,
    )


def logits_of(p: Params, h_ND: Tensor) -> Tensor:
    """float32 [N, vocab]."""
    return linear(h_ND, p["lm_head.weight"].to(h_ND.dtype)).float()


def cast(p: Params, dtype: torch.dtype) -> dict[str, Tensor]:
    """Matrices in the dtype of the products; vectors and gates stay as they are."""
    keep = ("mlp.gate.weight", "in_proj_a.weight", "in_proj_b.weight", "conv1d.weight")
    return {k: v if v.ndim < 2 or k.endswith(keep) else v.to(dtype) for k, v in p.items()}


def batch_loss(
    net: Network, p: Params, ids_BT: Tensor, weight_BT: Tensor, rows: Rows
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to follow, and its parts (detached): text, router, index, and right guesses."""
    h = net.hidden(p, ids_BT, rows)
    b, t = ids_BT.shape
    h = h.view(b, t, -1)[:, :-1].flatten(0, 1)
    wanted, weight = ids_BT[:, 1:].flatten().long(), weight_BT[:, 1:].flatten()
    logits = logits_of(p, h)
    each = cross_entropy(logits, wanted, reduction="none")
    text = (each * weight).sum() / weight.sum().clamp(min=1.0)
    router = torch.stack(rows.losses["router"]).sum()
    total = text + ROUTER_WEIGHT * router
    parts = {"text": text.detach(), "router": router.detach() / len(rows.losses["router"])}
    if rows.losses["index"]:
        index = torch.stack(rows.losses["index"]).sum()
        total = total + index
        parts["index"] = index.detach()
    with torch.no_grad():
        sure = (weight > 0.5).float()
        parts["reply"] = (each.detach() * sure).sum() / sure.sum().clamp(min=1.0)
    return total, parts
