"""The draft head from every kind of file, and files that are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

import tiny as writers
import tiny_gguf
from civetta.checkpoint.formats import Q6_K
from civetta.checkpoint.quant import quant_tensor
from civetta.errors import CheckpointMalformed, CheckpointNotFound, TensorMissing, TensorSurplus
from civetta.kernels.dequant.reference import dequantize
from civetta.kernels.select import REFERENCE
from civetta.model.bind_mtp import _columns, find_head
from civetta.model.build import build_trunk, check_checkpoint

TINY = writers.make(1)
IDS = [int(i) for i in np.random.default_rng(5).integers(0, 256, 90)]


def head_logits(path, given=None):
    """A chain of two drafts on top of a short prompt."""
    checked = check_checkpoint(path)
    head = find_head(checked.checkpoint, checked.config, given)
    assert head is not None
    trunk = build_trunk(checked, dtype=torch.float32, ops=REFERENCE, head=head)
    session = trunk.store(sessions=1, context_tokens=128).open()
    trunk.forward(session, IDS, "none")
    session.reserve(2)
    first, chain = trunk.head.begin([session], [3])
    second, _ = trunk.head.extend(chain, [4])
    return torch.cat([first, second])


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("head") / "hf"
    found = head_logits(writers.write_hf(path, TINY.config, writers.stored(TINY.tensors)))
    assert found.std() > 0.1
    return found


def write_model(folder, **keys):
    folder.mkdir(parents=True, exist_ok=True)
    metadata = tiny_gguf.gguf_metadata(TINY) | keys
    return tiny_gguf.write_gguf(folder / "tiny.gguf", metadata, tiny_gguf.gguf_tensors(TINY))


def write_sidecar(path, tensors=None, *, shared=True, split=False, kind=Type.F32, keys=()):
    path.parent.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        tensors = tiny_gguf.draft_tensors(TINY, shared=shared, split=split)
    metadata = tiny_gguf.draft_metadata(TINY, shared=shared) | dict(keys)
    return tiny_gguf.write_gguf(path, metadata, tensors, kind)


def same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_sidecars(tmp_path, original, shared, split):
    model = write_model(tmp_path)
    sidecar = write_sidecar(tmp_path / "elsewhere" / "x.gguf", shared=shared, split=split)
    same(head_logits(model, sidecar), original)


@pytest.mark.parametrize("where", ["mtp-tiny.gguf", "MTP/mtp-tiny.gguf"])
def test_a_sidecar_beside_the_model_is_found(tmp_path, original, where):
    model = write_model(tmp_path)
    write_sidecar(tmp_path / where)
    same(head_logits(model), original)


def test_head_in_the_models_own_file(tmp_path, original):
    tensors = tiny_gguf.gguf_tensors(TINY) | tiny_gguf.draft_tensors(TINY, shared=True)
    metadata = tiny_gguf.draft_metadata(TINY, shared=False)
    same(head_logits(tiny_gguf.write_gguf(tmp_path / "all.gguf", metadata, tensors)), original)


def test_experts_of_the_head_one_by_one(tmp_path, original):
    """As releases in FP8 and NVFP4 spell them (model.md A.7, A.8)."""
    split = writers.per_expert(TINY.tensors)
    assert any(name.startswith("mtp.layers.0.mlp.experts.0.") for name in split)
    same(
        head_logits(writers.write_hf(tmp_path / "x", TINY.config, writers.stored(split))), original
    )


@pytest.mark.parametrize("release", [writers.fp8_release, writers.nvfp4_release])
def test_a_head_of_a_quantized_release(tmp_path, release):
    """Equal to the head of a release that stores the numbers which its codes stand for."""
    stored, real = release(TINY)
    experts = [name for name in stored if name.startswith("mtp.layers.0.mlp.experts.0.")]
    assert any("scale" in name for name in experts)
    found = head_logits(writers.write_hf(tmp_path / "x", TINY.config, stored))
    plain = writers.stored(writers.fused(real))
    same(found, head_logits(writers.write_hf(tmp_path / "real", TINY.config, plain)))


def test_a_full_sidecar_uses_its_own_ends(tmp_path, original):
    model = write_model(tmp_path)
    tensors = tiny_gguf.draft_tensors(TINY, shared=False)
    tensors["output.weight"] = 2 * tensors["output.weight"]
    same(
        head_logits(model, write_sidecar(tmp_path / "x.gguf", tensors, shared=False)), 2 * original
    )


@pytest.mark.parametrize(("kind", "error"), [(Type.Q8_0, 0.03), (Type.Q5_0, 0.3)])
@pytest.mark.parametrize("split", [True, False])
def test_quantized_sidecars(tmp_path, original, kind, error, split):
    """Both halves of a fused combiner are cut between blocks and stay stored blocks."""
    found = head_logits(
        write_model(tmp_path), write_sidecar(tmp_path / "x.gguf", split=split, kind=kind)
    )
    relative = float((found - original).norm() / original.norm())
    assert 0 < relative < error


def test_a_combiner_whose_halves_share_a_block():
    """2 x 128 columns in one block of 256 cannot be cut; they are expanded."""
    both = quant_tensor(np.random.default_rng(0).integers(0, 99, 210 * 3, np.uint8), Q6_K, 3, 256)
    halves = [_columns(both, 0, 128), _columns(both, 128, 256)]
    assert torch.equal(torch.cat(halves, dim=1), dequantize(both))
    assert all(isinstance(half, torch.Tensor) for half in halves)


def test_a_model_without_head(tmp_path):
    checked = check_checkpoint(write_model(tmp_path))
    assert find_head(checked.checkpoint, checked.config, None) is None
    bare = {n: v for n, v in TINY.tensors.items() if not n.startswith("mtp.")}
    folder = writers.write_hf(tmp_path / "hf", TINY.config, writers.stored(bare))
    checked = check_checkpoint(folder)
    assert find_head(checked.checkpoint, checked.config, None) is None


def refused(tmp_path, sidecar, error, *words):
    checked = check_checkpoint(write_model(tmp_path))
    with pytest.raises(error) as caught:
        find_head(checked.checkpoint, checked.config, sidecar)
    for word in words:
        assert word in str(caught.value)


def test_two_sidecars_are_a_question(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        write_sidecar(tmp_path / name)
    refused(tmp_path, None, CheckpointNotFound, "a.gguf, b.gguf", "--mtp-model")


def test_a_path_without_head_is_refused(tmp_path):
    other = write_model(tmp_path / "other")
    refused(tmp_path, other, CheckpointNotFound, "no draft head")
    refused(tmp_path, tmp_path / "nothing.gguf", CheckpointNotFound, "nothing.gguf")


def test_missing_and_surplus_tensors_are_named(tmp_path):
    tensors = tiny_gguf.draft_tensors(TINY, shared=True)
    without = {n: v for n, v in tensors.items() if "eh_proj" not in n}
    refused(tmp_path, write_sidecar(tmp_path / "s" / "a", without), TensorMissing, "eh_proj")
    without = {n: v for n, v in tensors.items() if "hnorm" not in n}
    refused(tmp_path, write_sidecar(tmp_path / "s" / "b", without), TensorMissing, "hnorm")
    more = tensors | {"blk.4.strange.weight": np.zeros((2, 2), np.float32)}
    refused(tmp_path, write_sidecar(tmp_path / "s" / "c", more), TensorSurplus, "strange")


def test_a_head_of_another_model_is_refused(tmp_path):
    sidecar = write_sidecar(tmp_path / "s" / "a", keys={"rope.freq_base": 1e6}.items())
    refused(tmp_path, sidecar, CheckpointMalformed, "rope.freq_base", "another model")
    sidecar = write_sidecar(
        tmp_path / "s" / "b", keys={"nextn_predict_layers": 2, "block_count": 6}.items()
    )
    refused(tmp_path, sidecar, CheckpointMalformed, "2 draft blocks")
