"""Reference decoders: block types bit for bit against gguf, FP8 and NVFP4 against scalar code."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch

from civetta.checkpoint import formats
from civetta.checkpoint.formats import F8_E4M3, NVFP4, QuantFormat
from civetta.checkpoint.quant import QuantTensor
from civetta.errors import TensorTypeUnknown
from civetta.kernels.dequant import grids
from civetta.kernels.dequant.reference import dequantize, dequantize_rows

ROWS, BLOCKS = 24, 3
GGML = (*formats.BLOCK_FORMATS, formats.F32, formats.F16, formats.BF16)

# where a block keeps its float16 scales; the rest of a block may be any bytes
HALVES_AT = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    **dict.fromkeys(("MXFP4", "GGML_NVFP4", "IQ1_M"), ()),  # exponents, bytes, scattered nibbles
}
# zero, subnormals, the smallest normal, one, the largest, and each of them negative
EXTREMES = np.array(
    [
        sign | bits
        for sign in (0, 0x8000)
        for bits in (0, 1, 0x0155, 0x03FF, 0x0400, 0x3C00, 0x7BFF)
    ],
    np.uint16,
)


def set_halves(fmt: QuantFormat, data: np.ndarray, halves: np.ndarray) -> None:
    """Write float16 bit patterns [blocks, 2] where the format has its scales."""
    for place, at in enumerate(HALVES_AT[fmt.name]):
        data[:, at : at + 2] = halves[:, place : place + 1].view(np.uint8)
    if fmt.name == "IQ1_M":  # a nibble of d at the top of each of the last four words
        for word in range(4):
            nibble = (halves[:, 0] >> np.uint16(4 * word)) & np.uint16(15)
            at = 49 + 2 * word
            data[:, at] = (data[:, at] & 15) | (nibble << 4).astype(np.uint8)


def random_blocks(fmt: QuantFormat, halves: np.ndarray) -> np.ndarray:
    """Random bytes with the given scales: uint8 [len(halves), block_bytes]."""
    rng = np.random.default_rng(sum(fmt.name.encode()))
    data = rng.integers(0, 256, (len(halves), fmt.block_bytes), np.uint8)
    set_halves(fmt, data, halves)
    return data


def finite_blocks(fmt: QuantFormat, count: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    halves = rng.normal(0, 0.02, (count, 2)).astype(np.float16).view(np.uint16)
    data = random_blocks(fmt, halves)
    if fmt is formats.MXFP4:
        data[:, 0] = rng.integers(0, 252, count)  # above, 12 * 2^(e - 128) is infinite
    return data


def as_tensor(fmt: QuantFormat, data: np.ndarray, rows: int) -> QuantTensor:
    blocks_a_row = data.size // fmt.block_bytes // rows
    data_RB = torch.from_numpy(data.reshape(rows, -1).copy())
    return QuantTensor(format=fmt, data_RB=data_RB, cols=blocks_a_row * fmt.block_values)


def oracle(q: QuantTensor) -> np.ndarray:
    kind = gguf.GGMLQuantizationType(q.format.ggml_type)
    with np.errstate(over="ignore"):  # the largest MXFP4 exponents
        return gguf.quants.dequantize(q.data_RB.numpy(), kind)


def assert_same_bits(got: torch.Tensor, wanted: np.ndarray) -> None:
    assert got.dtype == torch.float32
    assert wanted.dtype == np.float32
    assert got.shape == wanted.shape
    assert np.array_equal(got.numpy().view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("fmt", formats.BLOCK_FORMATS, ids=lambda f: f.name)
def test_random_blocks_equal_gguf(fmt: QuantFormat) -> None:
    q = as_tensor(fmt, finite_blocks(fmt, ROWS * BLOCKS), ROWS)
    assert np.isfinite(oracle(q)).all()
    assert_same_bits(dequantize(q), oracle(q))


@pytest.mark.parametrize("fmt", formats.BLOCK_FORMATS, ids=lambda f: f.name)
def test_extreme_scales_equal_gguf(fmt: QuantFormat) -> None:
    pairs = np.stack(np.meshgrid(EXTREMES, EXTREMES), axis=-1).reshape(-1, 2)
    q = as_tensor(fmt, random_blocks(fmt, pairs), len(EXTREMES))
    assert_same_bits(dequantize(q), oracle(q))


@pytest.mark.parametrize("fmt", formats.BLOCK_FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F])
def test_uniform_bytes_equal_gguf(fmt: QuantFormat, byte: int) -> None:
    data = np.full((2, fmt.block_bytes), byte, np.uint8)
    set_halves(fmt, data, np.full((2, 2), 0x3C00, np.uint16))
    q = as_tensor(fmt, data, 1)
    assert_same_bits(dequantize(q), oracle(q))


@pytest.mark.parametrize("name", ["MXFP4", "GGML_NVFP4"])
def test_every_exponent_or_scale_code_equals_gguf(name: str) -> None:
    fmt = formats.by_name(name)
    assert fmt is not None
    data = finite_blocks(fmt, 256)
    data[:, 0] = np.arange(256)
    q = as_tensor(fmt, data, 256)
    assert_same_bits(dequantize(q), oracle(q))


@pytest.mark.parametrize("fmt", [formats.F32, formats.F16, formats.BF16], ids=lambda f: f.name)
def test_plain_floats_equal_gguf(fmt: QuantFormat) -> None:
    values = np.random.default_rng(2).normal(size=(5, 33)).astype(np.float32)
    values[0, :4] = [0.0, -0.0, 1e-5, 60_000]
    kind = gguf.GGMLQuantizationType(fmt.ggml_type)
    stored = gguf.quants.quantize(values, kind).view(np.uint8).reshape(5, -1)
    q = QuantTensor(format=fmt, data_RB=torch.from_numpy(stored), cols=33)
    assert_same_bits(dequantize(q), gguf.quants.dequantize(stored, kind))


def test_doubles_are_rounded_once() -> None:
    values = np.array([[1.0, 1 / 3, -1e300, 1e-300]])
    data_RB = torch.from_numpy(values.view(np.uint8))
    got = dequantize(QuantTensor(format=formats.F64, data_RB=data_RB, cols=4))
    assert got.tolist() == [[1.0, float(np.float32(1 / 3)), -math.inf, 0.0]]


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"])
def test_grids_equal_gguf(name: str) -> None:
    theirs = getattr(gguf.quants, name)
    theirs.init_grid()
    wanted = np.asarray(theirs.grid).reshape(theirs.grid_shape)
    assert np.array_equal(getattr(grids, name).points(), wanted)


def test_every_weight_format_is_decoded() -> None:
    for fmt in formats.ALL_FORMATS:
        cols = 2 * max(fmt.block_values, 16)
        data_RB = torch.zeros(3, fmt.row_bytes(cols), dtype=torch.uint8)
        scale = torch.zeros(3, cols // 16, dtype=torch.uint8) if fmt is NVFP4 else None
        q = QuantTensor(format=fmt, data_RB=data_RB, cols=cols, scale=scale)
        if fmt in formats.INTEGER_FORMATS:
            with pytest.raises(TensorTypeUnknown, match=f"stored as {fmt.name}"):
                dequantize(q)
        else:
            assert dequantize(q).shape == (3, cols)


@pytest.mark.parametrize("fmt", GGML, ids=lambda f: f.name)
def test_slices_and_gathers_equal_the_whole(fmt: QuantFormat) -> None:
    if fmt.block_values > 1:
        q = as_tensor(fmt, finite_blocks(fmt, 8 * 2), 8)
    else:
        values = torch.randn(8, 10, generator=torch.Generator().manual_seed(0))
        stored = values.to(
            {"F32": torch.float32, "F16": torch.float16}.get(fmt.name, torch.bfloat16)
        )
        q = QuantTensor(format=fmt, data_RB=stored.view(torch.uint8), cols=10)
    whole = dequantize(q)
    assert torch.equal(dequantize(q.slice_rows(3, 7)), whole[3:7])
    assert dequantize(q.slice_rows(2, 2)).shape == (0, q.cols)
    wide = torch.zeros(8, q.data_RB.shape[1] + 3, dtype=torch.uint8)
    wide[:, 1:-2] = q.data_RB  # rows that are strided and start at odd addresses
    strided = QuantTensor(format=fmt, data_RB=wide[:, 1:-2], cols=q.cols)
    assert torch.equal(dequantize(strided), whole)
    ids = torch.tensor([7, 0, 0, 5])
    assert torch.equal(dequantize_rows(q.data_RB[ids], fmt, q.cols), whole[ids])
    rounded = dequantize(q, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, whole.bfloat16())


# FP8 and NVFP4: slow scalar code from the definition of the number formats


def scalar_e4m3(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def scalar_e2m1(code: int) -> float:
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = code >> 1 & 3, code & 1
    if exponent == 0:
        return sign * mantissa * 0.5
    return sign * (1 + mantissa / 2) * 2.0 ** (exponent - 1)


def finite_codes(rows: int, cols: int) -> torch.Tensor:
    codes = np.random.default_rng(3).integers(0, 256, (rows, cols), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x3A
    return torch.from_numpy(codes)


def test_every_fp8_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    got = dequantize(QuantTensor(format=F8_E4M3, data_RB=codes, cols=256))[0]
    wanted = [scalar_e4m3(code) for code in range(256)]
    assert np.array_equal(got.numpy(), np.array(wanted, np.float32), equal_nan=True)
    assert got.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert math.copysign(1, got[0x80].item()) == -1
    torch_values = codes[0].view(torch.float8_e4m3fn).float()
    assert torch.equal(got.nan_to_num(), torch_values.nan_to_num())


@pytest.mark.parametrize(("rows", "cols"), [(256, 128), (300, 200), (1, 1), (129, 640)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_in_blocks_of_128(rows: int, cols: int, dtype: torch.dtype) -> None:
    codes = finite_codes(rows, cols)
    generator = torch.Generator().manual_seed(4)
    scale = torch.rand(-(-rows // 128), -(-cols // 128), generator=generator).to(dtype)
    q = QuantTensor(format=F8_E4M3, data_RB=codes, cols=cols, scale=scale)
    wanted = np.empty((rows, cols), np.float32)
    for i in range(rows):
        for j in range(cols):
            factor = np.float32(scale[i // 128, j // 128].item())
            wanted[i, j] = np.float32(scalar_e4m3(int(codes[i, j]))) * factor
    whole = dequantize(q)
    assert_same_bits(whole, wanted)
    for start, stop in ((0, rows), (rows // 3, rows), (rows - 1, rows), (rows // 2, rows // 2)):
        part = q.slice_rows(start, stop)
        assert torch.equal(dequantize(part), whole[start:stop])
        assert torch.equal(dequantize(part.slice_rows(0, stop - start)), whole[start:stop])


@pytest.mark.parametrize("shape", [(1,), ()])
def test_fp8_with_one_scale(shape: tuple[int, ...]) -> None:
    codes = finite_codes(4, 160)
    scale = torch.full(shape, 0.0123).bfloat16()
    factor = np.float32(scale.item())
    wanted = np.array([[scalar_e4m3(int(c)) for c in row] for row in codes], np.float32) * factor
    q = QuantTensor(format=F8_E4M3, data_RB=codes, cols=160, scale=scale)
    assert_same_bits(dequantize(q), wanted)
    assert_same_bits(dequantize_rows(codes, F8_E4M3, 160, scale=scale), wanted)
    assert_same_bits(dequantize(q.slice_rows(1, 3)), wanted[1:3])


def test_gathered_fp8_rows_take_no_block_scales() -> None:
    with pytest.raises(AssertionError, match="global scale"):
        dequantize_rows(finite_codes(2, 256), F8_E4M3, 256, scale=torch.ones(1, 2))


def nvfp4_case(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]:
    """Codes, scales, global scale, and the numbers by scalar code."""
    codes = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (rows, cols // 2), np.uint8))
    scale = finite_codes(rows, cols // 16)
    scale_2 = torch.tensor(0.00037)
    wanted = np.empty((rows, cols), np.float32)
    for i in range(rows):
        for j in range(cols):
            byte = int(codes[i, j // 2])
            code = byte >> 4 if j % 2 else byte & 15
            exact = scalar_e2m1(code) * scalar_e4m3(int(scale[i, j // 16]))
            wanted[i, j] = np.float32(exact) * np.float32(scale_2.item())
    return codes, scale, scale_2, wanted


def test_nvfp4() -> None:
    codes, scale, scale_2, wanted = nvfp4_case(9, 160)
    q = QuantTensor(format=NVFP4, data_RB=codes, cols=160, scale=scale, scale_2=scale_2)
    assert_same_bits(dequantize(q), wanted)
    assert_same_bits(dequantize(q.slice_rows(2, 7)), wanted[2:7])
    assert_same_bits(dequantize(q.slice_rows(2, 7).slice_rows(1, 3)), wanted[3:5])
    viewed = QuantTensor(
        format=NVFP4,
        data_RB=codes,
        cols=160,
        scale=scale.view(torch.float8_e4m3fn),
        scale_2=scale_2.view(1),
    )
    assert_same_bits(dequantize(viewed), wanted)


def test_nvfp4_rows_with_their_scales_behind_them() -> None:
    codes, scale, scale_2, wanted = nvfp4_case(6, 160)
    joined = torch.cat([codes, scale], dim=1)
    assert joined.shape == (6, 90)
    ids = torch.tensor([5, 1, 1, 0])
    got = dequantize_rows(joined[ids], NVFP4, 160, scale_2=scale_2)
    assert_same_bits(got, wanted[ids.numpy()])
    apart = dequantize_rows(codes[ids], NVFP4, 160, scale=scale[ids], scale_2=scale_2)
    assert torch.equal(apart, got)


def test_nvfp4_without_global_scale() -> None:
    codes, scale, _, _ = nvfp4_case(2, 32)
    q = QuantTensor(format=NVFP4, data_RB=codes, cols=32, scale=scale)
    one = QuantTensor(format=NVFP4, data_RB=codes, cols=32, scale=scale, scale_2=torch.ones(()))
    assert torch.equal(dequantize(q), dequantize(one))


def test_wrong_row_bytes_are_our_mistake() -> None:
    data_RB = torch.zeros(2, 33, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="row bytes"):
        dequantize(QuantTensor(format=formats.Q8_0, data_RB=data_RB, cols=32))
