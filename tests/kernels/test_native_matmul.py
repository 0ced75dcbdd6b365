"""The extension below its wrapper: shapes that do not divide, memory it must not touch, threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from civetta.checkpoint import formats
from civetta.checkpoint.quant import QuantTensor
from civetta.kernels import cpu
from civetta.kernels.dequant.reference import dequantize
from civetta.kernels.ops import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the extension was not built")

HALF_FIELDS = {  # where half-precision numbers lie in a block; random bits there would be NaN
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
}
TENSOR_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FORMATS = (*TENSOR_TYPES, *HALF_FIELDS, "IQ1_M", "MXFP4", "GGML_NVFP4", "F8_E4M3", "NVFP4")
FUSED = ("avx512", "avx2", "neon")


def random_weight(name: str, rows: int, cols: int, seed: int = 0) -> QuantTensor:
    """Random bytes in a format, scales (in blocks) with both signs and several magnitudes."""
    random = np.random.default_rng((seed, rows, cols))
    fmt = formats.by_name(name)
    assert fmt is not None
    data = random.integers(0, 256, (rows, fmt.row_bytes(cols)), dtype=np.uint8)
    scale = scale_2 = None
    if name in TENSOR_TYPES:
        values = torch.from_numpy(random.standard_normal((rows, cols), dtype=np.float32))
        return stored(fmt, values.to(TENSOR_TYPES[name]).view(torch.uint8), cols)
    if name == "F8_E4M3":
        data[(data & 127) == 127] = 0x3A
        grid = (-(-rows // 128), -(-cols // 128))
        scale = torch.from_numpy(random.uniform(0.1, 2, grid).astype(np.float32)).bfloat16()
    elif name == "NVFP4":
        scale = torch.from_numpy(random.integers(0, 126, (rows, cols // 16), dtype=np.uint8))
        scale_2 = torch.tensor(0.013)
    blocks = data.reshape(-1, fmt.block_bytes)
    for place in HALF_FIELDS.get(name, ()):
        halves = random.uniform(-0.1, 0.1, (len(blocks), 1)).astype(np.float16)
        blocks[:, place : place + 2] = halves.view(np.uint8)
    if name == "IQ1_M":  # a nibble of the half-precision step on top of each of four words
        blocks[:, 49:56:2] = (blocks[:, 49:56:2] & 15) | np.array(
            [0x10, 0x60, 0xD0, 0x20], np.uint8
        )
    elif name == "MXFP4":
        blocks[:, 0] = 100 + blocks[:, 0] % 40  # exponents
    return stored(fmt, torch.from_numpy(data), cols, scale=scale, scale_2=scale_2)


def stored(
    fmt: formats.QuantFormat,
    data_RB: torch.Tensor,
    cols: int,
    *,
    scale: torch.Tensor | None = None,
    scale_2: torch.Tensor | None = None,
) -> QuantTensor:
    return QuantTensor(format=fmt, data_RB=data_RB, cols=cols, scale=scale, scale_2=scale_2)


def normal(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    random = np.random.default_rng((seed, rows, cols))
    return torch.from_numpy(random.standard_normal((rows, cols), dtype=np.float32))


def available_instructions() -> list[str]:
    if not cpu.available():
        return []
    from civetta.kernels import _native

    found = []
    for name in (*FUSED, "generic"):
        try:
            _native.use_instructions(name)
        except ValueError:
            continue
        found.append(name)
    _native.use_instructions("")
    return found


@pytest.fixture(params=available_instructions())
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    from civetta.kernels import _native

    _native.use_instructions(request.param)
    yield request.param
    _native.use_instructions("")


@pytest.fixture
def products() -> cpu.CpuProducts:
    return cpu.CpuProducts(2)


def worst_error(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """Largest error of a dot product, relative to the sum of its terms' magnitudes."""
    wanted = x.double() @ w.double().t()
    scale = x.double().abs() @ w.double().abs().t()
    return float(((y.double() - wanted).abs() / scale.clamp_min(1e-30)).max())


