"""A weight written out once gives the bits that decoding it in every tile gives.

The order of sums is the card's own: the interpreter multiplies tiles with the host's BLAS, whose order
hangs on the processor and the tile. There the numbers are whole ones, whose sums are exact in any order.
"""

import pytest
import torch
from triton_inputs import DEVICE, Random

pytest.importorskip("triton")

from civetta.kernels.matmul import dense
from civetta.kernels.matmul.triton import counters, product
from civetta.kernels.packed import pack

F16, F32 = torch.float16, torch.float32
EXACT = DEVICE == "cpu"


def both(x, w, n, monkeypatch, dtype=F32, **named):
    """The product with the weight packed, and with it written out: y rows strided and poisoned."""
    found = []
    for least in (1 << 30, 1):
        monkeypatch.setattr(dense, "LEAST_ROWS", least)
        y = torch.full((len(x), n + 3), float("nan"), dtype=dtype, device=DEVICE)
        product(x, w, y[:, :n], counters(torch.device(DEVICE)), **named)
        assert y[:, n:].isnan().all()
        found.append(y[:, :n])
    return found


@pytest.fixture(params=["pointers", "descriptors"])
def loads(request, monkeypatch):
    """How the product loads what is written out; the other kernel is not to be called."""
    described = request.param == "descriptors"
    if described and DEVICE != "cpu" and not dense.has_descriptors(torch.device(DEVICE)):
        pytest.skip("this GPU has no tensor descriptors")
    monkeypatch.setattr(dense, "has_descriptors", lambda _: described)
    monkeypatch.setattr(dense, "dense_kernel" if described else "described_kernel", None)


def drawn(random, *shape):
    return (random.whole if EXACT else random.normal)(*shape, dtype=F16).to(DEVICE)


@pytest.mark.parametrize(
    ("name", "n", "k", "pair"),
    [("Q8_0", 130, 320, False), ("Q4_K", 48, 1024, True), ("Q8_0", 2112, 96, False)],
)
def test_the_bits_are_those_of_the_packed_weight(name, n, k, pair, loads, monkeypatch):
    random = Random(5)
    w = pack(random.stored(name, n, k, step=1.0 if EXACT else None), F16, DEVICE, pair=pair)
    x = drawn(random, 130, k + 8)[:, :k]  # what lies behind a row's end is not read
    packed, written = both(x, w, n // 2 if pair else n, monkeypatch)
    assert torch.equal(packed, written)
    assert written.isfinite().all()


def test_plain_numbers_in_parts_squeezed(loads, monkeypatch):
    random = Random(6)
    w = pack(drawn(random, 64, 840), F16, DEVICE)
    x = drawn(random, 131, 840)
    packed, written = both(x, w, 64, monkeypatch, F16, act="squeeze", act_divisor=4.0)
    assert torch.equal(packed, written)


def test_rows_that_no_descriptor_takes_are_loaded_by_pointers(monkeypatch):
    monkeypatch.setattr(dense, "has_descriptors", lambda _: True)
    x = torch.zeros(4, 136, dtype=F16)
    assert dense.describes(x[:, :128], x)
    assert not dense.describes(x[:, 1:129], x), "a first number beside 16 bytes"
    assert not dense.describes(x[:, ::2], x), "numbers of a row apart"
    assert not dense.describes(x, torch.zeros(64, 100, dtype=F16)), "rows beside 16 bytes"


def test_what_is_written_out():
    w = pack(Random(7).stored("Q8_0", 64, 256), F16, "cpu")
    assert dense.pays(w, 4096, F16)
    assert not dense.pays(w, 1000, F16)
    assert not dense.pays(w, 4096, F32)
