"""The compiled products against float64, and their promise: a row's bits are its own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from civetta.checkpoint import formats
from civetta.checkpoint.quant import QuantTensor
from civetta.kernels import cpu
from civetta.kernels.dequant.reference import dequantize
from civetta.kernels.moe import reference as moe
from civetta.kernels.ops import ExpertWeights

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the extension was not built")

BLOCKED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def blocked(name: str, rows: int, cols: int) -> QuantTensor:
    """Random blocks whose half-precision scales are small and finite."""
    fmt = formats.by_name(name)
    assert fmt is not None
    data = np.random.default_rng(rows).integers(0, 256, (rows, fmt.row_bytes(cols)), dtype=np.uint8)
    blocks = data.reshape(-1, fmt.block_bytes)
    places = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for place in places.get(name, (0,)):
        scale = np.full(len(blocks), 0.01, dtype=np.float16).view(np.uint8).reshape(-1, 2)
        blocks[:, place : place + 2] = scale
    return QuantTensor(format=fmt, data_RB=torch.from_numpy(data), cols=cols)


def fp8(rows: int, cols: int, *, block: bool) -> QuantTensor:
    codes = np.random.default_rng(1).integers(0, 120, (rows, cols), dtype=np.uint8)
    grid = (-(-rows // 128), -(-cols // 128)) if block else (1,)
    scale = torch.from_numpy(np.random.default_rng(2).uniform(0.5, 2, grid).astype(np.float32))
    return QuantTensor(
        format=formats.F8_E4M3, data_RB=torch.from_numpy(codes), cols=cols, scale=scale
    )


def nvfp4(rows: int, cols: int) -> QuantTensor:
    random = np.random.default_rng(3)
    return QuantTensor(
        format=formats.NVFP4,
        data_RB=torch.from_numpy(random.integers(0, 256, (rows, cols // 2), dtype=np.uint8)),
        cols=cols,
        scale=torch.from_numpy(random.integers(40, 70, (rows, cols // 16), dtype=np.uint8)),
        scale_2=torch.tensor([0.25]),
    )


def weights() -> dict[str, torch.Tensor | QuantTensor]:
    found: dict[str, torch.Tensor | QuantTensor] = {
        name: blocked(name, 37, 512) for name in BLOCKED
    }
    found |= {name: numbers(37, 75).to(dtype) for name, dtype in PLAIN.items()}
    found |= {
        "FP8 blocks": fp8(140, 300, block=True),
        "FP8 slice": fp8(300, 130, block=True).slice_rows(100, 210),
        "FP8 global": fp8(33, 70, block=False),
        "NVFP4": nvfp4(21, 96),
        "one output": numbers(1, 64),
        "strided": numbers(40, 100)[:, :70],
    }
    return found


WEIGHTS = weights()


@pytest.fixture(scope="module", params=[1, 2])
def products(request: pytest.FixtureRequest) -> cpu.CpuProducts:
    return cpu.CpuProducts(request.param)


def exact(x: torch.Tensor, w: torch.Tensor | QuantTensor) -> torch.Tensor:
    values = dequantize(w) if isinstance(w, QuantTensor) else w.float()
    return x.double() @ values.to(x.dtype).double().t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WEIGHTS)
def test_equals_float64(products: cpu.CpuProducts, name: str, dtype: torch.dtype) -> None:
    w = WEIGHTS[name]
    for rows in (1, 5, 33):
        x = numbers(rows, w.shape[1], seed=rows).to(dtype)
        y, wanted = products.matmul(x, w, torch.float32), exact(x, w)
        assert y.shape == wanted.shape
        assert float((y.double() - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_row_is_the_same_in_any_company(
    products: cpu.CpuProducts, name: str, dtype: torch.dtype
) -> None:
    w = WEIGHTS[name]
    x = numbers(70, w.shape[1]).to(dtype)
    whole = products.matmul(x, w, torch.float32)
    for rows in (1, 2, 7, 16, 69):
        assert torch.equal(products.matmul(x[:rows], w, torch.float32), whole[:rows])
        assert torch.equal(products.matmul(x[-rows:], w, torch.float32), whole[-rows:])
    turned = products.matmul(x.flip(0), w, torch.float32).flip(0)
    assert torch.equal(turned, whole)


def test_threads_do_not_matter() -> None:
    x = numbers(9, 512)
    found = [
        {
            n: cpu.CpuProducts(t).matmul(x[:, : w.shape[1]], w, torch.float32)
            for n, w in WEIGHTS.items()
        }
        for t in (1, 2, 3)
    ]
    for name in WEIGHTS:
        assert torch.equal(found[0][name], found[1][name])
        assert torch.equal(found[0][name], found[2][name])


def test_many_equals_single(products: cpu.CpuProducts) -> None:
    x, w = numbers(6, 512), [WEIGHTS[name] for name in BLOCKED]
    together = products.matmul_many(x, w, torch.float32)
    for y, one in zip(together, w, strict=True):
        assert torch.equal(y, products.matmul(x, one, torch.float32))


def test_rounded_outputs_are_the_rounded_sums(products: cpu.CpuProducts) -> None:
    x, w = numbers(6, 512).bfloat16(), WEIGHTS["Q8_0"]
    y = products.matmul(x, w, torch.bfloat16)
    assert torch.equal(y, products.matmul(x, w, torch.float32).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts(products: cpu.CpuProducts, dtype: torch.dtype) -> None:
    w = ExpertWeights(
        gate=tuple(blocked("Q4_K", 64, 256) for _ in range(5)),
        up=tuple(blocked("Q5_0", 64, 256) for _ in range(5)),
        down=tuple(blocked("Q8_0", 256, 64) for _ in range(5)),
    )
    h = (numbers(23, 256) * 0.1).to(dtype)
    ids, mix = moe.route(numbers(23, 5, seed=4), 3)
    y = products.experts(h, ids, mix, w)
    wanted = moe.experts(h, ids, mix, w)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert float((y - wanted).norm() / wanted.norm()) < limit
    alone = [products.experts(h[t : t + 1], ids[t : t + 1], mix[t : t + 1], w) for t in range(23)]
    assert torch.equal(torch.cat(alone), y)


def test_an_expert_that_is_not_there(products: cpu.CpuProducts) -> None:
    one = (numbers(4, 8),)
    w = ExpertWeights(gate=one, up=one, down=(numbers(8, 4),))
    with pytest.raises(IndexError):
        products.experts(numbers(1, 8), torch.tensor([[1]]), torch.ones(1, 1), w)


def test_a_weight_that_was_freed_is_forgotten() -> None:
    products = cpu.CpuProducts(1)
    x = numbers(2, 32)
    for seed in range(50):
        w = numbers(8, 32, seed=seed)
        assert torch.allclose(products.matmul(x, w, torch.float32), x @ w.t(), atol=1e-4)
        del w


def test_other_formats_go_to_the_reference(products: cpu.CpuProducts) -> None:
    w = dataclasses.replace(blocked("Q8_0", 5, 64), format=formats.Q8_0)
    q2 = formats.by_name("Q2_K")
    assert q2 is not None
    data = torch.zeros(5, q2.row_bytes(256), dtype=torch.uint8)
    assert torch.equal(
        products.matmul(
            numbers(3, 256), QuantTensor(format=q2, data_RB=data, cols=256), torch.float32
        ),
        torch.zeros(3, 5),
    )
    assert products.matmul(numbers(3, 64), w, torch.float32).shape == (3, 5)
