"""The training loop: batches in, steps, log lines, checkpoints, held-out figures."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from civetta.model.config import from_hf
from training.nano_config import nano_config
from training.trainer.evaluate import evaluate
from training.trainer.feed import Fed, batches, feed
from training.trainer.network import Network
from training.trainer.optimizer import Optimizer
from training.trainer.parameters import create
from training.trainer.step import batch_loss, cast, forward_rows

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from civetta.model.config import ModelConfig

WARM_STEPS = 60
LOG_EVERY = 50
LEAST_RATE = 0.02
PARTS = 4
SAVE_EVERY_S = 120.0


def train(args: argparse.Namespace) -> None:
    """Run to the last phase's end; leaves a checkpoint, bf16 weights in parts and a log."""
    began = time.monotonic()
    c = from_hf(nano_config(), "nano_config")
    args.out.mkdir(parents=True, exist_ok=True)
    args.state.mkdir(parents=True, exist_ok=True)
    params = {k: v.to(args.device).requires_grad_() for k, v in create(c).items()}
    optimizer = Optimizer(params)
    step = resume(args.state, params, optimizer)
    total = sum(v.numel() for v in params.values())
    log_line(args.out, {"parameters": total, "from_step": step})
    net = Network(c, fast=args.fast)
    step = _steps(args, c, net, params, optimizer, step, began)
    save_state(args.state, params, optimizer, step)
    save_parts(args.out, params)
    if args.eval:
        plain = {k: v.detach() for k, v in params.items()}
        log_line(args.out, {"step": step, "heldout": evaluate(c, plain, args.eval, args.device)})
    log_line(args.out, {"wall_s": round(time.monotonic() - began, 1)})


def _steps(
    args: argparse.Namespace,
    c: ModelConfig,
    net: Network,
    params: dict[str, Tensor],
    optimizer: Optimizer,
    step: int,
    began: float,
) -> int:
    seen, mark, saved = 0, time.monotonic(), time.monotonic()
    sums: dict[str, Tensor] = {}
    end = int(args.phases.rpartition(":")[2])
    source = batches(args.phases, step, args.tokens, args.workers)
    for fed in feed(c, source, args.device):
        if args.pause_s is not None and time.monotonic() - began > args.pause_s:
            break
        scale = args.rate * rate_at(step, end, args.decay_from)
        parts = _one(c, net, params, optimizer, fed, scale, sparse=step >= args.sparse_from)
        for name, value in parts.items():
            sums[name] = sums.get(name, torch.zeros_like(value)) + value
        step += 1
        seen += fed.ids_BT.numel()
        if step % LOG_EVERY == 0 or step in (1, 5, 20):
            count = seen / args.tokens
            line: dict[str, Any] = {k: round(v.item() / count, 4) for k, v in sums.items()}
            now = time.monotonic()
            line |= {"step": step, "scale": round(scale, 3), "rate": round(seen / (now - mark))}
            log_line(args.out, line)
            seen, mark, sums = 0, now, {}
            if line["text"] != line["text"]:
                raise SystemExit("the loss is not a number")
            if now - saved > SAVE_EVERY_S:
                save_state(args.state, params, optimizer, step)
                saved = time.monotonic()
    return step


def _one(
    c: ModelConfig,
    net: Network,
    params: dict[str, Tensor],
    optimizer: Optimizer,
    fed: Fed,
    scale: float,
    *,
    sparse: bool,
) -> dict[str, Tensor]:
    dtype = torch.bfloat16 if fed.ids_BT.is_cuda else torch.float32
    rows = forward_rows(
        c, fed.ids_BT, fed.segment_BT, dtype, sparse=sparse, learn=True, ngram_NH=fed.ngram_NH
    )
    loss, parts = batch_loss(net, cast(params, dtype), fed.ids_BT, fed.weight_BT, rows)
    loss.backward()
    optimizer.step(scale)
    return parts


def rate_at(step: int, end: int, decay_from: int | None) -> float:
    """Warm up, hold, then fall in a line from step `decay_from` to `end`."""
    warm = min(1.0, (step + 1) / WARM_STEPS)
    if decay_from is None or step <= decay_from:
        return warm
    return warm * max(LEAST_RATE, (end - step) / (end - decay_from))


def log_line(out: Path, line: dict[str, Any]) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    with (out / "log.jsonl").open("a") as file:
        file.write(text + "\n")


def save_state(folder: Path, params: dict[str, Tensor], optimizer: Optimizer, step: int) -> None:
    """Weights in float32 with the optimizer's state, replaced at once."""
    state = {
        "params": {k: v.detach() for k, v in params.items()},
        "optimizer": optimizer.state(),
        "step": step,
    }
    torch.save(state, folder / "state.new")
    (folder / "state.new").replace(folder / "state.pt")


def resume(folder: Path, params: dict[str, Tensor], optimizer: Optimizer) -> int:
    """Take up a full checkpoint, or weights in parts (then with a fresh optimizer)."""
    path = folder / "state.pt"
    if path.exists():
        state = torch.load(path, map_location="cpu", weights_only=True)
        with torch.no_grad():
            for name, value in state["params"].items():
                params[name].copy_(value)
        optimizer.restore(state["optimizer"])
        return int(state["step"])
    folder.mkdir(parents=True, exist_ok=True)
    parts = sorted(folder.glob("weights-*.safetensors"))
    with torch.no_grad():
        for part in parts:
            for name, value in load_file(part).items():
                params[name].copy_(value)
    return _last_step(folder / "log.jsonl") if parts else 0


def _last_step(log: Path) -> int:
    """The step that a log ends with."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return max(int(line.get("step", 0)) for line in lines)


def save_parts(out: Path, params: dict[str, Tensor]) -> None:
    """Weights in bf16 (vectors in float32), in parts of about equal size."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(PARTS)]
    sizes = [0] * PARTS
    for name, value in sorted(params.items(), key=lambda item: -item[1].numel()):
        i = sizes.index(min(sizes))
        kept = value.detach().cpu()
        parts[i][name] = (
            kept.to(torch.bfloat16).contiguous() if kept.ndim > 1 else kept.contiguous()
        )
        sizes[i] += kept.numel()
    for i, part in enumerate(parts):
        save_file(part, out / f"weights-{i}.safetensors")
