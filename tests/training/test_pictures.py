"""Pictures in training: the tower and the whole model equal transformers; places and labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers_oracle as oracle
from PIL import Image
from training.data.draw import Draw, seeded
from training.data.pictures import make_counting
from training.data.scenes import COLOURS, KINDS, Scene, Shape, cells
from training.export import export_hf
from training.nano_config import tiny_config
from training.trainer.network import Network
from training.trainer.parameters import create
from training.trainer.positions import rotary_positions
from training.trainer.step import forward_rows, logits_of
from training.trainer.tower import CELLS, TowerSizes, create_tower, from_file, to_file, tower
from transformers import AutoImageProcessor, Qwen4ExpForConditionalGeneration

from civetta.model.config import from_hf

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = tiny_config()
MODEL, SIZES = from_hf(CONFIG, "tiny"), TowerSizes.of(CONFIG["vision_config"])
IMAGE, START, END = 6136, 6134, 6135


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [(128, 128), (160, 256)])
def test_logits_behind_a_picture_equal_transformers(
    size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    p = create(MODEL) | create_tower(SIZES)
    p = {name: value + 0.1 * torch.randn_like(value) for name, value in p.items()}
    export_hf(p, CONFIG, tmp_path, torch.float32)
    peer = Qwen4ExpForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
    prepared = AutoImageProcessor.from_pretrained(tmp_path)(
        images=[Image.fromarray(pixels)], return_tensors="pt"
    )
    count = size[0] * size[1] // 1024
    ids = [*random.integers(0, 6100, 30), START, *[IMAGE] * count, END]
    ids += [int(i) for i in random.integers(0, 6100, 128 - len(ids) % 64)]
    x = torch.tensor([[int(i) for i in ids]])
    with torch.no_grad(), monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "topk", oracle.stable_topk)
        want = peer(
            input_ids=x,
            pixel_values=prepared["pixel_values"],
            image_grid_thw=prepared["image_grid_thw"],
            mm_token_type_ids=(x == IMAGE).long(),
        ).logits[0]
    with torch.no_grad():
        seen = tower(p, SIZES, torch.from_numpy(pixels[None]), torch.float32)[0]
        rows = forward_rows(
            MODEL,
            x,
            torch.zeros_like(x),
            torch.float32,
            sparse=True,
            learn=False,
            positions_B3T=torch.from_numpy(rotary_positions(1, len(ids), [(0, 31, size)])),
            images=(torch.arange(31, 31 + count), seen),
        )
        got = logits_of(p, Network(MODEL).hidden(p, x, rows))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_positions_stand_still_inside_a_picture_and_go_on_behind_it() -> None:
    positions = rotary_positions(2, 12, [(1, 2, (64, 96))])
    assert positions[0].tolist() == [list(range(12))] * 3
    t, h, w = positions[1].tolist()
    assert t == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8]
    assert h == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8]
    assert w == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8]


def test_the_patch_projection_is_the_same_from_a_file() -> None:
    p = create_tower(SIZES)
    stored = to_file(p)
    assert CELLS not in stored
    for name, value in stored.items():
        torch.testing.assert_close(from_file(name, value), p[name])


def test_cells_name_the_shape_whose_centre_they_hold() -> None:
    shape = Shape(kind="star", colour="blue", x=70.0, y=33.0, radius=12.0)
    labels = cells(Scene(side=128, background=(255, 255, 255), shapes=(shape,)), 32)
    at = 1 * 4 + 2
    assert labels[at] == 1 + len(COLOURS) * KINDS.index("star") + list(COLOURS).index("blue")
    assert labels.sum() == labels[at]


def test_counting_pictures_hold_two_kinds_and_colours_at_most() -> None:
    for number in range(30):
        chat = make_counting(Draw(rng=seeded("counting", number)))
        names = chat.key.split()[2:]
        shapes = [tuple(names[i : i + 2]) for i in range(0, len(names), 4)]
        assert len({colour for colour, _ in shapes}) <= 2
        assert len({kind for _, kind in shapes}) <= 2
        answers = [m["content"] for m in chat.messages if m["role"] == "assistant"]
        assert all(0 <= int(answer) <= len(shapes) for answer in answers)


def test_the_tower_learns_to_read_cells() -> None:
    p = {name: value.requires_grad_() for name, value in create_tower(SIZES).items()}
    chat = make_counting(Draw(rng=seeded("learn", 1), room=128))
    pixels = torch.tensor(chat.images[0][None])
    wanted = torch.from_numpy(chat.cells[0])
    optimizer = torch.optim.Adam(list(p.values()), 3e-3)
    losses = []
    for _ in range(25):
        read = tower(p, SIZES, pixels, torch.float32)[0] @ p[CELLS].T
        loss = torch.nn.functional.cross_entropy(read, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
