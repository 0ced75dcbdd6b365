"""State that kernels find by address: places, rings, and copies through snapshots."""

from itertools import pairwise

import pytest
import torch

from civetta.state.device_state import PLACES, DeviceLayout, DeviceState, ring_of
from civetta.state.recurrent import REWIND_ROWS, RecurrentShape

SHAPE = RecurrentShape(
    layers=2,
    key_heads=1,
    value_heads=2,
    head_dim=4,
    channels=16,
    conv_rows=3,
    ple_width=8,
    ple_rows=9,
)


def test_parts_lie_apart_and_inside_the_block():
    layout = DeviceLayout(SHAPE, torch.bfloat16)
    parts = [part for layer in layout.gdn for part in layer.values()] + [layout.ple]
    spans = sorted((part.at, part.at + part.nbytes) for part in parts)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert spans[-1][1] <= layout.nbytes
    assert all(part.at % 256 == 0 for part in parts)


@pytest.mark.parametrize(("rows", "slots"), [(3, 16), (9, 32), (8, 16)])
def test_rings_hold_a_history_and_what_a_rewind_takes_back(rows, slots):
    assert ring_of(rows) == slots >= rows + REWIND_ROWS


@pytest.mark.parametrize(("base", "opened"), [(0, 0), (0, 79), (64, 3), (64, 79), (128, 70)])
def test_a_state_is_copied_with_the_rows_that_lie_in_two_places(base, opened):
    one, other = (DeviceState(SHAPE, torch.float32) for _ in range(2))
    one._block.copy_(torch.randint(0, 100, one._block.shape, dtype=torch.uint8))
    for state in (one, other):
        state.set_numbers({"base": base})
    parts, copies = one.parts(base + opened), other.parts(base + opened)
    assert parts.keys() == copies.keys()
    for name, part in parts.items():
        copies[name].copy_(part)
    start = base % 128
    k = one._view(one.layout.gdn[1]["k"])
    copied = other._view(other.layout.gdn[1]["k"])
    assert start + opened <= PLACES
    assert torch.equal(copied[start : start + opened], k[start : start + opened])
    twice = max(start + opened - 128, 0)
    assert torch.equal(copied[:twice], k[:twice])
    assert one.numbers() == {"base": base}


def test_the_state_stands_where_no_rewind_reaches():
    state = DeviceState(SHAPE, torch.float32)
    assert [state.base_after(n) for n in (0, 64, 71, 72, 135, 136)] == [0, 0, 0, 64, 64, 128]
    state.set_numbers({"base": 128})
    assert state.base_after(130) == 128
