"""Pieces of the fused kernels that can be checked by themselves."""

import pytest
import torch
from triton_inputs import DEVICE, Random, relative_error

pytest.importorskip("triton")

import triton
import triton.language as tl

from civetta.kernels.fused.chunks import _inverse
from civetta.kernels.matmul import reference
from civetta.kernels.matmul.triton import counters, product
from civetta.kernels.moe.triton import group_rows
from civetta.kernels.packed import pack, pack_stack
from civetta.kernels.random_planes import random_packed
from civetta.kernels.residual.reference import swiglu

F32 = torch.float32


@triton.jit
def inverse_kernel(x, y, rows):
    r = tl.arange(0, 64)
    at = r[:, None] * 64 + r[None, :]
    tl.store(y + at, _inverse(tl.load(x + at), r, rows, "ieee"))


@pytest.mark.parametrize("equal", [False, True])
def test_triangular_systems_are_inverted_exactly_also_for_equal_keys(equal):
    entries = torch.ones(64, 64) if equal else Random(1).uniform(64, 64)
    system = torch.tril(0.99 * entries, -1)
    got = torch.full((64, 64), float("nan"), device=DEVICE)
    inverse_kernel[(1,)](system.to(DEVICE), got, 64)
    assert relative_error(got, torch.linalg.inv(torch.eye(64) + system.double())) < 1e-6


def test_rows_in_parts_equal_rows_in_one_go_and_leave_the_counters_zero():
    random, counts = Random(2), counters(torch.device(DEVICE))
    w = pack(random.normal(70, 1600), F32, DEVICE)
    x = random.normal(66, 1600).to(DEVICE)
    many, few = torch.full((66, 70), float("nan"), device=DEVICE), None
    product(x, w, many, counts)
    few = torch.full((3, 70), float("nan"), device=DEVICE)
    product(x[:3], w, few, counts)
    assert relative_error(few, many[:3].cpu()) < 1e-6
    assert not counts.any()
    if DEVICE == "cuda":
        assert torch.equal(few, many[:3])


def test_pairs_of_gate_and_up_rows_for_experts_met_directly_and_sorted():
    random = Random(3)
    gates, ups = ([random.normal(24, 640) for _ in range(5)] for _ in range(2))
    pairs = [torch.cat(p) for p in zip(gates, ups, strict=True)]
    stack = pack_stack(pairs, F32, DEVICE, pair=True)
    x, ids = random.normal(4, 640), torch.tensor([[0, 3], [1, 4], [4, 0], [2, 3]])
    want = torch.cat(
        [
            swiglu(*(reference.matmul(x[t : t + 1], w[e], F32) for w in (gates, ups)))
            for t in range(4)
            for e in ids[t].tolist()
        ]
    )
    got = torch.full((8, 24), float("nan"), device=DEVICE)
    on, flat = x.to(DEVICE), ids.view(-1).to(DEVICE)
    counts = counters(torch.device(DEVICE))
    product(on, stack, got, counts, experts_M=flat, divisor=2)
    assert relative_error(got, want) < 2e-6
    groups = group_rows(ids.to(DEVICE), 5)
    got.fill_(float("nan"))
    product(on, stack, got, None, groups=groups, divisor=2)
    assert relative_error(got, want) < 2e-6


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q5_K", "Q5_1", "F8_E4M3", "BF16"])
def test_random_planes_keep_the_size_of_activations(name):
    w = random_packed(name, 96, 512, torch.Generator(DEVICE).manual_seed(1))
    x = torch.randn(40, 512, device=DEVICE)
    y = torch.empty(40, 96, device=DEVICE)
    product(x, w, y, counters(torch.device(DEVICE)))
    assert 0.7 < float(y.std()) < 1.4
    assert abs(float(y.mean())) < 0.1
