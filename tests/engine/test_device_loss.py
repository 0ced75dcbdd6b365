"""A device that fails for good: everybody is told, nothing is tried again, and the process ends."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from civetta.engine import engine as engine_module
from civetta.engine.device import device_bytes, device_fault
from civetta.engine.engine import Engine
from civetta.errors import DeviceLost, RequestFailed
from civetta.options import EngineOptions
from engine.fakes import ByteTokenizer, FakeModel, ask, info, says, wait_until

pytestmark = pytest.mark.timeout(60)
FAULT = "CUDA error: an illegal memory access was encountered"


class Broken:
    """A model's hook: waits until it may go on, then raises at every launch."""

    def __init__(self):
        self.launches, self.reached, self.opened = 0, threading.Event(), threading.Event()

    def __call__(self, session, ids):
        self.launches += 1
        self.reached.set()
        assert self.opened.wait(50)
        raise RuntimeError(FAULT + "\nCompile with TORCH_USE_CUDA_DSA")


def engine_of(hook):
    return Engine(
        FakeModel(says(1, "ok"), on_forward=hook),
        info(),
        tokenizer=ByteTokenizer(),
        template=None,
        options=EngineOptions(sessions=2),
    )


def test_all_hear_of_it_at_once_and_nothing_is_tried_again(monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(engine_module, "device_fault", lambda device: asked.append(1) or FAULT)
    hook = Broken()
    with caplog.at_level(logging.INFO, "civetta"), engine_of(hook) as engine:
        first = engine.submit(ask("x"))
        assert hook.reached.wait(50)
        streams = [first, *(engine.submit(ask(text)) for text in "abc")]
        assert not engine.stats().device_lost
        hook.opened.set()
        for stream in streams:
            with pytest.raises(DeviceLost, match=f"is lost \\({FAULT}\\), .* start it again"):
                list(stream)
        wait_until(lambda: engine.stats().running == engine.stats().waiting == 0, 50)
        with pytest.raises(DeviceLost):
            engine.submit(ask("late"))
        assert engine.stats().device_lost
        assert engine.stats().requests_failed_total == 4
    assert hook.launches == len(asked) == 1
    assert [r.levelname for r in caplog.records if "device_lost fault=" in r.getMessage()] == [
        "CRITICAL"
    ]
    assert caplog.text.count("step_failed") == 1


def test_a_fault_after_which_the_device_computes_is_the_requests_own(monkeypatch):
    asked = []
    monkeypatch.setattr(engine_module, "device_fault", asked.append)
    hook = Broken()
    hook.opened.set()
    with engine_of(hook) as engine:
        with pytest.raises(RequestFailed):
            list(engine.submit(ask("x")))
        assert not engine.stats().device_lost
        with pytest.raises(RequestFailed):
            list(engine.submit(ask("y")))
    assert asked == [info().device] * 2


def test_the_device_is_asked_in_the_drivers_words(monkeypatch):
    def gone(device):
        raise RuntimeError(f"{FAULT}\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    assert device_fault("cuda:0") == FAULT
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert device_fault("cuda:0") is None
    assert device_fault("cpu") is None
    assert device_bytes("cpu") == 0
