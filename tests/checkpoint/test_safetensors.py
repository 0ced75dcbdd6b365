"""safetensors files and Hugging Face folders, right and wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from checkpoint.handmade import entry, safetensors, u64, write
from civetta.checkpoint.quant import bytes_view, plain_array, quant_tensor
from civetta.checkpoint.source import open_checkpoint
from civetta.errors import CheckpointMalformed, CheckpointNotFound, TensorTypeUnknown

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = b'{"model_type": "qwen4_exp"}'
MULTIPLIERS = [23703573157769, 20109073645365, 8052911324071]


def folder_of(tmp_path: Path, files: dict[str, bytes]) -> Path:
    for name, content in {"config.json": CONFIG, **files}.items():
        write(tmp_path / name, content)
    return tmp_path


def two(names: tuple[str, str] = ("a", "b")) -> bytes:
    entries = {names[0]: entry("F32", [2], 0, 8), names[1]: entry("U8", [3], 8, 11)}
    return safetensors(entries, bytes(range(11)))


def index(weight_map: object) -> bytes:
    return json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}).encode()


@pytest.fixture
def official(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder whose weights the safetensors package wrote, in every dtype we read."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 32, generator=generator)
    tensors = {
        "f32": values,
        "bf16": values.bfloat16(),
        "f16": values.half(),
        "f64": values.double(),
        "fp8": values.to(torch.float8_e4m3fn),
        "bytes": torch.arange(12, dtype=torch.uint8).view(3, 4),
        "i8": torch.arange(-4, 4, dtype=torch.int8),
        "i16": torch.arange(-4, 4, dtype=torch.int16),
        "i32": torch.arange(-4, 4, dtype=torch.int32),
        "multipliers": torch.tensor(MULTIPLIERS),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "cube": values.view(2, 3, 32).clone(),
        "none": torch.empty(0, 4),
    }
    folder = folder_of(tmp_path, {})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, tensors


def test_tensors_of_the_safetensors_package(
    official: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, tensors = official
    checkpoint = open_checkpoint(folder)
    assert checkpoint.kind == "safetensors"
    assert checkpoint.files == (folder / "model.safetensors",)
    assert checkpoint.metadata["config.json"] == {"model_type": "qwen4_exp"}
    assert set(checkpoint.tensors) == set(tensors)
    for name, wanted in tensors.items():
        info = checkpoint.tensors[name]
        stored = checkpoint.bytes_of(name)
        assert info.shape == tuple(wanted.shape)
        assert info.nbytes == wanted.numel() * wanted.element_size() == stored.size
        assert stored.tobytes() == wanted.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert checkpoint.tensors["fp8"].format.name == "F8_E4M3"


def test_integers_stay_exact(official: tuple[Path, dict[str, torch.Tensor]]) -> None:
    checkpoint = open_checkpoint(official[0])
    for name in ("multipliers", "i8", "i16", "i32", "flags", "f64", "scalar", "f16"):
        info = checkpoint.tensors[name]
        array = plain_array(checkpoint.bytes_of(name), info.format, info.shape)
        assert not array.flags.owndata
        assert np.array_equal(array, official[1][name].numpy())
    with pytest.raises(AssertionError, match="no numpy type"):
        plain_array(checkpoint.bytes_of("bf16"), checkpoint.tensors["bf16"].format, (6, 32))


def test_torch_views_share_the_mapping(official: tuple[Path, dict[str, torch.Tensor]]) -> None:
    checkpoint = open_checkpoint(official[0])
    data, info = checkpoint.bytes_of("bf16"), checkpoint.tensors["bf16"]
    q = quant_tensor(data, info.format, info.rows, info.cols)
    assert (q.shape, q.nbytes) == ((6, 32), 384)
    assert q.data_RB.data_ptr() == data.ctypes.data
    checkpoint.close()
    del checkpoint, data
    assert torch.equal(q.data_RB.view(torch.bfloat16), official[1]["bf16"])
    assert bytes_view(np.empty(0, np.uint8)).shape == (0,)


def test_side_files_are_parsed_under_their_names(tmp_path: Path) -> None:
    files = {
        "model.safetensors": two(),
        "generation_config.json": b'{"eos_token_id": [248046, 248044]}',
        "hf_quant_config.json": b'{"producer": {"name": "modelopt"}}',
        "tokenizer.json": b"not read here",
    }
    metadata = open_checkpoint(folder_of(tmp_path, files)).metadata
    assert set(metadata) == {"config.json", "generation_config.json", "hf_quant_config.json"}
    assert metadata["generation_config.json"] == {"eos_token_id": [248046, 248044]}


def test_sharded_folder(tmp_path: Path) -> None:
    one, other = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    files = {
        one: two(),
        other: two(("c", "d")),
        "model.safetensors.index.json": index({"a": one, "b": one, "c": other, "d": other}),
    }
    folder = folder_of(tmp_path, files)
    checkpoint = open_checkpoint(folder)
    assert [t.path.name for t in checkpoint.tensors.values()] == [one, one, other, other]
    assert checkpoint.bytes_of("d").tolist() == [8, 9, 10]
    (folder / "model.safetensors.index.json").unlink()
    assert list(open_checkpoint(folder).tensors) == ["a", "b", "c", "d"]
    (folder / one).unlink()
    with pytest.raises(CheckpointNotFound, match=f"lacks {one}"):
        open_checkpoint(folder)


INDEXED = {"model.safetensors": two(), "x.safetensors": two(("c", "d"))}
X, M = "x.safetensors", "model.safetensors"


@pytest.mark.parametrize(
    ("weight_map", "error", "message"),
    [
        ({"a": M, "b": M, "c": X, "d": "y.safetensors"}, CheckpointNotFound, "lacks y.safetensors"),
        ({"a": M, "b": M, "c": X, "d": X, "e": X}, CheckpointMalformed, "lists tensor 'e' in x.*"),
        ({"a": M, "b": M, "c": X}, CheckpointMalformed, "has tensor 'd', which"),
        ({"a": M, "b": X, "c": X, "d": X}, CheckpointMalformed, "'b' in x.* it is in model.safet"),
        ({"a": M, "b": M}, CheckpointMalformed, "x.safetensors is not listed in"),
        ({"a": "../model.safetensors"}, CheckpointMalformed, "which is not the name of"),
        ({"a": "/etc/x.safetensors"}, CheckpointMalformed, "which is not the name of"),
        ({"a": "model.bin"}, CheckpointMalformed, "which is not the name of"),
        ({"a": 7}, CheckpointMalformed, "puts tensor 'a' into 7"),
        ({}, CheckpointMalformed, "has no weight_map"),
        ([], CheckpointMalformed, "has no weight_map"),
    ],
)
def test_index_that_contradicts_the_shards(
    tmp_path: Path, weight_map: object, error: type[Exception], message: str
) -> None:
    files = {**INDEXED, "model.safetensors.index.json": index(weight_map)}
    with pytest.raises(error, match=message):
        open_checkpoint(folder_of(tmp_path, files))


def test_same_tensor_in_two_files(tmp_path: Path) -> None:
    files = {"1.safetensors": two(), "2.safetensors": two(("b", "c"))}
    with pytest.raises(CheckpointMalformed, match=r"'b' is both in .*1\.safe.* and in .*2\.safe"):
        open_checkpoint(folder_of(tmp_path, files))


DATA = bytes(range(16))
GOOD = entry("F32", [2], 0, 8)
WRONG = {
    "empty": (b"", "claims a header of 0 bytes and has 0 bytes"),
    "short": (b"\1\0\0", "has 3 bytes in all"),
    "header longer than the file": (u64(1 << 40) + b"{}", "header of 1099511627776 bytes"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "no JSON": (safetensors(b"{..}"), "cannot be read"),
    "not UTF-8": (safetensors(b'{"\xff": 1}'), "cannot be read"),
    "deep JSON": (safetensors(b'{"a":' + b"[" * 100_000), "nests too deeply"),
    "huge integer": (safetensors(b'{"a":' + b"9" * 5000 + b"}"), "cannot be read"),
    "a list": (safetensors(b"[]"), "is not an object"),
    "tensor twice": (
        safetensors(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":7}'),
        "key 'a' occurs twice",
    ),
    "entry is a number": (safetensors({"a": 7}), "'a' has no entry of exactly"),
    "entry lacks a field": (safetensors({"a": {"dtype": "F32", "shape": []}}), "'a' has no entry"),
    "surplus field": (safetensors({"a": {**GOOD, "x": 1}}, bytes(8)), "'a' has no entry"),
    "empty name": (safetensors({"": GOOD}, bytes(8)), "'' has a name of 0 characters"),
    "negative size": (safetensors({"a": entry("F32", [-2], 0, 8)}, bytes(8)), "'a' has a shape"),
    "size is true": (safetensors({"a": entry("U8", [True], 0, 1)}, bytes(1)), "'a' has a shape"),
    "size 2.0": (safetensors({"a": entry("F32", [2.0], 0, 8)}, bytes(8)), "'a' has a shape"),
    "rank 9": (safetensors({"a": entry("F32", [1] * 9, 0, 4)}, bytes(4)), "'a' has a shape"),
    "offset is text": (safetensors({"a": entry("F32", [2], "0", 8)}, bytes(8)), "'a' has data_off"),
    "offset 2^63": (safetensors({"a": entry("U8", [1], 1 << 63, 8)}, DATA), "'a' has data_off"),
    "wrong byte count": (
        safetensors({"a": entry("F32", [2, 2], 0, 8)}, bytes(8)),
        r"'a' of shape \[2, 2\] and type F32 takes 16 bytes, not 0 to 8",
    ),
    "backwards": (safetensors({"a": entry("F32", [2], 8, 0)}, bytes(8)), "'a' of shape"),
    "huge shape": (
        safetensors({"a": entry("U8", [1 << 62] * 8, 0, 8)}, bytes(8)),
        "'a' of shape",
    ),
    "past the end": (safetensors({"a": entry("F32", [2], 0, 8)}, bytes(7)), "'a' should end at"),
    "overlap": (
        safetensors({"a": GOOD, "b": entry("F32", [2], 4, 12)}, bytes(12)),
        "'a' and 'b' overlap",
    ),
    "hole": (
        safetensors({"a": GOOD, "b": entry("U8", [4], 12, 16)}, DATA),
        "4 bytes before tensor 'b'",
    ),
    "late start": (safetensors({"a": entry("U8", [4], 4, 8)}, bytes(8)), "4 bytes before"),
    "tail": (safetensors({"a": GOOD}, bytes(9)), "1 bytes after its last tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, message = WRONG[case]
    folder = folder_of(tmp_path, {"model.safetensors": content})
    with pytest.raises(CheckpointMalformed, match=message) as caught:
        open_checkpoint(folder)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E8M0", "F4", "U64", "f32", None, 7])
def test_unknown_dtype_is_refused_by_name(tmp_path: Path, dtype: object) -> None:
    content = safetensors({"odd": entry(dtype, [8], 0, 8)}, bytes(8))
    folder = folder_of(tmp_path, {"model.safetensors": content})
    with pytest.raises(TensorTypeUnknown, match=f"'odd' is stored as {dtype!r}"):
        open_checkpoint(folder)


def test_a_header_over_the_limit_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", u64(100_000_001) + b"{}")
    with path.open("r+b") as file:
        file.truncate(200_000_000)
    with pytest.raises(CheckpointMalformed, match="header of 100000001 bytes"):
        open_checkpoint(folder_of(tmp_path, {}))


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    single = write(tmp_path / "model.safetensors", two())
    with pytest.raises(CheckpointNotFound, match="without its configuration; give the folder"):
        open_checkpoint(single)
    with pytest.raises(CheckpointNotFound, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    single.unlink()
    with pytest.raises(CheckpointNotFound, match=r"has no \.safetensors file"):
        open_checkpoint(folder_of(tmp_path, {}))


@pytest.mark.parametrize("config", [b"", b"{", b"[]", b"\xff", b'{"a": 1, "a": 2}'])
def test_broken_config(tmp_path: Path, config: bytes) -> None:
    folder = folder_of(tmp_path, {"model.safetensors": two(), "config.json": config})
    with pytest.raises(CheckpointMalformed, match=r"config\.json"):
        open_checkpoint(folder)
