"""A step that does not come back: clients hear of their deadline all the same, and nothing is lost.

The model waits at a gate which is shut until every answer is in, so nothing here depends on speed.
"""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from api.serving import app_of, http
from civetta.engine import engine as engine_module
from civetta.engine.engine import Engine
from civetta.engine.protocol import Finished, Started, TokenEvent
from civetta.options import EngineOptions
from civetta.types import CancelCause, FinishReason
from engine.fakes import ByteTokenizer, FakeModel, ask, info, says, wait_until

pytestmark = pytest.mark.timeout(120)
LATE = EngineOptions(request_timeout_ms=40)


class Gate:
    """Shut: a launch waits here until the gate opens; `reached` says that one does."""

    def __init__(self):
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self, session, ids):
        self.reached.set()
        assert self._open.wait(100), "nobody opened the gate"

    def open(self):
        self._open.set()


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.setattr(engine_module, "STEP_GRACE_S", 0.02)
    gate = Gate()
    yield gate
    gate.open()


def engine_of(model, **options):
    return Engine(
        model, info(), tokenizer=ByteTokenizer(), template=None, options=EngineOptions(**options)
    )


def idle(engine):
    stats = engine.stats()
    return not stats.running and not stats.waiting and not stats.session_tokens


async def read(stream):
    return [event async for event in stream]


@pytest.mark.parametrize("reader", [list, lambda stream: asyncio.run(read(stream))])
def test_a_reader_ends_itself_after_the_deadline_and_the_step_gives_everything_back(gate, reader):
    model = FakeModel(says(1, "ok"), on_forward=gate)
    with engine_of(model, sessions=1) as engine:
        running = engine.submit(ask("x", timeout_s=0.02))
        assert gate.reached.wait(60)
        waiting = engine.submit(ask("y", timeout_s=0.02))
        patient = engine.submit(ask("z"))
        started, end = reader(running)
        assert isinstance(started, Started)
        (unserved,) = reader(waiting)
        for told in (end, unserved):
            assert (told.reason, told.cause) == (FinishReason.CANCELLED, CancelCause.TIMEOUT)
            assert (told.usage.prompt_tokens, told.usage.completion_tokens) == (1, 0)
        assert model.open_sessions == 1  # the step has it still
        gate.open()
        events = list(patient)
        assert "".join(e.text for e in events if isinstance(e, TokenEvent)) == "ok"
        wait_until(lambda: idle(engine), 60)
        assert model.open_sessions == 0
        assert engine.stats().requests_cancelled_total == 2
        assert model.most_sessions == 1  # the one whose time was over in the queue never began


def test_an_end_that_came_meanwhile_goes_before_the_reader_s_own(gate):
    gate.open()
    with engine_of(FakeModel(says(1, "ok"), on_forward=gate)) as engine:
        stream = engine.submit(ask("x", timeout_s=100))
        wait_until(lambda: idle(engine), 60)
        stream._late_s = 0.0  # its time is over, before it reads for the first time
        assert isinstance(end := list(stream)[-1], Finished)
        assert end.reason is FinishReason.STOP


def test_clients_over_http_get_their_504_while_the_step_is_stuck(gate):
    model = FakeModel(lambda ids: 97, on_forward=gate)

    async def ask_all(engine):
        late, patient = app_of(engine, engine=LATE), app_of(engine)
        body = {"prompt": "x", "max_tokens": 2}
        async with http(late) as client, http(patient) as other:
            going_on = asyncio.create_task(other.post("/v1/completions", json=body))
            await asyncio.to_thread(gate.reached.wait, 60)
            bodies = [body, {**body, "stream": True}, {**body, "n": 2}]
            replies = await asyncio.gather(
                *(client.post("/v1/completions", json=asked) for asked in bodies)
            )
            assert not going_on.done()
            gate.open()
            return replies, await going_on

    with engine_of(model, sessions=2) as engine:
        replies, patient = asyncio.run(ask_all(engine))
        wait_until(lambda: idle(engine), 60)
    for reply in replies:
        if reply.status_code == 200:  # a stream that had begun: the error is its last event
            error = json.loads(reply.text.split("data: ")[1])["error"]
        else:
            assert reply.status_code == 504
            error = reply.json()["error"]
        assert error["code"] == "request_timeout"
        assert "--request-timeout-ms" in error["message"]
    assert patient.json()["choices"][0]["text"] == "aa"
    assert model.open_sessions == 0
