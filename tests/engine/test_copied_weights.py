"""`--weights`: views of the files or copies, in trunk, draft head and tower; the numbers are the same."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import pictures
import tiny_vision
from civetta.chat.images import prepare_image
from civetta.engine.load import COPIED_BYTES, find_vision, load_engine, load_trunk_only
from civetta.errors import UsageError
from civetta.model.bind_table import GGUF_TABLE
from civetta.model.embedded import embedded_model_path
from civetta.model.vision_build import LazyTower
from civetta.options import DraftingOptions, ModelOptions, Settings

pytestmark = pytest.mark.timeout(120)


def mapped_ranges(files):
    """Where the files lie in this process."""
    names = {str(Path(file).resolve()) for file in files}
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    ranges = [line[0].split("-") for line in lines if len(line) == 6 and line[5] in names]
    return [(int(start, 16), int(stop, 16)) for start, stop in ranges]


def views_of(files):
    """Tensors that are views of the mapped files."""
    ranges = mapped_ranges(files)
    gc.collect()
    found = [item for item in gc.get_objects() if type(item) is torch.Tensor and item.numel()]
    found = [item for item in found if item.device.type == "cpu"]
    return [t for t in found if any(low <= t.data_ptr() < high for low, high in ranges)]


def computed(model, weights):
    """Logits of a few tokens and rows of a picture, and how many tensors were views meanwhile."""
    settings = Settings(
        model=ModelOptions(model=str(model), threads=1, weights=weights),
        drafting=DraftingOptions(speculative="mtp"),
    )
    loaded = load_trunk_only(settings)
    assert loaded.trunk.head is not None
    vision = find_vision(settings.vision, loaded.checked)
    tower = LazyTower(
        vision, dtype=loaded.trunk.dtype, ops=loaded.ops, device=loaded.trunk.device,
        copied=loaded.copied,
    )  # fmt: skip
    encoding = tower.begin(
        prepare_image(pictures.encoded(pictures.flat(64, 64, "red")), vision.rules)
    )
    while not encoding.advance():
        pass
    store = loaded.trunk.store(sessions=1, context_tokens=64)
    with torch.no_grad():
        logits = loaded.trunk.forward(store.open(), list(range(3, 13)))
    return logits, encoding.rows_NW, len(views_of(loaded.checked.checkpoint.files))


def test_copies_are_no_views_and_compute_the_same(tmp_path):
    model = tiny_vision.write(tmp_path / "model")
    mapped_logits, mapped_rows, mapped_views = computed(model, "mapped")
    assert mapped_views > 20  # the search finds what there is
    logits, rows, views = computed(model, "copied")
    assert views == 0
    assert torch.equal(logits, mapped_logits)
    assert torch.equal(rows, mapped_rows)


def test_small_models_are_copied_by_themselves(monkeypatch):
    def copied(limit):
        monkeypatch.setattr("civetta.engine.load.COPIED_BYTES", limit)
        return load_trunk_only(Settings(model=ModelOptions(threads=1))).copied

    assert embedded_model_path().stat().st_size < COPIED_BYTES
    assert copied(COPIED_BYTES)
    assert not copied(1 << 20)


def test_a_gpu_takes_no_such_choice(monkeypatch):
    monkeypatch.setattr("civetta.engine.load.resolve_device", lambda _: torch.device("cuda:0"))
    monkeypatch.setattr("civetta.engine.load.choose_ops", lambda _: None)
    with pytest.raises(UsageError, match="--weights copied is for a CPU"):
        load_trunk_only(Settings(model=ModelOptions(weights="copied")))


def test_a_sidecar_counts_among_the_small_weights(monkeypatch):
    """With room for the text model alone, the tower stays in its file; on demand it never does."""
    model = embedded_model_path()
    whole = sum(file.stat().st_size for file in model.parent.glob("*.gguf"))

    def kept(limit, weights):
        monkeypatch.setattr("civetta.engine.load.COPIED_BYTES", limit)
        options = ModelOptions(threads=1, weights=weights)
        with load_engine(Settings(model=options)) as engine:
            return engine._loop._model._tower._copied

    trunk = load_trunk_only(Settings(model=ModelOptions(threads=1)))
    needed = sum(i.nbytes for n, i in trunk.checked.checkpoint.tensors.items() if n != GGUF_TABLE)
    assert kept(whole, "auto")
    assert not kept(needed + 1, "auto")
    assert kept(needed + 1, "copied")
    assert not kept(whole, "mapped")
