"""The whole trunk with the Triton kernels: on a GPU where there is one, else in the interpreter."""

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
from civetta.model.place import place
from civetta.model.tiny import write_tiny
from civetta.model.trunk import Trunk

if TYPE_CHECKING:
    from pathlib import Path

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Trunk, Trunk]:
    """The reference on the CPU and the Triton table on the device, over the same files."""
    folder: Path = tmp_path_factory.mktemp("gpu")
    checked = check_checkpoint(write_tiny(folder / "tiny"))
    reference = build_trunk(checked, dtype=torch.float32, ops=REFERENCE)
    weights = place(reference.weights, DEVICE, torch.float32)
    fast = Trunk(
        reference.config, weights, gpu_ops(), torch.float32, reference._rows, device=DEVICE
    )
    return reference, fast


def logits(trunk: Trunk, ids: list[int], cuts: list[int]) -> torch.Tensor:
    session = trunk.store(sessions=1, context_tokens=len(ids)).open()
    edges = [0, *cuts, len(ids)]
    parts = [trunk.forward(session, ids[a:b], "all") for a, b in pairwise(edges)]
    return torch.cat(parts).cpu()


def test_logits_agree_with_the_reference(pair):
    reference, fast = pair
    ids = [(7 * i * i + 3 * i) % 256 for i in range(72)]
    want = logits(reference, ids, [])
    got = logits(fast, ids, [70, 71])
    assert float((got - want).norm() / want.norm()) < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="bits are a GPU's own")
def test_one_answer_on_the_gpu(pair):
    _, fast = pair
    ids = [(11 * i * i + 5 * i) % 256 for i in range(700)]
    whole = logits(fast, ids, [])
    for cuts in ([1], [63, 64, 65], list(range(600, 700)), [128, 256, 400]):
        assert torch.equal(logits(fast, ids, cuts), whole)
