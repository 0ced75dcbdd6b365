from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from civetta.engine.outbox import Outbox, OutboxStream
from civetta.engine.protocol import Finished, Progress, Started, TokenEvent
from civetta.errors import OutputBackpressure, ReadFailed
from civetta.types import FinishReason, Usage

pytestmark = pytest.mark.timeout(60)
END = Finished(reason=FinishReason.STOP, usage=Usage(prompt_tokens=1, completion_tokens=1))
START = Started(prompt_tokens=9, cached_tokens=0)


def token(i):
    return TokenEvent(token_id=i, text=str(i))


def progress(n):
    return Progress(processed_tokens=n, prompt_tokens=9)


class Cancel:
    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1


def filled(*events, max_unread=100):
    box = Outbox(max_unread=max_unread)
    for event in events:
        box.put(event)
    return box


async def read(stream):
    return [event async for event in stream]


def test_events_come_in_order_to_both_kinds_of_reader():
    events = [START, progress(9), token(1), token(2), END]
    assert list(OutboxStream(filled(*events), Cancel())) == events
    assert asyncio.run(read(OutboxStream(filled(*events), Cancel()))) == events


def test_unread_progress_is_merged_into_the_newest():
    box = filled(START, progress(3), progress(6), progress(9), token(1), END)
    assert list(OutboxStream(box, Cancel())) == [START, progress(9), token(1), END]


def test_an_error_comes_after_the_events_before_it():
    for kind in ("thread", "coroutine"):
        box = filled(START, token(1))
        box.fail(ReadFailed("disk gone"))
        stream, seen = OutboxStream(box, Cancel()), []

        async def read_all(stream=stream, seen=seen):
            async for event in stream:
                seen.append(event)

        def loop_all(stream=stream, seen=seen):
            for event in stream:
                seen.append(event)

        with pytest.raises(ReadFailed, match="disk gone"):
            loop_all() if kind == "thread" else asyncio.run(read_all())
        assert seen == [START, token(1)]


def test_the_end_is_final():
    box = filled(END)
    box.fail(ReadFailed("too late"))
    assert box.closed
    assert list(OutboxStream(box, Cancel())) == [END]
    with pytest.raises(AssertionError):
        box.put(token(1))


def test_too_much_unread_breaks_the_box_and_frees_it():
    box = filled(START, token(1), token(2), max_unread=3)
    with pytest.raises(OutputBackpressure, match="3 events"):
        box.put(token(3))
    assert box.take() is None
    box.fail(OutputBackpressure("slow"))
    with pytest.raises(OutputBackpressure):
        list(OutboxStream(box, Cancel()))


def test_the_end_always_fits():
    box = filled(START, token(1), max_unread=2)
    box.put(END)
    assert list(OutboxStream(box, Cancel())) == [START, token(1), END]


def test_a_blocked_reader_wakes_up():
    box, seen = Outbox(max_unread=10), []
    reader = threading.Thread(target=lambda: seen.extend(OutboxStream(box, Cancel())))
    reader.start()
    for event in (START, token(1), END):
        box.put(event)
    reader.join(20)
    assert seen == [START, token(1), END]


def test_a_waiting_coroutine_wakes_up():
    async def scene():
        box = Outbox(max_unread=100_000)
        task = asyncio.create_task(read(OutboxStream(box, Cancel())))
        await asyncio.sleep(0)

        def write():
            for i in range(2000):
                box.put(token(i))
            box.put(END)

        writer = threading.Thread(target=write)
        writer.start()
        events = await asyncio.wait_for(task, 30)
        writer.join()
        assert events == [*(token(i) for i in range(2000)), END]

    asyncio.run(scene())


def test_leaving_early_cancels():
    cancel = Cancel()
    for event in OutboxStream(filled(START, token(1)), cancel):
        assert event == START
        break
    gc.collect()
    assert cancel.count >= 1


def test_a_cancelled_task_cancels_the_request():
    cancel = Cancel()

    async def scene():
        task = asyncio.create_task(read(OutboxStream(filled(START), cancel)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())
    assert cancel.count >= 1


def test_a_forgotten_stream_cancels():
    cancel = Cancel()
    stream = OutboxStream(filled(START), cancel)
    assert cancel.count == 0
    del stream
    gc.collect()
    assert cancel.count == 1


def test_a_dead_event_loop_cancels_and_does_not_hurt_the_writer():
    cancel, box = Cancel(), Outbox(max_unread=10)
    stream = OutboxStream(box, cancel)
    loop = asyncio.new_event_loop()
    iterator = aiter(stream)

    async def begin(iterator):
        task = asyncio.ensure_future(anext(iterator))
        await asyncio.sleep(0)
        return task

    task = loop.run_until_complete(begin(iterator))
    loop.close()
    box.put(token(1))
    assert cancel.count == 1
    task._log_destroy_pending = False
    del task, iterator, stream
    gc.collect()


def test_a_stream_is_read_once():
    stream = OutboxStream(filled(END), Cancel())
    list(stream)
    with pytest.raises(AssertionError):
        iter(stream)
    with pytest.raises(AssertionError):
        aiter(stream)
