from __future__ import annotations

import pytest
from tiny_logits import TEXT_IDS, TINY, hf_logits

import tiny_gguf
from civetta.checkpoint.source import Checkpoint


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    found = hf_logits(tmp_path_factory.mktemp("original") / "hf", TINY)
    assert found.std() > 0.1
    assert len(TEXT_IDS) > 100 > TINY.text["indexer_budget"]
    return found


@pytest.fixture
def untouched(monkeypatch):
    """No byte of any tensor may be read."""

    def refuse(self, name):
        raise AssertionError(f"the data of {name} was read")

    monkeypatch.setattr(Checkpoint, "bytes_of", refuse)


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return tiny_gguf.write_gguf(path, tiny_gguf.gguf_metadata(TINY), tiny_gguf.gguf_tensors(TINY))
