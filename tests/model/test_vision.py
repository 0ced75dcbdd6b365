"""The vision tower against transformers in float32, from a folder and from a sidecar."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
import vision_oracle as oracle
from safetensors.torch import load_file, save_file

import pictures
from civetta import errors
from civetta.chat.images import cut_patches, decode_image
from civetta.kernels.select import REFERENCE, select
from civetta.model.build import check_checkpoint
from civetta.model.vision_build import (
    build_tower,
    check_mmproj,
    check_width,
    find_mmproj,
    fingerprint,
)

if TYPE_CHECKING:
    from pathlib import Path

    from civetta.model.vision import VisionTower

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = [(32, 32), (64, 32), (300, 200), (1024, 768), (1, 1), (700, 33), (31, 900), (255, 257)]


@pytest.fixture(scope="module")
def model():
    return oracle.random_model(1)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.save(model, tmp_path_factory.mktemp("hf"), min_pixels=1024)


@pytest.fixture(scope="module")
def sidecar(model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.write_mmproj(tmp_path_factory.mktemp("gguf") / "mmproj-F32.gguf", model)


def tower(folder: Path, ops=REFERENCE, dtype: torch.dtype = torch.float32) -> VisionTower:
    vision = check_checkpoint(folder).vision
    assert vision is not None
    return build_tower(vision, dtype=dtype, ops=ops)


def wanted(model, image) -> torch.Tensor:
    values, grid = oracle.patches(image)
    with torch.no_grad():
        return model.model.visual(values, grid_thw=grid).pooler_output


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_rows_equal_transformers(model, folder, width, height) -> None:
    vision = check_checkpoint(folder).vision
    image = oracle.prepared(width, height, 3, vision.rules)
    ops = select("cpu", 2) if width * height > 1e5 else REFERENCE
    found = tower(folder, ops).encode(image)
    assert found.shape == (image.tokens, 64)
    assert relative(found, wanted(model, image)) <= 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 72, "num_heads": 2, "depth": 1},
        {"hidden_size": 64, "num_heads": 8, "num_position_embeddings": 2304},
        {"patch_size": 8, "spatial_merge_size": 4, "intermediate_size": 33},
    ],
)
def test_other_towers_equal_transformers(changes, tmp_path) -> None:
    model = oracle.random_model(7, vision=changes)
    model.save_pretrained(tmp_path)
    vision = check_checkpoint(tmp_path).vision
    image = oracle.prepared(500, 333, 1, vision.rules)
    assert relative(tower(tmp_path).encode(image), wanted(model, image)) <= 1e-5


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory):
    """27 layers, as the real tower has; a quarter of its heads, each of them narrow."""
    changes = {"depth": 27, "hidden_size": 32, "num_heads": 4, "intermediate_size": 72}
    model = oracle.random_model(3, vision=changes)
    return model, oracle.save(model, tmp_path_factory.mktemp("deep"), min_pixels=1024)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_depth_of_the_real_tower(deep, width, height) -> None:
    """float32 rounding does not pile up over 27 layers."""
    model, path = deep
    image = oracle.prepared(width, height, 4, check_checkpoint(path).vision.rules)
    found = tower(path, select("cpu", 2)).encode(image)
    assert relative(found, wanted(model, image)) <= 1e-4


def test_the_size_of_the_real_tower_in_one_layer(tmp_path) -> None:
    """1152 wide, 16 heads of 72, 48 x 48 positions: one layer of it."""
    real = {
        "depth": 1,
        "hidden_size": 1152,
        "num_heads": 16,
        "intermediate_size": 4304,
        "num_position_embeddings": 2304,
    }
    model = oracle.random_model(2, vision=real)
    model.save_pretrained(tmp_path)
    vision = check_checkpoint(tmp_path).vision
    image = oracle.prepared(320, 200, 1, vision.rules)
    found = tower(tmp_path, select("cpu", 2)).encode(image)
    assert relative(found, wanted(model, image)) <= 1e-5


def test_bf16_follows_float32(model, folder) -> None:
    vision = check_checkpoint(folder).vision
    image = oracle.prepared(320, 200, 3, vision.rules)
    found = tower(folder, dtype=torch.bfloat16).encode(image)
    assert 1e-6 < relative(found, wanted(model, image)) <= 0.01


@pytest.mark.parametrize("attended", [torch.float32, torch.float16])  # on a CPU, on a GPU
def test_bf16_follows_float32_over_the_depth_of_the_real_tower(deep, attended) -> None:
    model, path = deep
    image = oracle.prepared(320, 200, 3, check_checkpoint(path).vision.rules)
    built = tower(path, dtype=torch.bfloat16)
    built.attended = attended
    assert 1e-6 < relative(built.encode(image), wanted(model, image)) <= 0.005


def test_values_beyond_float16_stay_finite(folder) -> None:
    """They are cut to its largest; a row of infinities would be a row of NaN."""
    vision = check_checkpoint(folder).vision
    built = tower(folder, dtype=torch.bfloat16)
    built.attended = torch.float16
    for block in built.weights.blocks:
        block.qkv.bias_N.fill_(1e6)
    rows = built.encode(oracle.prepared(64, 64, 3, vision.rules))
    assert rows.isfinite().all()


def test_a_sidecar_gives_the_same_rows(model, folder, sidecar) -> None:
    vision = check_mmproj(sidecar)
    assert vision.rules.min_pixels == 65536  # the file states none: model.md D.1
    image = oracle.prepared(200, 300, 5, vision.rules)
    found = build_tower(vision, dtype=torch.float32, ops=REFERENCE).encode(image)
    assert torch.equal(found, tower(folder).encode(image))


def test_steps_are_bounded_and_change_nothing(folder) -> None:
    vision = check_checkpoint(folder).vision
    image = oracle.prepared(1024, 512, 3, vision.rules)
    built = tower(folder, select("cpu", 2))
    encoding = built.begin(image)
    steps = 1
    while not encoding.advance():
        steps += 1
    assert steps > 2 * (2 * built.config.layers + 2)  # two parts a stage
    assert torch.equal(encoding.rows_NW, built.encode(image))
    assert encoding.advance()  # no further work


def test_two_frames_are_read(model, folder) -> None:
    vision = check_checkpoint(folder).vision
    still = oracle.prepared(64, 64, 3, vision.rules)
    assert still.frames == 1
    frames = [decode_image(pictures.encoded(pictures.noise(64, 64, seed))) for seed in (3, 4)]
    pair = cut_patches(frames, vision.rules)
    found = tower(folder).encode(pair)
    assert relative(found, wanted(model, pair)) <= 1e-5
    assert not torch.equal(found, tower(folder).encode(still))


def test_a_folder_without_a_tower_has_no_vision(model, tmp_path) -> None:
    model.model.language_model.config.save_pretrained(tmp_path / "x")
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("model.visual.")}
    model.save_pretrained(tmp_path, state_dict=state)
    assert check_checkpoint(tmp_path).vision is None


def test_fingerprints_tell_towers_apart(folder, sidecar, tmp_path) -> None:
    other = oracle.random_model(9)
    path = oracle.write_mmproj(tmp_path / "mmproj.gguf", other)
    first, again = (fingerprint(check_mmproj(sidecar)) for _ in range(2))
    assert first == again
    assert fingerprint(check_mmproj(path)) != first
    assert len(fingerprint(check_checkpoint(folder).vision)) == 16


def test_sidecars_are_found_beside_the_model(tmp_path) -> None:
    model = tmp_path / "model.gguf"
    assert find_mmproj(model) is None
    for name in ("mmproj-F32.gguf", "a-mmproj-F16.gguf", "x.gguf", "mmproj.txt"):
        (tmp_path / name).touch()
    assert find_mmproj(model).name == "a-mmproj-F16.gguf"
    (tmp_path / "mmproj-BF16.gguf").touch()
    assert find_mmproj(model).name == "mmproj-BF16.gguf"


def test_a_tower_of_another_width_is_refused(sidecar) -> None:
    vision = check_mmproj(sidecar)
    check_width(vision, 64)
    with pytest.raises(errors.TensorShapeWrong, match="do not belong together"):
        check_width(vision, 2560)


def changed(folder: Path, to: Path, edit, tensors=None) -> Path:
    """A copy of a folder with another vision_config, or other tensors."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    edit(config)
    (to / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        state = load_file(to / "model.safetensors")
        tensors(state)
        save_file(state, to / "model.safetensors")
    return to


REFUSED = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "deepstack": ({"deepstack_visual_indexes": [1]}, "deepstack"),
    "heads": ({"num_heads": 5}, "vision heads"),
    "grid": ({"num_position_embeddings": 145}, "square grid"),
    "more layers": ({"depth": 4}, r"blocks\.3\."),
    "width": ({"out_hidden_size": 32}, "rows of 32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_does_not_fit_is_refused(folder, tmp_path, name) -> None:
    values, words = REFUSED[name]
    path = changed(folder, tmp_path / "x", lambda c: c["vision_config"].update(values))
    with pytest.raises(errors.CheckpointError, match=words):
        check_checkpoint(path)


def test_every_tensor_of_a_tower_is_used_once(folder, tmp_path) -> None:
    def add(state) -> None:
        state["model.visual.blocks.0.norm3.weight"] = torch.zeros(4)

    with pytest.raises(errors.TensorSurplus, match="norm3"):
        check_checkpoint(changed(folder, tmp_path / "more", lambda c: None, add))

    def drop(state) -> None:
        del state["model.visual.blocks.1.norm2.bias"]

    with pytest.raises(errors.TensorMissing, match=r"blocks\.1\.norm2\.bias"):
        check_checkpoint(changed(folder, tmp_path / "less", lambda c: None, drop))
    with pytest.raises(errors.TensorSurplus, match=r"model\.visual"):
        check_checkpoint(changed(folder, tmp_path / "none", lambda c: c.pop("vision_config")))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"patch_size": 14}, "patch_size is 14"),
        ({"resample": 2}, "resample"),
        ({"do_resize": False}, "do_resize"),
        ({"rescale_factor": 1.0}, "rescale_factor"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std"),
        ({"size": {"shortest_edge": 900, "longest_edge": 100}}, "size"),
    ],
)
def test_a_preprocessor_that_does_not_fit_is_refused(folder, tmp_path, values, words) -> None:
    path = changed(folder, tmp_path / "x", lambda c: None)
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    with pytest.raises(errors.CheckpointMalformed, match=words):
        check_checkpoint(path)


def test_a_sidecar_of_another_program_is_refused(sidecar, tmp_path) -> None:
    broken = tmp_path / "mmproj.gguf"
    broken.write_bytes(sidecar.read_bytes().replace(b"qwen3vl_merger", b"qwen9vl_merger"))
    with pytest.raises(errors.ArchitectureUnsupported, match="qwen9vl_merger"):
        check_mmproj(broken)
    broken.write_bytes(sidecar.read_bytes()[:-100])
    with pytest.raises(errors.CheckpointMalformed):
        check_mmproj(broken)
