from __future__ import annotations

import json
from pathlib import Path

import pytest

from civetta import errors
from civetta.config import read_cache_folder
from civetta.model.build import check_checkpoint
from civetta.model.tiny import default_model_path


def test_the_default_model_is_written_once(tmp_path):
    first = default_model_path(tmp_path)
    before = (first / "model.safetensors").stat()
    assert default_model_path(tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    assert check_checkpoint(first).config.layers == 4
    assert json.loads((first / "config.json").read_text())["model_type"] == "qwen4_exp"


def test_many_first_starts_at_once_agree(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(6) as pool:
        found = set(pool.map(lambda _: default_model_path(tmp_path), range(6)))
    assert len(found) == 1
    assert len(list(found.pop().parent.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "civetta").write_text("a file in its place")
    with pytest.raises(errors.CheckpointNotFound, match=r"built-in model .*civetta.* -m"):
        default_model_path(tmp_path)


def test_the_cache_folder_is_read_from_the_environment(tmp_path):
    assert read_cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path
    for env in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert read_cache_folder(env) == Path("~/.cache").expanduser()
