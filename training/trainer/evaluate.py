"""Held-out figures through the training forward: greedy answers, graded; loss on held-out text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from training.data.encode import encode_text, marks
from training.data.heldout import EvalItem, heldout, heldout_text
from training.trainer.network import Network
from training.trainer.step import cast, forward_rows, logits_of

if TYPE_CHECKING:
    from civetta.model.config import ModelConfig

STEP = 64
"""Rows are padded to a multiple of this."""

TASKS: tuple[tuple[str, int | None], ...] = (
    ("arithmetic", None),
    ("copy", None),
    ("retrieval", 1000),
    ("json", None),
    ("definitions", None),
    ("chat", None),
    ("tools", None),
    ("retrieval", 4000),
    ("retrieval", 12000),
)
TOKENS_AT_ONCE = 200_000
FORMS = {"arithmetic": 2}


def evaluate(c: ModelConfig, params: dict[str, Tensor], items: int, device: str) -> dict[str, Any]:
    """Share of right answers of each task, thinking off, and perplexity of held-out stories."""
    net = Network(c)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    p = cast(params, dtype)
    found: dict[str, Any] = {}
    for ability, tokens in TASKS:
        began = time.monotonic()
        count = items * FORMS.get(ability, 1)
        if tokens and tokens > 4000:
            count = max(8, items // 4)
        asked = heldout(ability, count, tokens=tokens)
        with torch.no_grad():
            texts = generate(c, net, p, asked, device)
        right = [item.grade_text(text) for item, text in zip(asked, texts, strict=True)]
        name = f"{ability}@{tokens}" if tokens else ability
        found[name] = round(sum(right) / len(right), 3)
        wrong = [t for t, ok in zip(texts, right, strict=True) if not ok][:1]
        wanted = [i.expected for i, ok in zip(asked, right, strict=True) if not ok][:1]
        print(name, found[name], round(time.monotonic() - began, 1), wrong, wanted, flush=True)
    with torch.no_grad():
        found["story perplexity"] = _perplexity(c, net, p, device)
    return found


def generate(
    c: ModelConfig, net: Network, p: dict[str, Tensor], items: list[EvalItem], device: str
) -> list[str]:
    """Greedy answers; every step runs whole rows again, which a large device does not mind."""
    prompts = [encode_text(item.prompt) for item in items]
    most = max(len(ids) for ids in prompts)
    group = max(1, TOKENS_AT_ONCE // most)
    texts: list[str] = []
    for i in range(0, len(items), group):
        limit = max(item.max_tokens for item in items[i : i + group])
        texts += _answers(c, net, p, prompts[i : i + group], min(limit, 200), device)
    return texts


def _answers(
    c: ModelConfig,
    net: Network,
    p: dict[str, Tensor],
    prompts: list[list[int]],
    limit: int,
    device: str,
) -> list[str]:
    known = marks()
    rows = [list(ids) for ids in prompts]
    open_rows = list(range(len(rows)))
    for _ in range(limit):
        longest = max(len(rows[i]) for i in open_rows)
        width = -(-longest // STEP) * STEP
        ids = np.full((len(open_rows), width), known.end_of_text, dtype=np.int64)
        for place, i in enumerate(open_rows):
            ids[place, : len(rows[i])] = rows[i]
        last = torch.tensor([len(rows[i]) - 1 for i in open_rows], device=device)
        best = _next(c, net, p, torch.from_numpy(ids).to(device), last)
        for i, token in zip(open_rows, best, strict=True):
            rows[i].append(token)
        ends = (known.turn_end, known.end_of_text)
        open_rows = [i for i in open_rows if rows[i][-1] not in ends]
        if not open_rows:
            break
    return [
        known.tokenizer.decode(row[len(ids) :], skip_special_tokens=False)
        for row, ids in zip(rows, prompts, strict=True)
    ]


def _next(
    c: ModelConfig, net: Network, p: dict[str, Tensor], ids_BT: Tensor, last_B: Tensor
) -> list[int]:
    dtype = p["lm_head.weight"].dtype
    rows = forward_rows(c, ids_BT, torch.zeros_like(ids_BT), dtype, sparse=True, learn=False)
    h = net.hidden(p, ids_BT, rows).view(*ids_BT.shape, -1)
    h = h[torch.arange(len(ids_BT), device=h.device), last_B]
    return [int(t) for t in logits_of(p, h).argmax(-1)]


def _perplexity(c: ModelConfig, net: Network, p: dict[str, Tensor], device: str) -> float:
    """exp of the mean loss a token on held-out stories."""
    known, total, count = marks(), 0.0, 0
    for text in heldout_text(32):
        ids = [*encode_text(text), known.end_of_text]
        row = np.full((1, -(-len(ids) // STEP) * STEP), known.end_of_text, dtype=np.int64)
        row[0, : len(ids)] = ids
        x = torch.from_numpy(row).to(device)
        dtype = p["lm_head.weight"].dtype
        rows = forward_rows(c, x, torch.zeros_like(x), dtype, sparse=True, learn=False)
        logits = logits_of(p, net.hidden(p, x, rows)[: len(ids) - 1])
        total += float(cross_entropy(logits, x[0, 1 : len(ids)], reduction="sum"))
        count += len(ids) - 1
    return round(float(np.exp(total / count)), 3)
