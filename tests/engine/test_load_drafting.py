"""Drafting by the settings: which head is taken, what is refused, and the reply that stays."""

from __future__ import annotations

import pytest

import tiny as writers
import tiny_gguf
from civetta.engine.load import load_engine
from civetta.errors import CheckpointNotFound, UsageError
from civetta.options import DraftingOptions, ModelOptions, Settings
from civetta.types import SamplingParams
from engine.drafting import replies, said
from engine.fakes import ask

TINY = writers.make(2)
REQUEST = ask(
    [*range(40, 60)] * 3, sampling=SamplingParams(temperature=0.8, seed=5, top_k=8), max_tokens=12
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    metadata, tensors = tiny_gguf.gguf_metadata(TINY), tiny_gguf.gguf_tensors(TINY)
    tiny_gguf.write_gguf(folder / "tiny.gguf", metadata, tensors)
    (folder / "elsewhere").mkdir()
    tiny_gguf.write_gguf(
        folder / "elsewhere" / "mtp.gguf",
        tiny_gguf.draft_metadata(TINY, shared=True),
        tiny_gguf.draft_tensors(TINY, shared=True),
    )
    return folder


def loaded(model, **drafting):
    options = ModelOptions(model=str(model), threads=1, context=256)
    return load_engine(Settings(model=options, drafting=DraftingOptions(**drafting)))


def test_a_reply_is_the_same_in_every_mode(folder):
    model, head = folder / "tiny.gguf", str(folder / "elsewhere" / "mtp.gguf")
    found = []
    for drafting in (
        {},
        {"speculative": "lookup"},
        {"speculative": "mtp", "mtp_model": head},
        {"speculative": "mtp", "mtp_model": head, "mtp_norm": "stream", "draft_tokens": 2},
    ):
        with loaded(model, **drafting) as engine:
            found.append(said(replies(engine, [REQUEST])))
    assert found[1:] == found[:1] * 3
    assert len(found[0][0]["ids"]) > 1


def test_a_head_in_the_models_files_needs_no_flag(tmp_path):
    path = writers.write_hf(tmp_path / "hf", TINY.config, writers.stored(TINY.tensors))
    with loaded(path, speculative="mtp") as engine:
        assert replies(engine, [REQUEST])[0]["ids"]


def test_a_model_without_head_says_what_to_do(folder):
    with pytest.raises(UsageError, match=r"--mtp-model.*--speculative lookup"):
        loaded(folder / "tiny.gguf", speculative="mtp")


def test_a_sidecar_that_is_none_is_refused(folder):
    with pytest.raises(CheckpointNotFound, match="no draft head"):
        loaded(folder / "tiny.gguf", speculative="mtp", mtp_model=str(folder / "tiny.gguf"))


def test_a_head_that_is_not_there_is_told_by_its_flag(folder, tmp_path):
    """Not by the model's, whose path is right."""
    missing = tmp_path / "nowhere.gguf"
    with pytest.raises(CheckpointNotFound) as caught:
        loaded(folder / "tiny.gguf", speculative="mtp", mtp_model=str(missing))
    assert str(caught.value) == (
        f"There is nothing at {missing}. Check the path of the draft head (--mtp-model)."
    )


def test_a_sidecar_without_mode_is_a_contradiction(folder):
    with pytest.raises(UsageError, match="--speculative mtp"):
        loaded(folder / "tiny.gguf", mtp_model="x.gguf")
