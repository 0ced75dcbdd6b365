from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pictures
import tiny_vision
from civetta.chat.images import prepare_image
from civetta.engine.memory import (
    MARGIN_BYTES,
    MemoryNeeds,
    StateSizes,
    plan_memory,
    state_sizes,
    tell,
)
from civetta.errors import DeviceError
from civetta.kernels.select import REFERENCE
from civetta.model.build import check_checkpoint
from civetta.model.vision_build import build_tower, work_bytes
from civetta.state.pages import PagePool, PageShape
from civetta.state.recurrent import RecurrentShape
from civetta.state.session import StateShape

SIZES = StateSizes(session_bytes=100_000_000, page_bytes=1_000_000)
RELEASE = StateShape(
    pages=PageShape(layers=12, kv_heads=2, head_dim=256, index_dim=128, index_ratio=4),
    recurrent=RecurrentShape(
        layers=36,
        key_heads=16,
        value_heads=48,
        head_dim=128,
        channels=10_240,
        conv_rows=3,
        ple_width=10_240,
        ple_rows=9,
    ),
    ngram_context=2,
)


def plan(available, **more):
    cache_bytes = more.pop("cache_bytes", 0)
    needs = MemoryNeeds(
        **{"sizes": SIZES, "sessions": 4, "context_tokens": 6400, "weights": "mapped", **more}
    )
    return plan_memory(needs, available_bytes=available + MARGIN_BYTES, cache_bytes=cache_bytes)


def test_sizes_of_the_release_are_those_of_the_specification():
    """K and V 24,576 bytes a token in bf16, and the index keys; delta matrices 113,246,208."""
    sizes = state_sizes(RELEASE, torch.bfloat16)
    kv, index_raw, index_key = 24_576, 12 * 128 * 2, 12 * 128 * 2 // 4
    assert sizes.page_bytes == 64 * (kv + index_raw + index_key)
    assert 113_246_208 < sizes.session_bytes < 113_246_208 * 1.5


def test_sizes_are_those_of_real_containers():
    pool = PagePool(RELEASE.pages, 3, torch.bfloat16)
    held = sum(
        part.nbytes
        for layer in pool.layers
        for part in (layer.k, layer.v, layer.index_raw, layer.index_key)
    )
    assert held == 3 * state_sizes(RELEASE, torch.bfloat16).page_bytes


def test_everything_fits():
    made = plan(10**9)
    assert made.pages == made.needs.whole_pages == 400
    assert made.total_bytes == 4 * SIZES.session_bytes + 400 * SIZES.page_bytes


def test_sessions_share_what_does_not_fit_whole(caplog):
    made = plan(650_000_000)
    assert made.pages == 250
    with caplog.at_level(logging.INFO, "civetta"):
        tell(made)
    lines = [record.getMessage() for record in caplog.records]
    assert "kv_pages=250" in lines[0]
    assert lines[1].startswith("sessions_share_pages tokens=16000 whole=25600")


def test_a_context_that_cannot_fit_is_refused_with_the_numbers():
    with pytest.raises(DeviceError, match=r"6400 tokens takes 100 MB .* --context 3200 at most"):
        plan(450_000_000)
    with pytest.raises(DeviceError, match="fewer --sessions"):
        plan(300_000_000)
    with pytest.raises(DeviceError, match="a machine with more memory"):
        plan(0, sessions=1)


def test_a_cache_that_leaves_no_room_is_the_one_to_shrink():
    with pytest.raises(DeviceError, match=r"--cache-ram-bytes \d+ at most") as caught:
        plan(10**9, cache_bytes=10**12)
    most = int(str(caught.value).split("--cache-ram-bytes ")[1].split()[0])
    assert plan(10**9, cache_bytes=most).pages >= 100
    with pytest.raises(DeviceError):
        plan(10**9, cache_bytes=most + 1)


def test_weights_to_come_count_and_those_that_are_there_do_not():
    assert plan(10**9, weights_bytes=10**12).pages == 400
    assert plan(10**9, weights_bytes=10**12, weights="loaded").pages == 400
    with pytest.raises(DeviceError, match=r"1e\+03 GB of weights"):
        plan(10**9, weights_bytes=10**12, weights="planned")


@given(st.integers(0, 4 * 10**9), st.integers(1, 8), st.integers(1, 20_000), st.integers(0, 10**9))
def test_a_plan_never_exceeds_what_there_is(available, sessions, context, cache):
    try:
        made = plan(available, sessions=sessions, context_tokens=context, cache_bytes=cache)
    except DeviceError:
        return
    assert made.total_bytes <= available
    assert made.left_bytes == available - made.total_bytes
    assert made.pages >= -(-context // 64)


def test_images_have_room_of_their_own():
    """What the tower brings in when the first image comes is nobody else's."""
    free = 4 * SIZES.session_bytes + 400 * SIZES.page_bytes
    assert plan(free).pages == plan(free + 10**8, images_bytes=10**8).pages == 400
    assert plan(free, images_bytes=10**8).pages == 300
    with pytest.raises(DeviceError, match=r"900 MB for images"):
        plan(free, images_bytes=900_000_000)


def test_the_largest_image_fits_what_is_planned_for_it(tmp_path):
    """The tower's own memory, counted by what it allocates, against the plan's."""
    checked = check_checkpoint(tiny_vision.write(tmp_path / "model"))
    vision = checked.vision
    tower = build_tower(vision, dtype=torch.float32, ops=REFERENCE)
    side = math.isqrt(vision.rules.max_pixels)
    image = prepare_image(pictures.encoded(pictures.flat(side, side, "red")), vision.rules)
    patches = image.grid_h * image.grid_w
    assert patches == vision.rules.max_pixels // vision.config.patch**2
    hidden = vision.config.hidden
    sizes = []
    make = torch.empty

    def watched(*shape, **more):
        made = make(*shape, **more)
        sizes.append(made.nbytes)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("civetta.model.vision.torch.empty", watched)
        encoding = tower.begin(image)
        for _ in range(8):
            encoding.advance()
    assert sizes[:2] == [4 * patches * hidden, 12 * patches * hidden]
    assert sum(sizes[:2]) == work_bytes(vision, 4)
