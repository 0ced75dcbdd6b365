from __future__ import annotations

import logging
import threading

import pytest

from civetta.engine.engine import Engine
from civetta.engine.stall import StallWatch
from civetta.options import EngineOptions
from engine.fakes import ByteTokenizer, FakeModel, ask, info, says, wait_until

pytestmark = pytest.mark.timeout(60)


def test_one_stall_is_told_once_and_its_end_too(caplog):
    ages = iter([0.0, 3.0, 11.0, 14.0, 2.0, 12.0])
    now = [0.0]
    watch = StallWatch(lambda: now[0], timeout_s=10.0, whose=lambda: ["r1", "r2"])
    told = []
    for age_s in ages:
        now[0] = age_s
        with caplog.at_level(logging.WARNING, "civetta"):
            watch.look()
        told.append(len(caplog.records))
    assert told == [0, 0, 1, 1, 2, 3]
    assert "step_stalled seconds=11 running=r1,r2" in caplog.records[0].getMessage()
    assert caplog.records[1].getMessage() == "step_resumed"
    assert watch.stalls == 2
    assert watch.stalled_s == 12.0


def test_an_engine_whose_step_hangs_says_so_in_its_stats(caplog):
    gate = threading.Event()
    caplog.set_level(logging.CRITICAL, "civetta")
    model = FakeModel(says(1, "a"), on_forward=lambda session, ids: gate.wait(30))
    options = EngineOptions(stall_timeout_ms=40)
    with Engine(model, info(), tokenizer=ByteTokenizer(), template=None, options=options) as engine:
        stream = engine.submit(ask("x"))
        wait_until(lambda: engine.stats().stalls_total == 1)
        assert engine.stats().stalled_s > 0.04
        gate.set()
        list(stream)
        wait_until(lambda: engine.stats().stalled_s == 0)
        assert engine.stats().stalls_total == 1
