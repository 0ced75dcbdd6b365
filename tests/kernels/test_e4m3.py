"""E4M3 bytes as a GPU decodes them: by the card where it can, else by integers; all 256, bit for bit."""

import pytest
import torch
from triton_inputs import DEVICE, Random

pytest.importorskip("triton")

import triton
import triton.language as tl

from civetta.kernels.matmul import tiling
from civetta.kernels.matmul import triton as matmul
from civetta.kernels.matmul.tiles import _byte
from civetta.kernels.packed import pack
from civetta.kernels.packed_fields import RECIPES

KINDS = ("fp8 bits", "fp8")


@triton.jit
def bytes_kernel(words, values, KIND: tl.constexpr):
    i = tl.arange(0, 64)
    x = tl.load(words + i)
    for part in tl.static_range(4):
        tl.store(values + 4 * i + part, _byte(x, part, KIND))


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_in_every_place_of_a_word(kind):
    if kind == "fp8" and DEVICE == "cuda" and not tiling.converts_e4m3(torch.device(DEVICE)):
        pytest.skip("this card does not convert E4M3")
    codes = torch.arange(256, dtype=torch.uint8)
    for turn in range(4):
        turned = codes.roll(turn)
        got = torch.full((256,), -1.0, device=DEVICE)
        bytes_kernel[(1,)](turned.view(torch.int32).to(DEVICE), got, KIND=kind)
        want = turned.view(torch.float8_e4m3fn).float()
        if kind == "fp8 bits" or DEVICE == "cuda":  # the interpreter's own conversion knows no NaN
            assert got.isnan().cpu().equal(want.isnan())
        known = ~want.isnan()
        assert got.cpu()[known].view(torch.int32).equal(want[known].view(torch.int32))


@pytest.mark.parametrize("name", ["F8_E4M3", "NVFP4"])
def test_a_product_has_the_same_bits_either_way(name, monkeypatch):
    random, found = Random(21), []
    w, x = pack(random.stored(name, 70, 96), torch.float32, DEVICE), random.normal(3, 96)
    for native in (False, tiling.converts_e4m3(torch.device(DEVICE)) or DEVICE == "cpu"):
        monkeypatch.setattr(tiling, "converts_e4m3", lambda _, native=native: native)
        found.append(matmul.matmul(x.to(DEVICE), w, torch.float32))
    assert found[0].isfinite().all()
    assert found[0].equal(found[1])


def test_only_the_formats_with_e4m3_follow_the_device():
    changed = {
        name
        for name, r in RECIPES.items()
        if tiling.recipe_on(r, torch.device("cpu"), torch.float16) != r
    }
    assert changed == {"F8_E4M3", "NVFP4"}
    assert not tiling.converts_e4m3(torch.device("cpu"))