@pytest.mark.parametrize("name", FORMATS)
def test_decodes_as_the_reference(instructions: str, products: cpu.CpuProducts, name: str) -> None:
    """Unit rows pick single weights: all but the sign of zero must be the reference's bits."""
    w = random_weight(name, 11, 768)
    y = products.matmul(torch.eye(768), w, torch.float32)
    assert torch.equal(y.t(), dequantize(w))
    rounded = products.matmul(torch.eye(768, dtype=torch.bfloat16), w, torch.float32)
    assert torch.equal(rounded.t(), dequantize(w).bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_any_height_gives_a_row_the_same_bits(
    instructions: str, products: cpu.CpuProducts, name: str, dtype: torch.dtype
) -> None:
    """Heights 1 to 3, tiles, and more rows than one cache block take different code."""
    w = random_weight(name, 21, 768)
    x = normal(203, 768).to(dtype)
    whole = products.matmul(x, w, torch.float32)
    assert worst_error(whole, x, dequantize(w).to(dtype)) < 2e-6
    for start, rows in ((0, 1), (202, 1), (100, 1), (7, 2), (200, 3), (96, 4), (3, 97), (0, 110)):
        part = products.matmul(x[start : start + rows], w, torch.float32)
        assert torch.equal(part, whole[start : start + rows]), (start, rows)


@pytest.mark.parametrize("cols", [1, 2, 15, 16, 17, 31, 33, 130, 511, 513, 1040])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "F8_E4M3"])
def test_any_width(instructions: str, products: cpu.CpuProducts, name: str, cols: int) -> None:
    w = random_weight(name, 9, cols)
    x = normal(14, cols)
    y = products.matmul(x, w, torch.float32)
    assert worst_error(y, x, dequantize(w)) < 1e-6
    alone = [products.matmul(x[t : t + 1], w, torch.float32) for t in range(14)]
    assert torch.equal(torch.cat(alone), y)


def test_every_block_format_is_compiled() -> None:
    from civetta.kernels import _native

    assert {f.name for f in formats.BLOCK_FORMATS} <= set(_native.FORMATS) == set(FORMATS)


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F])
@pytest.mark.parametrize("fmt", formats.BLOCK_FORMATS, ids=lambda f: f.name)
def test_uniform_bytes_decode_as_the_reference(
    instructions: str, products: cpu.CpuProducts, fmt: formats.QuantFormat, byte: int
) -> None:
    """The first and last code of every table, every sign, the special scales."""
    cols = fmt.block_values
    data = torch.full((3, fmt.block_bytes), byte, dtype=torch.uint8)
    for place in HALF_FIELDS.get(fmt.name, ()):
        data[:, place : place + 2] = torch.tensor([0, 0x3C])  # 1 in half precision
    if fmt.name == "IQ1_M":
        data[:, 49:56:2] = data[:, 49:56:2] & 15 | torch.tensor([0, 0, 0xC0, 0x30])
    elif fmt is formats.MXFP4:
        data[:, 0] = byte & 0x7F  # the largest exponents give infinities
    w = stored(fmt, data, cols)
    found = products.matmul(torch.eye(cols), w, torch.float32)
    assert torch.equal(found.t(), dequantize(w))


@pytest.mark.parametrize("cols", [32, 96, 544, 640])
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4"])
def test_whole_blocks_that_are_no_whole_chunk(
    instructions: str, products: cpu.CpuProducts, name: str, cols: int
) -> None:
    w = random_weight(name, 7, cols)
    x = normal(6, cols)
    y = products.matmul(x, w, torch.float32)
    assert worst_error(y, x, dequantize(w)) < 1e-6
    assert torch.equal(products.matmul(x[:1], w, torch.float32), y[:1])


