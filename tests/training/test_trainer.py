"""The training forward equals the engine's; training reduces the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from training.export import export_hf
from training.nano_config import tiny_config
from training.trainer.network import Network
from training.trainer.optimizer import Optimizer
from training.trainer.parameters import create
from training.trainer.step import batch_loss, forward_rows, logits_of

from civetta.model.build import load_trunk
from civetta.model.config import from_hf

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = from_hf(tiny_config(), "tiny")


def _noisy(seed: int) -> dict[str, torch.Tensor]:
    params = create(CONFIG, seed)
    torch.manual_seed(seed)
    return {k: v + 0.1 * torch.randn_like(v) for k, v in params.items()}


def test_logits_equal_the_engines(tmp_path: Path) -> None:
    params = _noisy(1)
    export_hf(params, tiny_config(), tmp_path, torch.float32)
    torch.manual_seed(2)
    ids = torch.randint(0, 6100, (1, 192))
    ids[0, 70] = 6131
    rows = forward_rows(CONFIG, ids, torch.zeros_like(ids), torch.float32, sparse=True, learn=False)
    with torch.no_grad():
        got = logits_of(params, Network(CONFIG).hidden(params, ids, rows))
    trunk = load_trunk(tmp_path)
    session = trunk.store(sessions=1, context_tokens=256).open()
    want = trunk.forward(session, ids[0].tolist(), "all")
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


def test_packed_samples_do_not_see_each_other() -> None:
    params = _noisy(3)
    ids = torch.randint(0, 6100, (1, 128))
    ids[0, 63] = 6131
    segment = (torch.arange(128) >= 64).long()[None]
    net = Network(CONFIG)
    with torch.no_grad():
        packed = net.hidden(
            params, ids, forward_rows(CONFIG, ids, segment, torch.float32, sparse=True, learn=False)
        )
        alone_ids = ids[:, 64:]
        zeros = torch.zeros_like(alone_ids)
        alone = net.hidden(
            params,
            alone_ids,
            forward_rows(CONFIG, alone_ids, zeros, torch.float32, sparse=True, learn=False),
        )
    torch.testing.assert_close(packed[64:], alone, atol=1e-4, rtol=1e-4)


def test_loss_falls() -> None:
    params = {k: v.requires_grad_() for k, v in create(CONFIG, 4).items()}
    optimizer = Optimizer(params)
    ids = torch.randint(0, 20, (2, 128))
    weight = torch.ones(2, 128)
    net, losses = Network(CONFIG), []
    for _ in range(20):
        rows = forward_rows(
            CONFIG, ids, torch.zeros_like(ids), torch.float32, sparse=True, learn=True
        )
        total, parts = batch_loss(net, params, ids, weight, rows)
        total.backward()
        optimizer.step(1.0)
        losses.append(parts["text"].item())
    assert losses[-1] < losses[0] - 0.8
