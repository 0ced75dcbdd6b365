"""Videos in the trunk: positions and whole logits as transformers has them."""

from __future__ import annotations

import pytest
import torch
import transformers_oracle
import vision_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

import clips
from civetta.chat.video_decode import prepare_frames
from civetta.chat.video_rules import VideoRules
from civetta.kernels.select import REFERENCE, select
from civetta.model.build import build_trunk, check_checkpoint
from civetta.model.inputs import ImageRows, Piece
from civetta.model.rope import rope_positions
from civetta.model.vision_build import build_tower
from civetta.state.spans import ImageSpan

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model():
    return oracle.random_model(4)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return oracle.save(model, tmp_path_factory.mktemp("hf"), min_pixels=1024)


@pytest.fixture(autouse=True)
def _ties_to_the_lower_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "topk", transformers_oracle.stable_topk)


class Layout:
    """Ids, kinds (0 text, 1 image, 2 video) and spans of a prompt in the making."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.kinds: list[int] = []
        self.spans: list[ImageSpan] = []

    def text(self, count: int) -> None:
        self.ids += [(7 * (len(self.ids) + i)) % 290 for i in range(count)]
        self.kinds += [0] * count

    def group(self, kind: int, rows: int, cols: int) -> None:
        self.spans.append(ImageSpan(start=len(self.ids), rows=rows, cols=cols, digest=b""))
        self.ids += [{1: oracle.IMAGE, 2: oracle.VIDEO}[kind]] * (rows * cols)
        self.kinds += [kind] * (rows * cols)


@given(
    parts=st.lists(
        st.one_of(
            st.integers(1, 9),
            st.tuples(st.integers(1, 6), st.integers(1, 6)),
            st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5)),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=100, deadline=None)
def test_positions_equal_get_rope_index(model, parts) -> None:
    """Text, images, and videos of up to four groups with their times between them."""
    layout, images, videos = Layout(), [], []
    for item in parts:
        if isinstance(item, int):
            layout.text(item)
            continue
        *groups, rows, cols = item
        (images, videos)[len(groups)].append([*(groups or [1]), 2 * rows, 2 * cols])
        for _ in range(groups[0] if groups else 1):
            layout.text(3)
            layout.group(1 + len(groups), rows, cols)
    right, delta = model.model.get_rope_index(
        torch.tensor([layout.ids]),
        torch.tensor([layout.kinds]),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
    )
    count = len(layout.ids)
    assert torch.equal(rope_positions(layout.spans, 0, count), right[:, 0])
    after = rope_positions(layout.spans, count, 2)
    assert torch.equal(after, (torch.arange(count, count + 2) + delta[0, 0]).expand(3, -1))


@pytest.mark.parametrize("ops", [REFERENCE, select("cpu", 2)], ids=["reference", "native"])
def test_logits_equal_transformers(model, folder, ops) -> None:
    """Text, five frames in three groups, text, an image, text; whole and in chunks."""
    checked = check_checkpoint(folder)
    trunk = build_trunk(checked, dtype=torch.float32, ops=ops)
    tower = build_tower(checked.vision, dtype=torch.float32, ops=ops)
    rules = VideoRules(image=checked.vision.rules, min_pixels=4096)
    video = prepare_frames(clips.greys(5, 96, 64), range(5), rules)
    picture = oracle.prepared(64, 32, 3, checked.vision.rules)
    layout, shown = Layout(), []
    layout.text(8)
    for group in video.groups:
        layout.text(4)
        layout.group(2, group.rows, group.cols)
        shown.append(group)
    layout.text(5)
    layout.group(1, picture.rows, picture.cols)
    layout.text(9)
    rows = [
        ImageRows(start=span.start, rows_ND=tower.encode(image))
        for span, image in zip(layout.spans, [*shown, picture], strict=True)
    ]
    pixels = [oracle.patches(image) for image in [*shown, picture]]
    with torch.no_grad():
        right = model(
            input_ids=torch.tensor([layout.ids]),
            mm_token_type_ids=torch.tensor([layout.kinds]),
            pixel_values=pixels[-1][0],
            image_grid_thw=pixels[-1][1],
            pixel_values_videos=torch.cat([values for values, _ in pixels[:-1]]),
            video_grid_thw=torch.tensor([[3, shown[0].grid_h, shown[0].grid_w]]),
            use_cache=False,
        ).logits[0]
    found = []
    for chunk in (len(layout.ids), 7):
        session = trunk.store(sessions=1, context_tokens=len(layout.ids)).open()
        session.attach(layout.spans)
        parts = [
            trunk.forward_pieces(
                [Piece(session=session, ids=layout.ids[a : a + chunk], rows="all", images=rows)]
            )
            for a in range(0, len(layout.ids), chunk)
        ]
        found.append(torch.cat(parts))
    error = (found[0] - right).norm(dim=-1) / right.norm(dim=-1)
    assert float(error.max()) <= 2e-4
    assert torch.equal(found[1], found[0])
