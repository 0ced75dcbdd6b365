"""The draft head in training equals the engine's; the GGUF files hold what was trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers_oracle as oracle
from PIL import Image
from training.data.encode import encode_text, spread
from training.data.heldout import heldout, heldout_text
from training.export import export_hf
from training.export_gguf import export_gguf
from training.gguf_names import (
    draft_pieces,
    model_pieces,
    restored,
    stored_tensors,
    vision_pieces,
)
from training.nano_config import nano_config, tiny_config
from training.trainer.draft import DRAFT, Chains, create_draft
from training.trainer.network import Network
from training.trainer.parameters import create
from training.trainer.step import forward_rows, logits_of
from training.trainer.tower import PATCH, TOWER, TowerSizes, create_tower
from training.weights import EMBEDDED, read_parameters
from transformers import AutoImageProcessor, Qwen4ExpForConditionalGeneration

from civetta.checkpoint.source import open_checkpoint
from civetta.kernels.select import REFERENCE
from civetta.model.bind_mtp import find_head
from civetta.model.build import build_trunk, check_checkpoint, load_trunk
from civetta.model.config import from_hf
from civetta.model.embedded import embedded_model_path

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = tiny_config()
MODEL = from_hf(CONFIG, "tiny")
TOKENS, DEPTHS = 28, 4


@pytest.fixture(scope="module")
def params() -> dict[str, torch.Tensor]:
    p = (
        create(MODEL, 5)
        | create_draft(MODEL)
        | create_tower(TowerSizes.of(CONFIG["vision_config"]))
    )
    torch.manual_seed(5)
    return {name: value + 0.1 * torch.randn_like(value) for name, value in p.items()}


def test_chains_equal_the_engines(params: dict[str, torch.Tensor], tmp_path: Path) -> None:
    export_hf(params, CONFIG, tmp_path, torch.float32)
    torch.manual_seed(6)
    ids = torch.randint(0, 6100, (1, 64))
    rows = forward_rows(MODEL, ids, torch.zeros_like(ids), torch.float32, sparse=True, learn=False)
    net = Network(MODEL)
    with torch.no_grad():
        chains = Chains(net, params, net.wide(params, ids, rows), ids, rows)
        got = [logits_of(params, chains.link())[TOKENS - 1] for _ in range(DEPTHS)]
    checked = check_checkpoint(tmp_path)
    head = find_head(checked.checkpoint, checked.config, None)
    trunk = build_trunk(checked, dtype=torch.float32, ops=REFERENCE, head=head)
    assert trunk.head is not None
    session = trunk.store(sessions=1, context_tokens=128).open()
    known = ids[0].tolist()
    trunk.forward(session, known[:TOKENS], "none")
    session.reserve(1 + DEPTHS)
    logits, chain = trunk.head.begin([session], [known[TOKENS]])
    for depth in range(DEPTHS):
        torch.testing.assert_close(got[depth], logits[0], atol=2e-3, rtol=2e-3)
        if depth + 1 < DEPTHS:
            logits, chain = trunk.head.extend(chain, [known[TOKENS + 1 + depth]])


def test_going_to_a_file_and_back_changes_nothing(params: dict[str, torch.Tensor]) -> None:
    text, vision = CONFIG["text_config"], CONFIG["vision_config"]
    back: dict[str, torch.Tensor] = {}
    for pieces in (model_pieces, draft_pieces):
        back |= restored(pieces(text), stored_tensors(pieces(text), params))
    back |= restored(vision_pieces(vision), stored_tensors(vision_pieces(vision), params))
    left = {name for name in params if name not in back}
    assert left == {PATCH, "cells.weight"}
    for name, value in back.items():
        torch.testing.assert_close(value, params[name], atol=1e-5, rtol=1e-5)


def test_the_files_give_nearly_the_logits_of_the_safetensors(
    params: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    export_hf(params, CONFIG, tmp_path / "hf", torch.float32)
    model, draft, vision = export_gguf(params, CONFIG, tmp_path / "gguf")
    ids = torch.randint(0, 6100, (100,)).tolist()
    got, want = (_logits(path, ids) for path in (model, tmp_path / "hf"))
    assert float((got - want).norm() / want.norm()) < 0.05
    assert float((got - want).norm()) > 0.0
    head = find_head(check_checkpoint(model).checkpoint, check_checkpoint(model).config, None)
    assert head is not None
    assert head.checkpoint.path == draft
    assert vision.name.startswith("mmproj")


def _logits(path: Path, ids: list[int]) -> torch.Tensor:
    trunk = load_trunk(path)
    return trunk.forward(trunk.store(sessions=1, context_tokens=512).open(), ids, "all")


def test_the_embedded_files_are_small_and_of_three_types() -> None:
    kinds = set()
    for path in EMBEDDED.glob("*.gguf"):
        with open_checkpoint(path) as checkpoint:
            for info in checkpoint.tensors.values():
                kinds.add(info.format.name)
                assert info.format.name == "F32" or info.nbytes > 1000
    assert kinds == {"F32", "BF16", "Q8_0"}
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) <= 40_000_000


@pytest.mark.filterwarnings("ignore")
def test_the_embedded_model_is_the_same_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of text beyond the sparse budget, and right answers about pictures.

    Not the text of seed 0: there the fourth and the fifth expert of one row are 4e-7 apart in the
    peer's router, and the two implementations keep different ones.
    """
    export_hf(read_parameters(EMBEDDED), nano_config(), tmp_path, torch.float32)
    peer = Qwen4ExpForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = encode_text(" ".join(heldout_text(4, seed=1)))[:400]
    want = _logits(embedded_model_path(), ids)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    with torch.no_grad(), monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "topk", oracle.stable_topk)
        got = peer(input_ids=torch.tensor([ids])).logits[0]
        for item in heldout("vision", 4, seed=3):
            prompt, weight = encode_text(item.prompt), np.zeros(0, np.float32)
            known, _, _ = spread(prompt, np.resize(weight, len(prompt)), item.images)
            x = torch.tensor([known])
            made = processor(images=[Image.fromarray(item.images[0])], return_tensors="pt")
            logits = peer(input_ids=x, mm_token_type_ids=(x == 6136).long(), **made).logits
            assert int(logits[0, -1].argmax()) == encode_text(str(item.expected))[0]
    torch.testing.assert_close(got, want, atol=5e-3, rtol=5e-3)


def test_the_embedded_files_hold_every_part() -> None:
    p = read_parameters(EMBEDDED)
    assert sum(name.startswith(DRAFT) for name in p) == 31
    assert sum(name.startswith(TOWER) for name in p) == 12 * 4 + 6 + 3
    assert all(bool(value.isfinite().all()) for value in p.values())
    assert 15e6 < sum(value.numel() for value in p.values()) < 30e6
