"""Timing of phases: every op has its place, the sum is the whole, and no bit changes."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import pytest
import torch

from civetta.bench import phases
from civetta.bench.phases import (
    OPS_BY_WEIGHT,
    OPS_OUTSIDE,
    PHASE_OF_OP,
    PHASES,
    PhaseTimer,
    timed_trunk,
)
from civetta.kernels.ops import Ops
from civetta.model.build import load_trunk
from civetta.model.tiny import write_tiny

if TYPE_CHECKING:
    from civetta.model.trunk import Trunk

IDS = [i * 7 % 256 for i in range(90)]


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Trunk:
    return load_trunk(write_tiny(tmp_path_factory.mktemp("tiny")))


def test_every_op_has_a_phase() -> None:
    """A new op has to be placed: here, or among those that a weight tells apart."""
    names = {field.name for field in fields(Ops)} - {"name"}
    groups = [set(PHASE_OF_OP), OPS_BY_WEIGHT, OPS_OUTSIDE]
    assert names == set().union(*groups)
    assert len(names) == sum(map(len, groups))
    assert set(PHASE_OF_OP.values()) <= set(PHASES)


def test_a_timed_trunk_computes_the_same_bits(trunk: Trunk) -> None:
    timer = PhaseTimer()
    timed = timed_trunk(trunk, timer)
    for rows in ("all", "last"):
        plain, watched = (t.store(sessions=1, context_tokens=200).open() for t in (trunk, timed))
        for part in (IDS[:70], IDS[70:71], IDS[71:]):
            wanted = trunk.forward(plain, part, rows)  # type: ignore[arg-type]  # literals
            assert torch.equal(timed.forward(watched, part, rows), wanted)  # type: ignore[arg-type]  # literals


def test_every_phase_takes_time_and_the_sum_is_the_whole(trunk: Trunk) -> None:
    timer = PhaseTimer()
    timed = timed_trunk(trunk, timer)
    timed.forward(timed.store(sessions=1, context_tokens=200).open(), IDS)
    found = timer.take(100.0)
    assert tuple(found) == PHASES
    assert sum(found.values()) == pytest.approx(100.0)
    assert all(seconds > 0 for seconds in found.values())
    assert timer.take(5.0)["rest"] == 5.0


def test_a_trunk_that_is_not_timed_has_its_own_ops(trunk: Trunk) -> None:
    before = trunk.ops
    timed_trunk(trunk, PhaseTimer())
    assert trunk.ops is before
    assert trunk.ops.matmul is before.matmul


def test_calls_count_for_their_weights_part(trunk: Trunk, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of one second a reading: calls take one, and so do pauses within a part."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(phases.time, "perf_counter", lambda: float(next(ticks)))
    timer = PhaseTimer()
    ops = phases.timed_ops(trunk.ops, trunk.weights, timer)
    weights = trunk.weights
    block = weights.blocks[3]
    x = torch.zeros(2, weights.head.shape[1])
    ops.matmul(x, weights.head, torch.float32)  # 0-1
    ops.matmul(x, block.moe.router, torch.float32)  # 2-3, and what follows without a gap
    ops.matmul(x, block.moe.shared_gate, torch.float32)  # 4-5
    ops.matmul(x, block.mixer.in_qkv if hasattr(block.mixer, "in_qkv") else block.mixer.k, x.dtype)
    ops.rms_norm(x, torch.ones(x.shape[1]), 1e-6)  # of no weight of the trunk
    mixer = "gdn" if hasattr(block.mixer, "in_qkv") else "qsa"
    found = timer.take(20.0)
    assert {name: s for name, s in found.items() if s} == {
        "head": 1.0,
        "moe": 3.0,
        mixer: 1.0,
        "rest": 15.0,
    }
