"""The stages after the text model: `see` trains the tower under the frozen text model, `both`,
`count` and `pick` train both together, `names` the text model under the frozen tower, `draft` the
draft head.

A stage reads the weights that the stage before left, trains for a number of steps with a fresh
optimizer, and leaves all weights again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, linear

from civetta.model.config import from_hf
from training.nano_config import nano_config, tiny_config
from training.trainer.acceptance import acceptance
from training.trainer.draft import DRAFT, Chains, create_draft, later
from training.trainer.evaluate import evaluate
from training.trainer.evaluate_images import picture_scores
from training.trainer.feed import Fed, batches, feed
from training.trainer.loop import log_line, resume, save_parts, save_state
from training.trainer.network import Network, Params
from training.trainer.optimizer import Optimizer
from training.trainer.step import ROUTER_WEIGHT, batch_loss, cast, forward_rows, logits_of
from training.trainer.tower import CELLS, TOWER, TowerSizes, create_tower, tower
from training.weights import read_parameters

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from civetta.model.config import ModelConfig
    from training.trainer.network import Rows

LOG_EVERY = 50
SAVE_EVERY_S = 120.0
CELL_WEIGHT = 0.5
TRUNK_FACTOR = 0.25
"""The trunk follows the tower slowly: it is trained already."""

LEAST_RATE = 0.01
WARM_STEPS = 40
LINKS = 4
"""Depth to which chains are trained, in rows of at most LINK_TOKENS tokens; 1 in longer ones."""

LINK_TOKENS = 1024
LINK_WEIGHTS = (1.0, 0.7, 0.5, 0.4)


def run_stage(args: argparse.Namespace) -> None:
    """Train one stage; leaves weights in parts, a log line every LOG_EVERY steps and figures."""
    began = time.monotonic()
    config = tiny_config() if args.tiny else nano_config()
    c, sizes = from_hf(config, "nano_config"), TowerSizes.of(config["vision_config"])
    args.out.mkdir(parents=True, exist_ok=True)
    params = all_parameters(c, sizes, args.start)
    params = {k: v.to(args.device) for k, v in params.items()}
    learned = {k: v.requires_grad_() for k, v in params.items() if learns(args.stage, k)}
    optimizer = Optimizer(learned, lambda name: 1.0 if _is_new(name) else TRUNK_FACTOR)
    step = resume(args.state, learned, optimizer) if args.state else 0
    count = sum(v.numel() for v in learned.values())
    log_line(args.out, {"stage": args.stage, "learned": count, "from_step": step})
    net = Network(c, fast=args.fast)
    _steps(args, net, sizes, params, optimizer, step)
    plain = {k: v.detach() for k, v in params.items()}
    save_parts(args.out, plain)
    if args.eval:
        log_line(args.out, {"heldout": figures(args, net, sizes, plain)})
    log_line(args.out, {"wall_s": round(time.monotonic() - began, 1)})


def all_parameters(c: ModelConfig, s: TowerSizes, start: Path) -> dict[str, Tensor]:
    """Float32 parameters on the CPU: those of a folder, new ones for what it lacks."""
    return create_tower(s) | create_draft(c) | read_parameters(start)


def learns(stage: str, name: str) -> bool:
    """Whether a stage trains a parameter."""
    if stage == "draft":
        return name.startswith(DRAFT)
    if name.startswith(TOWER) or name == CELLS:
        return stage != "names"
    return stage != "see" and not name.startswith(DRAFT)


def _is_new(name: str) -> bool:
    return name.startswith((TOWER, DRAFT)) or name == CELLS


def _steps(
    args: argparse.Namespace,
    net: Network,
    sizes: TowerSizes,
    params: dict[str, Tensor],
    optimizer: Optimizer,
    step: int,
) -> None:
    loss_of = _draft_loss if args.stage == "draft" else _picture_loss
    sums: dict[str, Tensor] = {}
    mark, saved, since = time.monotonic(), time.monotonic(), 0
    source = batches(f"{args.stage}:{args.steps}", step, args.tokens, args.workers, pictures=True)
    for fed in feed(net.c, source, args.device):
        scale = args.rate * rate_at(step, args.steps)
        loss, parts = loss_of(net, sizes, params, fed)
        loss.backward()
        optimizer.step(scale)
        for name, value in parts.items():
            sums[name] = sums.get(name, torch.zeros_like(value)) + value.detach()
            sums["n " + name] = sums.get("n " + name, torch.zeros_like(value)) + 1
        step, since = step + 1, since + 1
        if step % LOG_EVERY == 0 or step in (1, 5, 20, args.steps):
            line = _means(sums) | {"stage": args.stage, "step": step, "scale": round(scale, 3)}
            now = time.monotonic()
            line["rate"] = round(since * args.tokens / (now - mark))
            log_line(args.out, line)
            sums, mark, since = {}, now, 0
            if args.state and now - saved > SAVE_EVERY_S:
                save_state(args.state, optimizer.params, optimizer, step)
                saved = now


def _means(sums: dict[str, Tensor]) -> dict[str, Any]:
    names = [name for name in sums if not name.startswith("n ")]
    return {k: round((sums[k] / sums["n " + k]).item(), 4) for k in names}


def rate_at(step: int, steps: int) -> float:
    """Warm up, hold for 0.55 of the steps, fall in a line."""
    warm = min(1.0, (step + 1) / WARM_STEPS)
    left = (steps - step) / (0.45 * steps)
    return warm * min(1.0, max(LEAST_RATE, left))


def rows_of(
    c: ModelConfig, s: TowerSizes, p: Params, fed: Fed, *, learn: bool
) -> tuple[Rows, list[Tensor]]:
    """The rows of a batch with its pictures in their places, and the tower's rows a size."""
    dtype = torch.bfloat16 if fed.ids_BT.is_cuda else torch.float32
    seen = [tower(p, s, group.pixels_MHWC, dtype) for group in fed.pictures]
    images = None
    if seen:
        places = torch.cat([group.place_MK.flatten() for group in fed.pictures])
        images = (places, torch.cat([rows.flatten(0, 1) for rows in seen]))
    rows = forward_rows(
        c,
        fed.ids_BT,
        fed.segment_BT,
        dtype,
        sparse=True,
        learn=learn,
        ngram_NH=fed.ngram_NH,
        positions_B3T=fed.positions_B3T,
        images=images,
    )
    return rows, seen


