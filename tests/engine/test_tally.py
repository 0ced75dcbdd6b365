"""Durations, rates and reasons that the engine counts for /metrics."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from civetta.decode.stream import TokenText
from civetta.engine.histogram import Histogram
from civetta.engine.loop import LoopLimits, StepLoop
from civetta.engine.outbox import OutboxStream
from civetta.engine.scheduler import Budget
from civetta.engine.tally import Rate
from engine.fakes import ByteTokenizer, FakeModel, ManualClock, ask, says

BOUNDS_S = (0.1, 1.0, 10.0)


@given(st.lists(st.floats(0, 100, allow_nan=False), max_size=50))
def test_a_histogram_counts_each_duration_once_at_the_lowest_bound_that_holds_it(durations):
    histogram = Histogram(BOUNDS_S)
    for seconds in durations:
        histogram.add(seconds)
    stats = histogram.stats()
    edges = (-1.0, *BOUNDS_S, float("inf"))
    for low, high, count in zip(edges, edges[1:], stats.counts, strict=False):
        assert count == sum(low < seconds <= high for seconds in durations)
    assert abs(stats.sum_s - sum(durations)) < 1e-9 * max(1.0, stats.sum_s)


def test_a_rate_is_that_of_the_newest_second_of_work_and_stays_when_work_ends():
    rate = Rate()
    assert rate.value == 0.0
    rate.add(10, 0.5)
    assert rate.value == 20.0, "the first stretch tells before it is complete"
    rate.add(10, 0.5)
    assert rate.value == 20.0
    rate.add(1, 0.9)
    assert rate.value == 20.0, "a stretch that is not complete changes nothing"
    rate.add(1, 0.1)
    assert rate.value == 2.0


def run_loop(model, clock, **fields):
    tokenizer = ByteTokenizer()
    loop = StepLoop(
        model,
        LoopLimits(
            budget=Budget(sessions=2, prefill_batch=4, prefill_chunk=2),
            max_pending=4,
            context_tokens=512,
            max_text_bytes=10_000,
            max_unread=10_000,
            end_ids=tokenizer.eog_ids,
        ),
        new_text=lambda stops: TokenText(tokenizer, stops),
        clock=clock,
    )
    _, outbox = loop.submit(ask("0123456789", **fields))
    clock.now_s += 2.0  # in the queue
    views = [loop.views()[0]]
    while loop.stats().running or loop.stats().waiting:
        loop.step()
        views += loop.views()
    list(OutboxStream(outbox, lambda: None))
    return loop.stats(), views


def test_durations_of_a_request_are_counted_where_they_end():
    clock = ManualClock()

    def work(session, ids):
        clock.now_s += 0.3 if len(ids) > 1 else 0.04

    stats, views = run_loop(FakeModel(says(10, "abc"), on_forward=work), clock)
    durations = stats.durations
    assert [sum(h.counts) for h in (durations.queue, durations.first_token, durations.whole)] == [
        1,
        1,
        1,
    ]
    assert abs(durations.queue.sum_s - 2.0) < 1e-6
    assert abs(durations.first_token.sum_s - 2.9) < 1e-6  # three chunks
    assert sum(durations.inter_token.counts) == 3  # b, c, the end
    assert abs(durations.inter_token.sum_s - 0.12) < 1e-6
    assert abs(durations.whole.sum_s - 3.02) < 1e-6
    assert stats.decode_rounds_total == stats.decoded_rows_total == 3
    assert dict(stats.cache_misses)["disabled"] == 1
    assert abs(stats.decode_rate - 25) < 1e-6
    assert views[0].state == "queued"
    assert [v.processed_tokens for v in views if v.state == "prefilling"] == [0, 4, 8]
    assert [view.generated_tokens for view in views if view.state == "decoding"] == [1, 2, 3]
