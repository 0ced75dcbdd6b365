"""Inputs at the edge of what kernels meet: equal router scores, rows of zeros. Whole models on a GPU:
benchmarks/gpu_long.py."""

import pytest
import torch
from triton_inputs import DEVICE, Random

pytest.importorskip("triton")

from civetta.kernels.fused.streams import Written, enter, mix, settle
from civetta.kernels.matmul.triton import counters
from civetta.kernels.moe.triton import group_rows, route
from civetta.kernels.packed import PackedHyper, pack, pack_stack

F32 = torch.float32
STREAMS, WIDTH, RANK = 4, 64, 16


@pytest.mark.parametrize("score", [0.0, -3e38, 3e38])
def test_equal_router_scores_take_the_lowest_experts_with_equal_weights(score):
    ids, weights = route(torch.full((3, 12), score, device=DEVICE), 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert torch.allclose(weights.cpu(), torch.full((3, 5), 0.2))
    groups = group_rows(ids, 12)
    assert groups.end_E.tolist() == [3, 6, 9, 12] + [15] * 8


@pytest.mark.parametrize("rows", [1, 70])
def test_streams_of_zeros_stay_finite_and_zero(rows):
    random = Random(8)
    hyper = PackedHyper(
        gain_SD=random.normal(STREAMS, WIDTH).to(DEVICE),
        down=pack(random.normal(RANK, STREAMS * WIDTH), F32, DEVICE),
        up=pack_stack([random.normal(WIDTH, RANK) for _ in range(STREAMS)], F32, DEVICE),
        inject=random.normal(STREAMS, STREAMS * WIDTH).to(DEVICE),
    )
    x = torch.zeros(rows, STREAMS, WIDTH, device=DEVICE)
    slots, mixes = torch.zeros(rows, 3, WIDTH, device=DEVICE), torch.zeros(rows, 3, device=DEVICE)
    written = Written(
        y=slots,
        inject=torch.zeros(rows, STREAMS, STREAMS, device=DEVICE),
        weights_TM=mixes,
        shared=torch.zeros(rows, WIDTH, device=DEVICE),
        shared_mix=torch.zeros(rows, device=DEVICE),
    )
    entered = enter(x, hyper, 1e-6, F32, settle(written) if rows > 1 else written)
    h = mix(x, entered, hyper, counters(torch.device(DEVICE)))
    assert not x.any()
    assert not h.any()
    assert not entered.normed.any()
    assert entered.inject is not None
    assert not entered.inject.any()
    assert entered.scale.isfinite().all()
