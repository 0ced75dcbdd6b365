"""Decoding does the same work whatever kind of request came before: text, images, in every order.

Time is not asked here, since it is noisy (benchmarks/image_transitions.py measures it), but every call
that the step thread makes while it decodes: Python functions and compiled ones, by name.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections import Counter

import pytest

import pictures
import tiny_vision
from civetta.chat.image_source import bytes_part
from civetta.chat.message import Conversation, Message, TextPart
from civetta.decode import lengths
from civetta.engine.client import ChatClient, ReplyOptions
from civetta.types import SamplingOverrides
from engine.drafting import Bench, replies

pytestmark = pytest.mark.timeout(240)
TEXT = ("The red fox ran over the green hill. " * 6,)
IMAGES = (
    "What are these? ",
    pictures.encoded(pictures.flat(96, 64, "red")),
    pictures.encoded(pictures.noise(128, 96)),
)
OURS = ("civetta", "torch", "Tensor")
"""What is compared; how often a lock wakes the thread that reads the reply is left to chance."""
ORDERS = [order for order in itertools.product(("text", "images"), repeat=3) if len(set(order)) > 1]


class Watched:
    """An engine of one session whose calls within rounds of decoding are counted."""

    def __init__(self, bench, **drafting):
        self.calls: Counter[str] = Counter()
        self.counting = False
        threading.setprofile(self._see)  # for the threads that start from here on
        try:
            self.engine = bench.engine(context=1024, **drafting)
        finally:
            threading.setprofile(None)
        decoding = self.engine._loop._decoding
        run = decoding.run

        def counted(jobs):
            self.counting = True
            try:
                run(jobs)
            finally:
                self.counting = False

        decoding.run = counted

    def _see(self, frame, event, called):
        if not self.counting or threading.current_thread().name != "civetta-step":
            return
        if event == "call":
            self.calls[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            self.calls[f"{called.__module__}.{called.__qualname__}"] += 1

    def calls_of(self, kind):
        """The calls of one reply's decoding, and the reply."""
        parts = [
            TextPart(text=part) if isinstance(part, str) else bytes_part(part, index=1)
            for part in (TEXT if kind == "text" else IMAGES)
        ]
        sampling = SamplingOverrides(temperature=0)
        options = ReplyOptions(sampling=sampling, max_tokens=12, ignore_eos=True)
        asked = Conversation(messages=(Message(role="user", parts=tuple(parts)),))
        request = ChatClient(self.engine).prepare(asked, options).request
        gc.collect()
        gc.disable()  # what other engines left would be finalised on this one's thread, and counted
        try:
            self.calls.clear()
            (reply,) = replies(self.engine, [request])
            while self.counting:  # the reply is here before the round that ended it is over
                time.sleep(0.001)
        finally:
            gc.enable()
        calls = {name: n for name, n in self.calls.items() if any(word in name for word in OURS)}
        return Counter(calls), reply["ids"]


@pytest.fixture(scope="module", autouse=True)
def costs_that_stay():
    """What a round costs is not fitted again: that falls on every so many launches, whatever they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths, "REFIT_EVERY", 1 << 30)
        yield


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tiny_vision.write(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module", params=["plain", "mtp"])
def drafting(request):
    return {"draft": None if request.param == "plain" else 3}


@pytest.fixture(scope="module")
def alone(bench, drafting):
    """What the third request of its kind does on an engine that knows no other."""
    found = {}
    for kind in ("text", "images"):
        watched = Watched(bench, **drafting)
        with watched.engine:
            for _ in range(3):
                found[kind] = watched.calls_of(kind)
    return found


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_decoding_makes_the_calls_of_a_server_that_saw_one_kind(bench, drafting, alone, order):
    watched = Watched(bench, **drafting)
    with watched.engine:
        for kind in order:
            calls, ids = watched.calls_of(kind)
    wanted, right = alone[order[-1]]
    assert ids == right
    assert sum(wanted.values()) > 1000
    assert calls - wanted == Counter()
    assert wanted - calls == Counter()