def _picture_loss(
    net: Network, s: TowerSizes, params: dict[str, Tensor], fed: Fed
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the text that follows, and of reading each cell from the tower's row in a line."""
    dtype = torch.bfloat16 if fed.ids_BT.is_cuda else torch.float32
    p = cast(params, dtype)
    learn = params["lm_head.weight"].requires_grad
    rows, seen = rows_of(net.c, s, p, fed, learn=learn)
    loss, parts = batch_loss(net, p, fed.ids_BT, fed.weight_BT, rows)
    if seen and params[CELLS].requires_grad:
        read = torch.cat([linear(x, p[CELLS].float()).flatten(0, 1) for x in seen])
        cells = torch.cat([group.cells_MK.flatten() for group in fed.pictures])
        parts["cells"] = cross_entropy(read, cells)
        loss = loss + CELL_WEIGHT * parts["cells"]
    return loss, parts


def _draft_loss(
    net: Network, s: TowerSizes, params: dict[str, Tensor], fed: Fed
) -> tuple[Tensor, dict[str, Tensor]]:
    """Distance of each depth's draft from the trunk's own distribution at the drafted place."""
    dtype = torch.bfloat16 if fed.ids_BT.is_cuda else torch.float32
    p = cast(params, dtype)
    with torch.no_grad():
        rows, _ = rows_of(net.c, s, p, fed, learn=False)
        x_NSD = net.wide(p, fed.ids_BT, rows)
        wanted = logits_of(p, net.mixed(p, x_NSD, rows)).log_softmax(-1)
    rows.losses = {"router": [], "index": []}
    rows.learn = True
    chains = Chains(net, p, x_NSD, fed.ids_BT, rows)
    total = torch.zeros((), device=x_NSD.device)
    parts: dict[str, Tensor] = {}
    own, weight = fed.segment_BT.reshape(-1, 1), fed.weight_BT.reshape(-1, 1)
    for k in range(LINKS if fed.ids_BT.shape[1] <= LINK_TOKENS else 1):
        guess = logits_of(p, chains.link()).log_softmax(-1)
        target = later(wanted, k + 1, rows)
        inside = (later(own, k + 2, rows) == own) & (own >= 0)
        w = (later(weight, k + 2, rows) * inside).squeeze(1)
        each = kl_div(guess, target, reduction="none", log_target=True).sum(-1)
        loss = (each * w).sum() / w.sum().clamp(min=1.0)
        total = total + LINK_WEIGHTS[k] * loss
        hit = (guess.argmax(-1) == target.argmax(-1)) * (w > 0.5)
        parts |= {f"kl{k + 1}": loss, f"hit{k + 1}": hit.sum() / (w > 0.5).sum().clamp(min=1)}
    total = total + ROUTER_WEIGHT * torch.stack(rows.losses["router"]).sum()
    parts["index"] = torch.stack(rows.losses["index"]).sum()
    return total + parts["index"], parts


def figures(
    args: argparse.Namespace, net: Network, s: TowerSizes, plain: dict[str, Tensor]
) -> dict[str, Any]:
    """Held-out figures of what a stage changes."""
    if args.stage == "draft":
        return acceptance(net.c, plain, args.eval, args.device)
    found: dict[str, Any] = picture_scores(net.c, s, plain, 6 * args.eval, args.device)
    if args.stage != "see":
        found |= evaluate(net.c, plain, args.eval, args.device)
    return found
