"""Compiled row-local ops against the reference: odd widths, strided rows, poisoned outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from native_calls import (
    TOLERANCE,
    instruction_sets,
    numbers,
    poisoned,
    relative,
    same_bits_everywhere,
)

from civetta.kernels import cpu
from civetta.kernels.ops import HyperWeights
from civetta.kernels.select import REFERENCE, select

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the extension was not built")

DTYPES = [torch.float32, torch.bfloat16]
poison = pytest.fixture(autouse=True)(poisoned)


@pytest.fixture(params=instruction_sets())
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    from civetta.kernels import _native

    _native.use_instructions(request.param)
    yield request.param
    _native.use_instructions("")


@pytest.fixture(scope="module")
def ops():
    return select("cpu", 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 16, 17, 63, 256])
def test_rms_norm(instructions: str, ops, dtype: torch.dtype, width: int) -> None:
    x = numbers(19, 3, 2, width, dtype=dtype)[:, :, 1]
    gain, each = numbers(width, seed=1), numbers(3, width, seed=2)
    for g in (gain, each):
        found = ops.rms_norm(x, g, 1e-6)
        assert relative(found, REFERENCE.rms_norm(x, g, 1e-6)) < TOLERANCE[dtype]
        assert torch.equal(ops.rms_norm(x[7:8], g, 1e-6), found[7:8])
    flat = x[:, 0]
    assert torch.equal(ops.rms_norm(flat, gain, 1e-6), ops.rms_norm(x, gain, 1e-6)[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "half"), [(2, 1), (10, 3), (64, 32), (256, 32)])
def test_rope(instructions: str, ops, dtype: torch.dtype, width: int, half: int) -> None:
    x, angle = numbers(11, 5, width, dtype=dtype), numbers(11, half, seed=1)
    found = ops.rope(x, angle.cos(), angle.sin())
    wanted = REFERENCE.rope(x, angle.cos(), angle.sin())
    assert relative(found, wanted) < TOLERANCE[dtype]
    assert torch.equal(found[..., 2 * half :], x[..., 2 * half :])
    column = angle.t().contiguous().t()  # angles that lie by columns
    assert torch.equal(ops.rope(x, column.cos(), column.sin()), found)


def hyper(width: int, streams: int, rank: int, inject: bool) -> HyperWeights:
    wide = width * streams
    return HyperWeights(
        gain_SD=1 + 0.1 * numbers(streams, width, seed=1),
        down=numbers(rank, wide, seed=2) / wide**0.5,
        up=numbers(wide, rank, seed=3),
        inject=numbers(streams, wide, seed=4) / wide**0.5 if inject else None,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "streams", "rank"), [(7, 3, 5), (32, 4, 8), (48, 1, 17)])
def test_hyper_read(
    instructions: str, ops, dtype: torch.dtype, width: int, streams: int, rank: int
) -> None:
    x = numbers(530, streams, width)  # more rows than are held at one time
    for w in (hyper(width, streams, rank, True), hyper(width, streams, rank, False)):
        h, inject = ops.hyper_read(x, w, 1e-6, dtype)
        h_wanted, inject_wanted = REFERENCE.hyper_read(x, w, 1e-6, dtype)
        assert relative(h, h_wanted) < TOLERANCE[dtype]
        assert (inject is None) == (inject_wanted is None)
        if inject is not None:
            assert relative(inject, inject_wanted) < 2e-6
        for t in (0, 511, 512, 529):
            h_alone, inject_alone = ops.hyper_read(x[t : t + 1], w, 1e-6, dtype)
            assert torch.equal(h_alone, h[t : t + 1])
            assert inject is None or torch.equal(inject_alone, inject[t : t + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 40])
def test_hyper_write_and_swiglu(instructions: str, ops, dtype: torch.dtype, width: int) -> None:
    x, inject = numbers(21, 4, width), numbers(21, 4, seed=2)
    y = numbers(21, 2 * width, seed=1, dtype=dtype)[:, :width]
    assert torch.equal(ops.hyper_write(x, y, inject), REFERENCE.hyper_write(x, y, inject))
    up = numbers(21, width, seed=3, dtype=dtype)
    found = ops.swiglu(y, up)
    assert relative(found, REFERENCE.swiglu(y, up)) < TOLERANCE[dtype]
    assert torch.equal(ops.swiglu(y[20:], up[20:]), found[20:])


@pytest.mark.parametrize("width", [1, 9, 64])
def test_ngram_gate(instructions: str, ops, width: int) -> None:
    x, key = numbers(13, 3, width), numbers(13, 3, width, seed=1)
    value, query_gain = numbers(13, width, seed=2), numbers(3, width, seed=3)
    key_gain = numbers(3, width, seed=4)
    key[4] = 0.0  # a score of nothing
    arguments = (x, key, value, query_gain, key_gain, 1e-6)
    found = ops.ple_gate(*arguments)
    assert relative(found, REFERENCE.ple_gate(*arguments)) < 2e-6
    alone = ops.ple_gate(x[9:10], key[9:10], value[9:10], query_gain, key_gain, 1e-6)
    assert torch.equal(alone, found[9:10])


@pytest.mark.parametrize(("count", "slots"), [(1, 1), (9, 4), (16, 16), (67, 10)])
def test_router(instructions: str, ops, count: int, slots: int) -> None:
    logits = numbers(33, count)
    logits[5] = 0.0
    logits[6, (count + 1) // 2 :] = float("-inf")
    ids, weights = ops.route(logits, slots)
    ids_wanted, weights_wanted = REFERENCE.route(logits, slots)
    assert torch.equal(ids, ids_wanted)
    assert torch.allclose(weights, weights_wanted, rtol=2e-6, atol=1e-12)
    assert ids[5].tolist() == list(range(slots))
    alone = ops.route(logits[32:], slots)
    assert torch.equal(alone[0], ids[32:])
    assert torch.equal(alone[1], weights[32:])


def test_router_meets_broken_numbers_and_too_many_slots(ops) -> None:
    ids, weights = ops.route(torch.full((1, 6), float("nan")), 3)
    assert sorted(ids[0].tolist()) == [0, 1, 2]
    assert torch.isnan(weights).all()
    with pytest.raises(ValueError, match="more slots than experts"):
        ops.route(torch.zeros(1, 3), 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "half", "ratio"), [(5, 1, 3), (16, 4, 4), (128, 32, 4)])
def test_pooled_index_keys(
    instructions: str, ops, dtype: torch.dtype, width: int, half: int, ratio: int
) -> None:
    raw, gain = numbers(18, ratio, width, dtype=dtype), numbers(width, seed=1)
    angle = numbers(18, half, seed=2)
    arguments = (raw, gain, 1e-6, angle.cos(), angle.sin())
    found = ops.index_pool(*arguments)
    assert relative(found, REFERENCE.index_pool(*arguments)) < TOLERANCE[dtype]
    alone = ops.index_pool(raw[17:], gain, 1e-6, angle[17:].cos(), angle[17:].sin())
    assert torch.equal(alone, found[17:])


def test_instruction_sets_and_threads_agree(ops) -> None:
    x, w = numbers(70, 4, 40), hyper(40, 4, 8, True)
    same_bits_everywhere(lambda: ops.hyper_read(x, w, 1e-6, torch.float32)[0])
    same_bits_everywhere(lambda: ops.hyper_read(x, w, 1e-6, torch.bfloat16)[0])
    same_bits_everywhere(lambda: ops.rms_norm(x, w.gain_SD, 1e-6))
    same_bits_everywhere(lambda: ops.ple_gate(x, x + 1, x[:, 0], w.gain_SD, w.gain_SD, 1e-6))
    same_bits_everywhere(lambda: ops.route(x.flatten(1), 10)[1])
    same_bits_everywhere(lambda: ops.swiglu(x[:, 0], x[:, 1]))
