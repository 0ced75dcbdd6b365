"""How many prompt tokens an engine computes in one go: the setting, or the device's best."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from civetta.engine.engine import Engine
from civetta.engine.protocol import Finished
from civetta.options import PREFILL_BATCH_CPU, PREFILL_BATCH_GPU, EngineOptions
from engine.fakes import END_OF_TEXT, ByteTokenizer, FakeModel, ask, info

pytestmark = pytest.mark.timeout(60)
PROMPT = 9000


def launches(device: str, options: EngineOptions) -> list[int]:
    model = FakeModel(lambda ids: END_OF_TEXT)
    about = replace(info(PROMPT + 10), device=device)
    with Engine(model, about, tokenizer=ByteTokenizer(), template=None, options=options) as engine:
        events = list(engine.submit(ask([65] * PROMPT)))
    assert isinstance(events[-1], Finished)
    return list(itertools.chain.from_iterable(model.launches))


def split(batch: int) -> list[int]:
    whole, rest = divmod(PROMPT, batch)
    return [batch] * whole + [rest] * bool(rest)


@pytest.mark.parametrize(
    ("device", "batch"), [("cpu", PREFILL_BATCH_CPU), ("cuda:0", PREFILL_BATCH_GPU)]
)
def test_a_lone_prompt_takes_the_devices_best(device: str, batch: int) -> None:
    """`prefill_chunk` bounds a prefill beside replies under way only."""
    assert launches(device, EngineOptions(prefill_chunk=64)) == split(batch)


@pytest.mark.parametrize("batch", [64, 1000, 8192])
def test_the_setting_wins_over_the_devices_best(batch: int) -> None:
    assert launches("cuda", EngineOptions(prefill_batch=batch)) == split(batch)


def test_the_best_on_a_gpu_is_4096() -> None:
    assert PREFILL_BATCH_GPU == 4096
    assert EngineOptions().batch_on("cuda:1") == 4096
    assert EngineOptions(prefill_batch=512).batch_on("cpu") == 512
