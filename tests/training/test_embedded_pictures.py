"""The embedded model's tower, and all its logits behind pictures, against transformers in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers_oracle
import vision_oracle as oracle
from training.data.encode import encode_text
from training.export import export_hf
from training.nano_config import nano_config
from training.weights import EMBEDDED, read_parameters
from transformers import Qwen4ExpForConditionalGeneration

from civetta.engine.load import load_engine
from civetta.kernels.select import REFERENCE, select
from civetta.model.build import build_trunk, check_checkpoint
from civetta.model.embedded import embedded_model_path
from civetta.model.inputs import ImageRows, Piece
from civetta.model.vision_build import build_tower, check_mmproj, find_mmproj
from civetta.options import EngineOptions, ModelOptions, Settings
from civetta.state.spans import ImageSpan
from training import evaluate_engine

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = [(32, 32), (128, 128), (256, 256), (300, 200), (1024, 768), (1, 1), (700, 33), (31, 900)]
START, PAD, END = "<|vision_start|>", 6136, "<|vision_end|>"


def test_the_evaluation_asks_the_engine_about_pictures():
    settings = Settings(model=ModelOptions(threads=1), engine=EngineOptions(sessions=2))
    with load_engine(settings) as engine:
        lines = list(evaluate_engine.pictures(engine, 6, 2))
    assert sum(line["of"] for line in lines) == 6
    assert sum(line["right"] for line in lines) >= 5


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nano")
    export_hf(read_parameters(EMBEDDED), nano_config(), folder, torch.float32)
    return Qwen4ExpForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def vision():
    """The sidecar's tower, for pictures of any size."""
    checked = check_mmproj(find_mmproj(embedded_model_path()))
    return replace(checked, rules=replace(checked.rules, min_pixels=1024))


def difference(vision, peer, size, ops, dtype=torch.float32, attended=torch.float32):
    """Relative L2 of the tower's rows against the peer's."""
    image = oracle.prepared(*size, 3, vision.rules)
    values, grid = oracle.patches(image)
    with torch.no_grad():
        right = peer.model.visual(values, grid_thw=grid).pooler_output
    tower = build_tower(vision, dtype=dtype, ops=ops)
    tower.attended = attended
    found = tower.encode(image)
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("size", SIZES)
def test_the_tower_equals_transformers(vision, peer, size):
    for ops in (REFERENCE, select("cpu", 1)):
        assert difference(vision, peer, size, ops) <= 1e-4


@pytest.mark.parametrize("attended", [torch.float32, torch.float16])  # on a CPU, on a GPU
@pytest.mark.parametrize("size", [(32, 32), (256, 256), (300, 200), (700, 33), (31, 900)])
def test_the_tower_in_bfloat16_is_near(vision, peer, size, attended):
    for ops in (REFERENCE, *([select("cpu", 1)] if attended == torch.float32 else [])):
        assert 1e-6 < difference(vision, peer, size, ops, torch.bfloat16, attended) <= 0.007


@pytest.mark.parametrize("chunk", [64, 1000])
def test_logits_of_text_image_text_image_equal_transformers(vision, peer, monkeypatch, chunk):
    ids, spans, images = encode_text("<|im_start|>user\nHow many shapes"), [], []
    for seed, size in enumerate(((128, 128), (256, 160))):
        image = oracle.prepared(*size, seed, vision.rules)
        ids += encode_text(START)
        span = ImageSpan(start=len(ids), rows=image.rows, cols=image.cols, digest=image.digest)
        spans.append(span)
        images.append(image)
        ids += [PAD] * image.tokens + encode_text(END + " and what is the colour of this one? " * 8)
    monkeypatch.setattr(torch.Tensor, "topk", transformers_oracle.stable_topk)
    parts = [oracle.patches(image) for image in images]
    x = torch.tensor([ids])
    with torch.no_grad():
        right = peer(
            input_ids=x,
            mm_token_type_ids=(x == PAD).int(),
            pixel_values=torch.cat([values for values, _ in parts]),
            image_grid_thw=torch.cat([grid for _, grid in parts]),
        ).logits[0]
    ops = select("cpu", 1)
    trunk = build_trunk(check_checkpoint(embedded_model_path()), dtype=torch.float32, ops=ops)
    tower = build_tower(vision, dtype=torch.float32, ops=ops)
    rows = [
        ImageRows(start=span.start, rows_ND=tower.encode(image))
        for span, image in zip(spans, images, strict=True)
    ]
    session = trunk.store(sessions=1, context_tokens=len(ids)).open()
    session.attach(spans)
    found = []
    for start in range(0, len(ids), chunk):
        piece = Piece(session=session, ids=ids[start : start + chunk], rows="all", images=rows)
        found.append(trunk.forward_pieces([piece]))
    off = (torch.cat(found) - right).norm(dim=-1) / right.norm(dim=-1)
    assert float(off.max()) <= 1e-3
