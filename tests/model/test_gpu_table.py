"""The whole trunk through the GPU's kernels: on a GPU where there is one, else in the interpreter."""

import os
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from civetta.kernels.gpu import gpu_ops
from civetta.kernels.select import REFERENCE
from civetta.model.build import build_trunk, check_checkpoint
from civetta.model.gpu.trunk import GpuTrunk
from civetta.model.gpu.weights import gpu_weights
from civetta.model.place import place_tower
from civetta.model.tiny import write_tiny
from civetta.model.trunk import Trunk
from civetta.model.vision import VisionTower
from civetta.model.vision_build import build_tower

if TYPE_CHECKING:
    from pathlib import Path

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Trunk, Trunk]:
    """The reference on the CPU and the Triton table on the device, over the same files."""
    folder: Path = tmp_path_factory.mktemp("gpu")
    checked = check_checkpoint(write_tiny(folder / "tiny"))
    reference = build_trunk(checked, dtype=torch.float32, ops=REFERENCE)
    weights = gpu_weights(reference.weights, reference.config, DEVICE, torch.float32)
    fast = GpuTrunk(
        reference.config,
        reference.weights,
        weights,
        gpu_ops(),
        torch.float32,
        reference._rows,
        device=DEVICE,
    )
    return reference, fast


def logits(trunk: Trunk, ids: list[int], cuts: list[int]) -> torch.Tensor:
    session = trunk.store(sessions=1, context_tokens=len(ids)).open()
    edges = [0, *cuts, len(ids)]
    parts = [trunk.forward(session, ids[a:b], "all") for a, b in pairwise(edges)]
    return torch.cat(parts).cpu()


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_logits_agree_with_the_reference(pair):
    """A prefill, then two tokens one by one, which run the kernels' other forms."""
    reference, fast = pair
    ids = [(7 * i * i + 3 * i) % 256 for i in range(12)]
    want = logits(reference, ids, [])
    got = logits(fast, ids, [10, 11])
    assert float((got - want).norm() / want.norm()) < 1e-4


def test_the_tower_is_placed_for_the_gpu_s_ops(tmp_path):
    vision = pytest.importorskip("vision_oracle")
    model = vision.random_model(3, vision={"depth": 1})
    folder = vision.save(model, tmp_path, min_pixels=1024)
    checked = check_checkpoint(folder).vision
    assert checked is not None
    image = vision.prepared(32, 32, 3, checked.rules)
    plain = build_tower(checked, dtype=torch.float32, ops=REFERENCE)
    placed = VisionTower(
        checked.config, place_tower(plain.weights, DEVICE, torch.float32), gpu_ops(), torch.float32
    )
    want, got = plain.encode(image), placed.encode(image).cpu()
    assert float((got - want).norm() / want.norm()) < 1e-5
    placed.attended = torch.float16  # what the bfloat16 tower's queries, keys and values are
    got = placed.encode(image).cpu()
    assert 0 < float((got - want).norm() / want.norm()) < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="bits are a GPU's own")
def test_one_answer_on_the_gpu(pair):
    _, fast = pair
    ids = [(11 * i * i + 5 * i) % 256 for i in range(700)]
    whole = logits(fast, ids, [])
    for cuts in ([1], [63, 64, 65], list(range(600, 700)), [128, 256, 400]):
        assert torch.equal(logits(fast, ids, cuts), whole)
