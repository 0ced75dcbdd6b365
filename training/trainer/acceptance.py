"""How often drafts are accepted on the model's own prose, a depth, through the training forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from training.data.encode import encode_text, marks
from training.data.heldout import heldout
from training.trainer.draft import Chains, later
from training.trainer.evaluate import generate
from training.trainer.network import Network
from training.trainer.step import cast, forward_rows, logits_of

if TYPE_CHECKING:
    from civetta.model.config import ModelConfig

DEPTHS = 7
STEP = 64
PROSE = ("stories", "definitions")


def acceptance(
    c: ModelConfig, params: dict[str, Tensor], count: int, device: str
) -> dict[str, Any]:
    """For each kind of prose: drafts accepted at depth 1 … 7, given that those before were."""
    net = Network(c)
    p = cast(params, torch.bfloat16 if device == "cuda" else torch.float32)
    found: dict[str, Any] = {}
    for ability in PROSE:
        items = heldout(ability, count)
        with torch.no_grad():
            texts = generate(c, net, p, items, device)
        pairs = [
            (encode_text(item.prompt), encode_text(text))
            for item, text in zip(items, texts, strict=True)
        ]
        found[ability] = by_depth(c, p, pairs, device)
    return found


def by_depth(
    c: ModelConfig, p: dict[str, Tensor], pairs: list[tuple[list[int], list[int]]], device: str
) -> dict[str, Any]:
    """Shares of accepted drafts for (prompt, greedy reply) pairs; chains start at every token.

    A draft is accepted when it and all before it in its chain are the tokens of the reply.
    """
    net, known = Network(c), marks()
    width = -(-max(len(a) + len(b) for a, b in pairs) // STEP) * STEP
    ids_BT = np.full((len(pairs), width), known.end_of_text, dtype=np.int64)
    reply = np.zeros((len(pairs), width), dtype=bool)
    for number, (prompt, text) in enumerate(pairs):
        row = [*prompt, *text]
        ids_BT[number, : len(row)] = row
        reply[number, len(prompt) : len(row)] = True
    ids = torch.from_numpy(ids_BT).to(device)
    inside = torch.from_numpy(reply).to(device).view(-1, 1)
    with torch.no_grad():
        rows = forward_rows(
            c, ids, torch.zeros_like(ids), p["lm_head.weight"].dtype, sparse=True, learn=False
        )
        chains = Chains(net, p, net.wide(p, ids, rows), ids, rows)
        alive = torch.ones(ids.numel(), dtype=torch.bool, device=device)
        shares, reached = [], []
        for k in range(DEPTHS):
            best = logits_of(p, chains.link()).argmax(-1)
            asked = alive & later(inside, k + 2, rows).squeeze(1)
            # A chain begins at or after the prompt's last token: the tokens before are given.
            asked &= later(inside, 1, rows).squeeze(1)
            alive = asked & (best == later(ids.view(-1, 1), k + 2, rows).squeeze(1))
            shares.append(round(float(alive.sum() / asked.sum().clamp(min=1)), 4))
            reached.append(int(asked.sum()))
    return {"accepted": shares, "drafts": reached}