@pytest.mark.skipif(len(available_instructions()) < 3, reason="one fused instruction set only")
def test_fused_instruction_sets_agree_to_the_bit(products: cpu.CpuProducts) -> None:
    from civetta.kernels import _native

    found: list[list[torch.Tensor]] = []
    for name in available_instructions():
        if name not in FUSED:
            continue
        _native.use_instructions(name)
        found.append(
            [
                products.matmul(normal(rows, 768), random_weight(fmt, 19, 768), torch.float32)
                for fmt in FORMATS
                for rows in (1, 5)
            ]
        )
    _native.use_instructions("")
    for one, other in zip(found[0], found[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [1, 3, 5, 120])
def test_writes_its_rows_and_nothing_else(rows: int) -> None:
    from civetta.kernels import _native

    w, x = normal(13, 48), normal(rows, 48)
    matrix = _native.Matrix("F32", 13, 48, w.data_ptr(), 48 * 4, 0, 0, 1.0, 0)
    for dtype in (torch.float32, torch.bfloat16):
        y = torch.full((rows + 2, 20), float("nan"), dtype=dtype)
        bf16 = dtype == torch.bfloat16
        _native.matmul(matrix, x.data_ptr(), 48, False, rows, y[1].data_ptr(), 20, bf16)
        assert torch.isfinite(y[1:-1, :13]).all()
        assert torch.isnan(y[0]).all()
        assert torch.isnan(y[-1]).all()
        assert torch.isnan(y[:, 13:]).all()


def test_reads_its_columns_and_nothing_else(products: cpu.CpuProducts) -> None:
    """Between the rows lie NaN, in x, in plain weights, in stored ones at an odd address."""
    x_wide = torch.full((20, 64), float("nan"))
    x_wide[:, :37] = normal(20, 37)
    w_wide = torch.full((12, 50), float("nan"))
    w_wide[:, :37] = normal(12, 37)
    x, w = x_wide[:, :37], w_wide[:, :37]
    y = products.matmul(x, w, torch.float32)
    assert worst_error(y, x, w) < 1e-6
    q = random_weight("Q8_0", 12, 64)
    bytes_wide = torch.full((12, q.data_RB.shape[1] + 3), 255, dtype=torch.uint8)
    bytes_wide[:, 1:-2] = q.data_RB
    moved = stored(q.format, bytes_wide[:, 1:-2], 64)
    x = normal(5, 64)
    assert torch.equal(
        products.matmul(x, moved, torch.float32), products.matmul(x, q, torch.float32)
    )


def test_columns_may_be_anywhere(products: cpu.CpuProducts) -> None:
    x, w = normal(40, 9).t(), normal(5, 40)
    y = products.matmul(x, w, torch.float32)
    assert torch.equal(y, products.matmul(x.contiguous(), w, torch.float32))
    turned = normal(40, 5).t()  # weights by columns go to the reference
    assert worst_error(products.matmul(x, turned, torch.float32), x, turned) < 1e-6


def test_more_rows_than_one_launch(products: cpu.CpuProducts) -> None:
    x, w = normal(1100, 64), random_weight("Q4_0", 20, 64)
    y = products.matmul(x, w, torch.float32)
    assert worst_error(y, x, dequantize(w)) < 1e-6
    for t in (0, 1023, 1024, 1099):
        assert torch.equal(products.matmul(x[t : t + 1], w, torch.float32), y[t : t + 1])


def test_no_rows(products: cpu.CpuProducts) -> None:
    w = random_weight("Q4_K", 6, 256)
    assert products.matmul(normal(3, 256)[:0], w, torch.float32).shape == (0, 6)
    assert products.matmul(normal(3, 256)[:0], w, torch.bfloat16).shape == (0, 6)


def test_broken_numbers_stay_visible(products: cpu.CpuProducts) -> None:
    """NaN and infinity in x or in FP8 weights reach their row or column, and no other."""
    w = random_weight("F8_E4M3", 10, 256)
    w.data_RB[4, 100] = 0x7F
    x = normal(6, 256)
    x[2, 0] = float("nan")
    for dtype in (torch.float32, torch.bfloat16):
        y = products.matmul(x.to(dtype), w, dtype)
        bad = torch.isnan(y)
        assert bad[2].all()
        assert bad[:, 4].all()
        assert int(bad.sum()) == 10 + 6 - 1


def test_fp8_slices_keep_their_scales(products: cpu.CpuProducts) -> None:
    w = random_weight("F8_E4M3", 300, 256)
    x = normal(4, 256)
    whole = products.matmul(x, w, torch.float32)
    part = products.matmul(x, w.slice_rows(100, 270), torch.float32)
    assert torch.equal(part, whole[:, 100:270])


def plain_experts(w: ExpertWeights, h: torch.Tensor, ids: torch.Tensor, mix: torch.Tensor):
    """Float64 throughout: no rounding but the operands' own."""
    y = torch.zeros(h.shape[0], w.down[0].shape[0], dtype=torch.float64)
    for t in range(h.shape[0]):
        for m in range(ids.shape[1]):
            e = int(ids[t, m])
            gate, up, down = (dequantize(side[e]).double() for side in (w.gate, w.up, w.down))
            hidden = torch.nn.functional.silu(gate @ h[t].double()) * (up @ h[t].double())
            y[t] += float(mix[t, m]) * (down @ hidden)
    return y


def some_experts(count: int, width: int, hidden: int) -> ExpertWeights:
    return ExpertWeights(
        gate=tuple(random_weight("Q4_K", hidden, width, seed=e) for e in range(count)),
        up=tuple(random_weight("Q8_0", hidden, width, seed=e + 50) for e in range(count)),
        down=tuple(random_weight("Q5_1", width, hidden, seed=e + 90) for e in range(count)),
    )


def test_experts_equal_a_plain_loop(instructions: str, products: cpu.CpuProducts) -> None:
    w = some_experts(6, 256, 96)
    h = normal(150, 256) * 0.05
    random = np.random.default_rng(7)
    ids = torch.from_numpy(np.stack([random.permutation(6)[:3] for _ in range(150)]))
    ids[:120, 0] = 2  # one expert with more rows than a cache block
    mix = torch.from_numpy(random.uniform(0, 1, (150, 3)).astype(np.float32))
    y = products.experts(h, ids, mix, w)
    wanted = plain_experts(w, h[:20], ids[:20], mix[:20])
    assert float((y[:20] - wanted).norm() / wanted.norm()) < 1e-6
    for t in (0, 60, 149):
        alone = products.experts(h[t : t + 1], ids[t : t + 1], mix[t : t + 1], w)
        assert torch.equal(alone, y[t : t + 1])
    back = products.experts(h.flip(0), ids.flip(0), mix.flip(0), w)
    assert torch.equal(back.flip(0), y)


def test_silu_at_the_ends(products: cpu.CpuProducts) -> None:
    """One expert whose matrices are units shows silu(h) * h itself."""
    unit = (torch.eye(16),)
    w = ExpertWeights(gate=unit, up=unit, down=unit)
    h = torch.tensor([[0, 1e-30, 1, -1, 20, -20, 87, -87, 88, -88, 95, -95, 2.5, -0.1, 1e4, -1e4]])
    y = products.experts(h, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), w)
    wanted = torch.nn.functional.silu(h.double()) * h.double()
    assert torch.allclose(y.double(), wanted, rtol=3e-7, atol=1e-28)
    broken = products.experts(
        torch.full((1, 16), float("nan")), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), w
    )
    assert torch.isnan(broken).all()


