"""Images in the trunk: positions, whole logits and cached decode as transformers has them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers_oracle
import vision_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from civetta.kernels.select import REFERENCE, select
from civetta.model.build import build_trunk, check_checkpoint
from civetta.model.inputs import ImageRows, Piece
from civetta.model.rope import rope_positions
from civetta.model.vision_build import build_tower
from civetta.state.spans import ImageSpan

if TYPE_CHECKING:
    from civetta.chat.images import PreparedImage
    from civetta.model.trunk import Trunk
    from civetta.state.session import Session

pytestmark = pytest.mark.filterwarnings("ignore")

LAYOUT = [11, (96, 64), 17, (64, 160), (32, 32), 40]
"""Tokens of text, or width and height of a picture, in order."""


@pytest.fixture(scope="module")
def model():
    return oracle.random_model(4)


@pytest.fixture(autouse=True)
def _ties_to_the_lower_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "topk", transformers_oracle.stable_topk)


class Prompt:
    """Random text around pictures, as ids and spans, with the rows of the tower."""

    def __init__(self, vision, tower, layout=LAYOUT, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(seed)
        self.ids: list[int] = []
        self.spans: list[ImageSpan] = []
        self.pictures: list[PreparedImage] = []
        for item in layout:
            if isinstance(item, int):
                self.ids += torch.randint(0, 299, (item,), generator=made).tolist()
                continue
            picture = oracle.prepared(*item, seed + len(self.spans), vision.rules)
            self.pictures.append(picture)
            span = ImageSpan(
                start=len(self.ids) + 1,
                rows=picture.rows,
                cols=picture.cols,
                digest=picture.digest,
            )
            self.spans.append(span)
            self.ids += [oracle.START, *[oracle.IMAGE] * picture.tokens, oracle.END]
        self.rows = [
            ImageRows(start=span.start, rows_ND=tower.encode(picture))
            for span, picture in zip(self.spans, self.pictures, strict=True)
        ]

    def session(self, trunk: Trunk) -> Session:
        session = trunk.store(sessions=1, context_tokens=len(self.ids)).open()
        session.attach(self.spans)
        return session

    def run(self, trunk: Trunk, cuts: list[int]) -> torch.Tensor:
        """Logits of all rows when launches end at `cuts`."""
        session = self.session(trunk)
        rows = []
        for a, b in itertools.pairwise([0, *cuts, len(self.ids)]):
            piece = Piece(session=session, ids=self.ids[a:b], rows="all", images=self.rows)
            rows.append(trunk.forward_pieces([piece]))
        session.check()
        return torch.cat(rows)

    def inputs(self) -> dict[str, Any]:
        """Arguments of the model of transformers."""
        parts = [oracle.patches(picture) for picture in self.pictures]
        ids = torch.tensor([self.ids])
        return {
            "input_ids": ids,
            "mm_token_type_ids": (ids == oracle.IMAGE).int(),
            "pixel_values": torch.cat([values for values, _ in parts]),
            "image_grid_thw": torch.cat([grid for _, grid in parts]),
        }


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return oracle.save(model, tmp_path_factory.mktemp("hf"), min_pixels=1024)


FLOAT32 = ["reference-f32", "native-f32"]
in_float32 = pytest.mark.parametrize("loaded", FLOAT32, indirect=True)


@pytest.fixture(scope="module", params=[*FLOAT32, "reference-bf16"])
def loaded(request, folder):
    checked = check_checkpoint(folder)
    ops = select("cpu", 2) if request.param.startswith("native") else REFERENCE
    dtype = torch.bfloat16 if request.param.endswith("bf16") else torch.float32
    trunk = build_trunk(checked, dtype=dtype, ops=ops)
    return trunk, Prompt(checked.vision, build_tower(checked.vision, dtype=dtype, ops=ops))


def worst(found: torch.Tensor, right: torch.Tensor) -> float:
    return float(((found - right).norm(dim=-1) / right.norm(dim=-1)).max())


@in_float32
def test_logits_equal_transformers(model, loaded) -> None:
    trunk, prompt = loaded
    with torch.no_grad():
        right = model(**prompt.inputs(), use_cache=False).logits[0]
    found = prompt.run(trunk, [])
    assert worst(found, right) <= 2e-4
    best = right.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 1e-3
    assert (found.argmax(-1) == right.argmax(-1))[clear].all()
    assert worst(found, prompt.run(trunk, [30])) == 0


@pytest.mark.parametrize("chunk", [1, 3, 16, 31, 64])
def test_chunk_size_does_not_matter(loaded, chunk) -> None:
    trunk, prompt = loaded
    cuts = list(range(chunk, len(prompt.ids), chunk))
    assert torch.equal(prompt.run(trunk, cuts), prompt.run(trunk, []))


@in_float32
def test_cached_decode_equals_transformers_and_prefill(model, loaded) -> None:
    trunk, prompt = loaded
    steps = 30
    inputs, first = prompt.inputs(), len(prompt.ids) - steps
    for name in ("input_ids", "mm_token_type_ids"):
        inputs[name] = inputs[name][:, :first]
    right = []
    with torch.no_grad():
        model.model.rope_deltas = None
        out = model(**inputs, use_cache=True)
        cache = out.past_key_values if hasattr(out, "past_key_values") else out.cache
        right.append(out.logits[0, -1])
        for id_ in prompt.ids[first:]:
            out = model(input_ids=torch.tensor([[id_]]), cache=cache, use_cache=True)
            right.append(out.logits[0, -1])
    cuts = list(range(first, len(prompt.ids)))
    found = prompt.run(trunk, cuts)
    assert worst(found[first - 1 :], torch.stack(right)) <= 2e-4
    assert torch.equal(found, prompt.run(trunk, []))


def test_the_picture_matters_and_only_from_its_place_on(loaded, folder) -> None:
    trunk, prompt = loaded
    vision = check_checkpoint(folder).vision
    other = Prompt(vision, build_tower(vision, dtype=trunk.dtype, ops=trunk.ops))
    changed = oracle.prepared(64, 160, 99, vision.rules)
    other.rows[1] = ImageRows(
        start=other.spans[1].start,
        rows_ND=build_tower(vision, dtype=trunk.dtype, ops=trunk.ops).encode(changed),
    )
    mine, theirs = prompt.run(trunk, []), other.run(trunk, [])
    start = prompt.spans[1].start
    assert torch.equal(mine[:start], theirs[:start])
    assert (mine[start:] - theirs[start:]).abs().amax(-1).min() > 0


def test_images_share_a_launch_with_text(loaded) -> None:
    trunk, prompt = loaded
    alone = prompt.run(trunk, [20])
    store = trunk.store(sessions=2, context_tokens=len(prompt.ids))
    mixed, plain = store.open(), store.open()
    mixed.attach(prompt.spans)
    text = [(7 * i) % 290 for i in range(60)]
    rows = []
    for a, b in ((0, 20), (20, len(prompt.ids))):
        pieces = [
            Piece(session=plain, ids=text[a // 20 * 30 :][:30], rows="all"),
            Piece(session=mixed, ids=prompt.ids[a:b], rows="all", images=prompt.rows),
        ]
        rows.append(trunk.forward_pieces(pieces))
    found = torch.cat([rows[0][30:], rows[1][30:]])
    assert torch.equal(found, alone)
    fresh = trunk.store(sessions=1, context_tokens=60).open()
    assert torch.equal(trunk.forward(fresh, text, "all")[:30], rows[0][:30])


def test_a_draft_behind_an_image_is_taken_back(loaded) -> None:
    trunk, prompt = loaded
    at = prompt.spans[-1].stop + 2
    session = prompt.session(trunk)
    trunk.forward_pieces([Piece(session=session, ids=prompt.ids[:at], images=prompt.rows)])
    trunk.forward(session, [3, 1, 4], "none")
    session.rewind(3)
    piece = Piece(session=session, ids=prompt.ids[at:], rows="all", images=prompt.rows)
    assert torch.equal(trunk.forward_pieces([piece]), prompt.run(trunk, [])[at:])


@given(
    parts=st.lists(
        st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 7), st.integers(1, 7))),
        min_size=1,
        max_size=9,
    ),
    cut=st.integers(0, 200),
)
@settings(max_examples=150, deadline=None)
def test_positions_equal_get_rope_index(model, parts, cut) -> None:
    ids: list[int] = []
    kinds: list[int] = []
    spans: list[ImageSpan] = []
    grids: list[list[int]] = []
    for item in parts:
        if isinstance(item, int):
            ids += [5] * item
            kinds += [0] * item
            continue
        if kinds and kinds[-1] == 1:  # two images always have text between them
            ids.append(oracle.START)
            kinds.append(0)
        rows, cols = item
        spans.append(ImageSpan(start=len(ids), rows=rows, cols=cols, digest=b""))
        grids.append([1, 2 * rows, 2 * cols])
        ids += [oracle.IMAGE] * (rows * cols)
        kinds += [1] * (rows * cols)
    right, delta = model.model.get_rope_index(
        torch.tensor([ids]),
        torch.tensor([kinds]),
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    assert torch.equal(rope_positions(spans, 0, len(ids)), right[:, 0])
    cut = min(cut, len(ids))
    two = [rope_positions(spans, 0, cut), rope_positions(spans, cut, len(ids) - cut)]
    assert torch.equal(torch.cat(two, dim=1), right[:, 0])
    after = rope_positions(spans, len(ids), 3)
    assert torch.equal(after, (torch.arange(len(ids), len(ids) + 3) + delta[0, 0]).expand(3, -1))
