"""Another model, precision or version never gets another's states."""

from __future__ import annotations

import os

import pytest

from civetta.cache.fingerprint import model_fingerprint


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(256)) * 40_000)
    os.utime(path, ns=(1, 1))
    return path


def test_the_same_model_has_the_same_fingerprint(model):
    first = model_fingerprint([model], {"dtype": "f32", "device": "cpu"})
    assert len(bytes.fromhex(first)) == 32
    assert model_fingerprint([model], {"device": "cpu", "dtype": "f32"}) == first


def test_every_difference_shows(model):
    first = model_fingerprint([model], {"dtype": "f32"})
    assert model_fingerprint([model], {"dtype": "bf16"}) != first
    assert model_fingerprint([model, model], {"dtype": "f32"}) != first
    os.utime(model, ns=(1, 2))
    assert model_fingerprint([model], {"dtype": "f32"}) != first
    os.utime(model, ns=(1, 1))
    raw = bytearray(model.read_bytes())
    raw[:4096] = bytes(4096)
    model.write_bytes(raw)
    os.utime(model, ns=(1, 1))
    assert model_fingerprint([model], {"dtype": "f32"}) != first


def test_small_and_empty_files_count(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"")
    empty = model_fingerprint([path], {})
    path.write_bytes(b"x")
    os.utime(path, ns=(0, 0))
    assert model_fingerprint([path], {}) != empty
