"""Pairs of float16 and raised codes, NVIDIA's alone: the kernel runs in the interpreter, its lines of
assembly as this file understands them."""

import re

import numpy as np
import pytest
import torch
from triton_inputs import DEVICE, Random, relative_error

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from civetta.kernels.dequant.reference import dequantize
from civetta.kernels.matmul import tiling
from civetta.kernels.matmul import triton as matmul
from civetta.kernels.packed import pack, pack_stack
from civetta.kernels.packed_fields import RECIPES

if DEVICE == "cuda":
    pytest.skip("the card's assembler is the judge there", allow_module_level=True)

U32 = np.uint32


def _halves(x):
    return np.ascontiguousarray(x).view(np.float16).reshape(*x.shape, 2).astype(np.float64)


def _word(x):
    return np.ascontiguousarray(x.astype(np.float16)).view(U32).reshape(x.shape[:-1])


def _prmt(a, b, selector):
    source = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(a.shape, np.uint64)
    for i in range(4):
        byte = (int(selector) >> (4 * i)) & 15
        assert byte < 8
        out |= ((source >> np.uint64(8 * byte)) & np.uint64(255)) << np.uint64(8 * i)
    return out.astype(U32)


def _lop3(a, b, c, table):
    assert int(table) == 0xEA  # a and b, or c
    return (a & b) | c


OPS = {
    "mov.b32": lambda a: a,
    "prmt.b32": _prmt,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": _lop3,
    "add.f16x2": lambda a, b: _word(_halves(a) + _halves(b)),
    "mul.f16x2": lambda a, b: _word(_halves(a) * _halves(b)),
    "fma.rn.f16x2": lambda a, b, c: _word(_halves(a) * _halves(b) + _halves(c)),
}


def assembled(asm, constraints, args, dtype, is_pure, pack):
    """`tl.inline_asm_elementwise` for these operations, on the interpreter's tensors."""
    assert is_pure
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    arrays = np.broadcast_arrays(*(a.handle.data for a in args))
    shape = arrays[0].shape
    registers = {}
    at = len(kinds)
    for x in arrays:
        for i in range(pack):
            registers[f"${at}"] = np.ascontiguousarray(x[..., i::pack]).view(U32)
            at += 1
    assert constraints.count(",") + 1 == at
    one = next(iter(registers.values()))

    def value(text):
        if text in registers:
            return registers[text]
        return np.full(one.shape, int(text, 0), U32)

    for line in re.sub(r"[{}]|\.reg \.b32 [^;]*;", "", asm).split(";"):
        if not line.strip():
            continue
        op, rest = line.strip().split(" ", 1)
        to, *sources = (part.strip() for part in rest.split(","))
        constant = op in {"prmt.b32", "lop3.b32"}
        values = [value(s) for s in sources[: -1 if constant else None]]
        with np.errstate(all="ignore"):
            registers[to] = OPS[op](*values, *([int(sources[-1], 0)] if constant else []))
    out = []
    for i, kind in enumerate(kinds):
        word = registers[f"${i}"]
        if pack == 2:
            data, kind_of = np.ascontiguousarray(word).view(np.float16).reshape(shape), tl.float16
        else:
            data, kind_of = word.view(np.int32).reshape(shape), tl.int32
        assert kind == kind_of
        out.append(tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(shape))))
    return tuple(out) if isinstance(dtype, tuple) else out[0]


@pytest.fixture
def nvidia(monkeypatch):
    """Recipes as on an NVIDIA card; lines of assembly carried out on the host."""
    monkeypatch.setattr(tl, "inline_asm_elementwise", assembled)

    def recipe_on(recipe, device, dtype):
        del device
        if recipe in tiling.PAIRED and dtype == torch.float16:
            return tiling.replace(recipe, code=f"{recipe.code} pairs")
        return tiling.replace(recipe, code="linear raised") if recipe in tiling.RAISED else recipe

    monkeypatch.setattr(matmul, "recipe_on", recipe_on)


def weights_of(w, cols):
    """A packed weight's numbers, one column at a time: products with rows of the identity."""
    eye = torch.eye(cols, dtype=torch.float16, device=DEVICE)
    y = torch.full((cols, w.rows), float("nan"), device=DEVICE)
    matmul.product(eye, w, y, matmul.counters(torch.device(DEVICE)))
    return y.T


def rounded(x):
    return x.half().float()


@pytest.mark.usefixtures("nvidia")
def test_bytes_in_pairs_are_the_numbers_that_float32_rounds_to():
    stored = Random(1).stored("Q8_0", 70, 128)
    got = weights_of(pack(stored, torch.float16, DEVICE), 128)
    assert torch.equal(got, rounded(dequantize(stored, torch.float32)))


@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize("name", ["Q5_1", "Q5_K"])
def test_raised_codes_are_the_numbers_that_float32_rounds_to_but_for_ties(name):
    stored = Random(2).stored(name, 70, 256)
    got = weights_of(pack(stored, torch.float16, DEVICE), 256)
    want = dequantize(stored, torch.float32)
    assert float((got != rounded(want)).float().mean()) < 0.02
    assert (
        float(((got - want).abs() - (rounded(want) - want).abs()).max() / want.abs().max()) < 2e-5
    )


@pytest.mark.usefixtures("nvidia")
def test_nibbles_in_pairs_are_within_two_roundings():
    stored = Random(3).stored("Q4_K", 70, 256)
    got = weights_of(pack(stored, torch.float16, DEVICE), 256)
    want = dequantize(stored, torch.float32)
    stored.data_RB.view(70, -1, 144)[:, :, 16:] = 0  # codes; what is left of values is their low
    low = dequantize(stored, torch.float32)
    bound = 2.0**-11 * (low.abs() + want.abs()) * (1 + 2**-9) + 2.0**-24
    assert bool(((got - want).abs() <= bound).all())
    assert relative_error(got, want) < 4e-4


@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q5_1"])
def test_stacked_pairs_of_rows_are_decoded_in_pairs_too(name):
    random = Random(4)
    stored = [random.stored(name, 48, 256) for _ in range(3)]
    stack = pack_stack(stored, torch.float16, DEVICE)
    x, ids = random.normal(2, 256, dtype=torch.float16), torch.tensor([2, 0])
    got = torch.full((2, 48), float("nan"), device=DEVICE)
    matmul.product(x.to(DEVICE), stack, got, None, experts_M=ids.to(DEVICE))
    want = torch.stack([dequantize(stored[e], torch.float32).double() @ x[i].double()
                        for i, e in enumerate(ids.tolist())])  # fmt: skip
    assert relative_error(got, want) < 1e-3


def test_only_these_formats_are_decoded_so():
    assert {n for n, r in RECIPES.items() if r in tiling.PAIRED} == {"Q8_0", "Q4_K"}
    assert {n for n, r in RECIPES.items() if r in tiling.RAISED} == {"Q5_1", "Q5_K"}
