"""Split models, what a GGUF file is for, and which file of a folder is the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from checkpoint.handmade import (
    BOOL,
    STRING,
    U32,
    architecture,
    gguf,
    key,
    part_keys,
    tensor,
    text,
    u32,
    write,
)
from civetta.checkpoint.gguf_split import gguf_role, read_gguf, shares_target_tensors
from civetta.checkpoint.source import open_checkpoint
from civetta.errors import CheckpointMalformed, CheckpointNotFound

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def part_name(number: int, count: int = 3) -> str:
    return f"model-UD-Q4-{number:05}-of-{count:05}.gguf"


def part(
    number: int, names: Sequence[str], *, total: int, count: int = 3, arch: bool = True
) -> bytes:
    """Part `number` (from 0) with one 32-byte tensor a name, filled with the part's number."""
    keys = part_keys(number, count, total)
    if arch:
        keys.insert(0, architecture())
    entries = [tensor(name, [8], offset=32 * i) for i, name in enumerate(names)]
    return gguf(keys, entries, bytes([number]) * 32 * len(names))


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three parts; the first has metadata only, as published models do."""
    contents = [
        part(0, [], total=3),
        part(1, ["blk.0.a", "blk.0.b"], total=3, arch=False),
        part(2, ["blk.1.a"], total=3),
    ]
    return [write(tmp_path / part_name(i + 1), content) for i, content in enumerate(contents)]


@pytest.mark.parametrize("given", [0, 1, 2, None])
def test_any_part_or_the_folder_opens_the_whole_model(parts: list[Path], given: int | None) -> None:
    checkpoint = open_checkpoint(parts[0].parent if given is None else parts[given])
    assert checkpoint.path == parts[0]
    assert checkpoint.files == tuple(parts)
    assert list(checkpoint.tensors) == ["blk.0.a", "blk.0.b", "blk.1.a"]
    assert checkpoint.metadata["general.architecture"] == "qwen4exp"
    assert checkpoint.metadata["split.no"] == 0
    assert [checkpoint.bytes_of(name)[0] for name in checkpoint.tensors] == [1, 1, 2]
    assert [t.path for t in checkpoint.tensors.values()] == [parts[1], parts[1], parts[2]]


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(CheckpointNotFound, match=r"lacks model-UD-Q4-00002-of-00003.gguf, 1 of 3"):
        open_checkpoint(parts[2])
    parts[0].unlink()
    with pytest.raises(CheckpointNotFound, match=r"00001-of-00003.gguf and 1 more, 2 of 3"):
        open_checkpoint(parts[2].parent)


@pytest.mark.parametrize(
    ("index", "content", "message"),
    [
        (1, part(1, ["x", "y"], total=3, count=4), "00002.* one of 4 parts, but its name says 3"),
        (1, part(2, ["x", "y"], total=3), "named part 2 but says that it is part 3"),
        (1, part(1, ["x"], total=3), "announces 3 tensors, but its 3 parts have 2"),
        (1, part(1, ["x", "blk.1.a"], total=3), "'blk.1.a' is both in .*00002.* and in .*00003"),
        (1, gguf([], [tensor("x", [8])], bytes(32)), "one of 1 parts"),
        (1, gguf([architecture("llama"), *part_keys(1, 3, 3)]), "'llama', part 1 of 'qwen4exp'"),
        (0, gguf([architecture(), key("split.count", STRING, text("3"))]), "split.count is not an"),
    ],
)
def test_parts_that_do_not_belong_together(
    parts: list[Path], index: int, content: bytes, message: str
) -> None:
    write(parts[index], content)
    with pytest.raises(CheckpointMalformed, match=message):
        open_checkpoint(parts[0])


def test_a_part_under_another_name(parts: list[Path], tmp_path: Path) -> None:
    renamed = parts[1].rename(tmp_path / "mine.gguf")
    with pytest.raises(CheckpointMalformed, match="one of 3 parts, but its name says 1"):
        open_checkpoint(renamed)
    impossible = write(tmp_path / "m-00004-of-00003.gguf", gguf())
    with pytest.raises(CheckpointMalformed, match="not a possible part of 3"):
        open_checkpoint(impossible)


def test_a_single_part_of_one(tmp_path: Path) -> None:
    for keys in ([], part_keys(0, 1, 1), part_keys(0, 0, 0)):
        path = write(tmp_path / part_name(1, 1), gguf(keys, [tensor("x", [8])], bytes(32)))
        assert list(open_checkpoint(path).tensors) == ["x"]


def mtp_keys(blocks: int = 49, *, shared: bool | None = None) -> list[bytes]:
    keys = [
        architecture(),
        key("qwen4exp.block_count", U32, u32(blocks)),
        key("qwen4exp.nextn_predict_layers", U32, u32(1)),
    ]
    if shared is not None:
        keys.append(key("qwen4exp.nextn_shared_target_tensors", BOOL, bytes([shared])))
    return keys


def one_tensor(keys: list[bytes], *names: str) -> bytes:
    entries = [tensor(name, [8], offset=32 * i) for i, name in enumerate(names)]
    return gguf(keys, entries, bytes(32 * len(names)))


ROLES = {
    "trunk": (one_tensor([architecture()], "blk.0.a", "output.weight"), "model"),
    "head": (one_tensor(mtp_keys(), "blk.48.nextn.enorm.weight", "output.weight"), "mtp"),
    "head in the file of the trunk": (one_tensor(mtp_keys(), "blk.0.a", "blk.48.a"), "model"),
    "trunk that names a head it lacks": (one_tensor(mtp_keys(), "blk.0.a", "blk.47.a"), "model"),
    "vision": (one_tensor([architecture("clip")], "v.blk.0.ln1.weight"), "mmproj"),
    "no architecture": (one_tensor([], "blk.0.a"), "model"),
    "no block of any kind": (one_tensor(mtp_keys(), "output.weight"), "model"),
}


@pytest.mark.parametrize("case", ROLES)
def test_role(tmp_path: Path, case: str) -> None:
    content, role = ROLES[case]
    model = read_gguf(write(tmp_path / "m.gguf", content))
    assert model.role == role == gguf_role(model.metadata, model.tensors)


@pytest.mark.parametrize(("flag", "shares"), [(None, False), (False, False), (True, True)])
def test_shared_head(tmp_path: Path, flag: bool | None, shares: bool) -> None:
    path = write(tmp_path / "m.gguf", one_tensor(mtp_keys(shared=flag), "blk.48.a"))
    assert shares_target_tensors(read_gguf(path).metadata) is shares


def test_folder_with_sidecars(tmp_path: Path) -> None:
    write(tmp_path / "a-mmproj.gguf", ROLES["vision"][0])
    write(tmp_path / "b-mtp.gguf", ROLES["head"][0])
    with pytest.raises(CheckpointNotFound, match=r"sidecars but no model: a-mmproj.gguf, b-mtp"):
        open_checkpoint(tmp_path)
    model = write(tmp_path / "c.gguf", ROLES["trunk"][0])
    assert open_checkpoint(tmp_path).path == model
    write(tmp_path / "d.gguf", ROLES["trunk"][0])
    with pytest.raises(CheckpointNotFound, match=r"several models: c.gguf, d.gguf\. Give the path"):
        open_checkpoint(tmp_path)


def test_folder_with_config_but_gguf_weights_only(tmp_path: Path) -> None:
    write(tmp_path / "config.json", b"{}")
    model = write(tmp_path / "c.gguf", ROLES["trunk"][0])
    assert open_checkpoint(tmp_path).path == model


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"neither a .gguf file nor a config.json"):
        open_checkpoint(tmp_path)