@pytest.mark.parametrize("wrong", [-1, 3, 1 << 40])
def test_unknown_experts_are_refused(products: cpu.CpuProducts, wrong: int) -> None:
    w = some_experts(3, 256, 32)
    with pytest.raises(IndexError, match=f"expert {wrong} of 3"):
        products.experts(normal(1, 256), torch.tensor([[wrong]]), torch.ones(1, 1), w)


def test_experts_of_unlike_shapes_are_refused(products: cpu.CpuProducts) -> None:
    w = ExpertWeights(
        gate=(normal(4, 8), normal(4, 8)),
        up=(normal(4, 8), normal(5, 8)),
        down=(normal(8, 4), normal(8, 4)),
    )
    with pytest.raises(ValueError, match="one shape"):
        products.experts(normal(1, 8), torch.tensor([[0]]), torch.ones(1, 1), w)


def test_descriptors_go_with_their_weights(products: cpu.CpuProducts) -> None:
    q, plain, w = random_weight("Q8_0", 4, 64), normal(4, 64), some_experts(2, 256, 32)
    products.matmul(normal(1, 64), q, torch.float32)
    products.matmul(normal(1, 64), plain, torch.float32)
    products.experts(normal(1, 256), torch.tensor([[1]]), torch.ones(1, 1), w)
    alive = [weakref.ref(q), weakref.ref(plain), weakref.ref(w)]
    assert len(products._known) == 2
    assert len(products._known_experts) == 1
    del q, plain, w
    gc.collect()
    assert [a() for a in alive] == [None] * 3
    assert not products._known
    assert not products._known_experts


def test_a_tensor_that_moved_is_read_where_it_is(products: cpu.CpuProducts) -> None:
    x, w = normal(2, 32), normal(4, 32)
    products.matmul(x, w, torch.float32)
    w.data = normal(4, 32, seed=9)
    y = products.matmul(x, w, torch.float32)
    assert torch.equal(y, products.matmul(x, normal(4, 32, seed=9), torch.float32))


def test_callers_in_several_threads(products: cpu.CpuProducts) -> None:
    w = random_weight("Q8_0", 256, 512)
    x = normal(8, 512)
    wanted = products.matmul(x, w, torch.float32)
    wrong: list[int] = []

    def call(_: int) -> None:
        for i in range(40):
            if not torch.equal(products.matmul(x, w, torch.float32), wanted):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FORKS = """
import os, sys
import torch
from civetta.kernels import cpu
products = cpu.CpuProducts(3)
x, w = torch.ones(9, 512), torch.ones(400, 512)
assert products.matmul(x, w, torch.float32).eq(512).all()
child = os.fork()
if child == 0:
    os._exit(0 if products.matmul(x, w, torch.float32).eq(512).all() else 1)
assert os.waitpid(child, 0)[1] == 0
assert products.matmul(x, w, torch.float32).eq(512).all()
"""

LATE = """
import atexit
import torch
from civetta.kernels import cpu

def last():
    print(products.matmul(x, w, torch.float32).eq(512).all().item())

atexit.register(last)
products = cpu.CpuProducts(4)
x, w = torch.ones(9, 512), torch.ones(400, 512)
products.matmul(x, w, torch.float32)
"""


@pytest.mark.parametrize(("script", "output"), [(FORKS, ""), (LATE, "True\n")])
def test_forks_and_exits(script: str, output: str) -> None:
    quiet = ["-W", "ignore::DeprecationWarning"]  # from 3.12 on a fork beside threads is warned of
    command = [sys.executable, *quiet, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, output, "")


def test_thread_count_is_a_setting_and_no_result() -> None:
    from civetta.kernels import _native

    x, w = normal(130, 512), random_weight("Q4_0", 200, 512)
    found = []
    for threads in (1, 2, 5, 3):
        products = cpu.CpuProducts(threads)
        assert _native.get_threads() == threads
        found.append(products.matmul(x, w, torch.float32))
    assert all(torch.equal(found[0], y) for y in found[1:])
