"""The n-gram rows of a prompt are asked for at admission, and its first launch claims them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from civetta.engine.load import load_engine
from civetta.model.tiny import write_tiny
from civetta.ngram.feed import RowFeed
from civetta.options import EngineOptions, ModelOptions, Settings
from civetta.types import SamplingParams
from engine.fakes import ask

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def feeds(monkeypatch):
    """The feeds that are made from now on."""
    made = []
    init = RowFeed.__init__

    def watched(self, *args, **options):
        init(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(RowFeed, "__init__", watched)
    return made


@pytest.mark.parametrize("prompt", [40, 700])
def test_a_prompt_s_first_gather_starts_at_its_admission(feeds, tmp_path: Path, prompt):
    """Beside a reply under way: not a row of the prompt is asked for by its own launch."""
    model = ModelOptions(model=str(write_tiny(tmp_path)), threads=1, ngram_placement="disk")
    options = EngineOptions(sessions=2, prefill_batch=256, prefill_chunk=64)
    with load_engine(Settings(model=model, engine=options)) as engine:
        (feed,) = feeds
        stream = engine.submit(
            ask([1, 2, 3], sampling=SamplingParams(temperature=0), max_tokens=2000, ignore_eos=True)
        )
        events = iter(stream)
        for _ in range(4):
            next(events)
        reader = threading.Thread(target=lambda: list(events))
        reader.start()
        plain, claimed = feed.stats().plain, feed.stats().claimed
        later = [7 + i % 90 for i in range(prompt)]
        list(engine.submit(ask(later, sampling=SamplingParams(temperature=0), max_tokens=1)))
        assert feed.stats().plain == plain
        assert feed.stats().claimed >= claimed + -(-prompt // 64)
        stream.cancel()
        reader.join(60)
        assert not reader.is_alive()
