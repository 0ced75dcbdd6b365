"""Held-out questions about pictures, through the training forward.

The expected answer stands behind the prompt, and a question counts when the likeliest token is the
right one at every place of the answer and its end: that is greedy decoding's exact answer.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from training.data.encode import encode_text, marks, spread
from training.data.heldout import EvalItem, heldout
from training.data.scenes import COLOURS
from training.trainer.network import Network
from training.trainer.positions import rotary_positions
from training.trainer.step import cast, forward_rows, logits_of
from training.trainer.tower import TowerSizes, tower

if TYPE_CHECKING:
    from civetta.model.config import ModelConfig

STEP = 64
AT_ONCE = 64


def kind_of(item: EvalItem) -> str:
    """What a question about a picture asks for, and the picture's side."""
    word = str(item.expected)
    kind = "count" if word.isdigit() else "colour" if word in COLOURS else "shape"
    return f"{kind}@{item.images[0].shape[0]}"


def picture_scores(
    c: ModelConfig,
    s: TowerSizes,
    params: dict[str, Tensor],
    count: int,
    device: str,
    *,
    seed: int = 0,
) -> dict[str, object]:
    """Share of right answers a kind of question and size of picture, and how many were asked."""
    net = Network(c)
    p = cast(params, torch.bfloat16 if device == "cuda" else torch.float32)
    right: dict[str, list[bool]] = defaultdict(list)
    items = heldout("vision", count, seed=seed)
    for i in range(0, count, AT_ONCE):
        group = items[i : i + AT_ONCE]
        with torch.no_grad():
            found = _exact(c, s, net, p, group, device)
        for item, ok in zip(group, found, strict=True):
            right[kind_of(item)].append(ok)
    shares = {name: round(sum(oks) / len(oks), 4) for name, oks in sorted(right.items())}
    return shares | {"asked": {name: len(oks) for name, oks in sorted(right.items())}}


def _exact(
    c: ModelConfig,
    s: TowerSizes,
    net: Network,
    p: dict[str, Tensor],
    items: list[EvalItem],
    device: str,
) -> list[bool]:
    rows, slots, spans = [], [], []
    for number, item in enumerate(items):
        prompt = encode_text(item.prompt)
        ids, _, found = spread(prompt, np.zeros(len(prompt), np.float32), item.images)
        answer = [*encode_text(str(item.expected)), marks().turn_end]
        spans.append((len(ids), len(answer)))
        rows.append([*ids, *answer])
        slots += [(number, start, pixels) for start, pixels in found]
    width = -(-max(map(len, rows)) // STEP) * STEP
    ids_BT = np.full((len(rows), width), marks().end_of_text, dtype=np.int64)
    for number, row in enumerate(rows):
        ids_BT[number, : len(row)] = row
    places = [(row, start, pixels.shape[:2]) for row, start, pixels in slots]
    positions = torch.from_numpy(rotary_positions(*ids_BT.shape, places)).to(device)
    ids = torch.from_numpy(ids_BT).to(device)
    dtype = p["lm_head.weight"].dtype
    seen = [tower(p, s, torch.tensor(x[None]).to(device), dtype)[0] for _, _, x in slots]
    at = [
        row * width + start + np.arange(len(x))
        for (row, start, _), x in zip(slots, seen, strict=True)
    ]
    batch = forward_rows(
        c,
        ids,
        torch.zeros_like(ids),
        dtype,
        sparse=True,
        learn=False,
        positions_B3T=positions,
        images=(torch.from_numpy(np.concatenate(at)).to(device), torch.cat(seen)),
    )
    h = net.hidden(p, ids, batch).view(*ids.shape, -1)
    best = [logits_of(p, h[b, n - 1 : n - 1 + m]).argmax(-1) for b, (n, m) in enumerate(spans)]
    return [
        bool((guess == ids[b, n : n + m]).all())
        for b, (guess, (n, m)) in enumerate(zip(best, spans, strict=True))
    ]
