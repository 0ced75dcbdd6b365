from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from civetta.engine.request import LEGAL_MOVES, Request, RequestState, check_request
from civetta.errors import ContextOverflow, RequestInvalid
from civetta.types import CancelCause
from engine.fakes import VOCAB, ask


def check(spec, context_tokens=10):
    check_request(spec, vocab_size=VOCAB, context_tokens=context_tokens)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [0, -1]}, "prompt", "-1 is not in the vocabulary"),
        ({"prompt": [0, VOCAB]}, "prompt", f"{VOCAB} is not in the vocabulary"),
        ({"prompt_logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1"),
        ({"stop": ("a", "")}, "stop", "empty"),
        ({"timeout_s": 0.0}, "timeout", "more than 0"),
        ({"timeout_s": float("nan")}, "timeout", "more than 0"),
    ],
)
def test_bad_requests_are_refused_by_name(fields, param, words):
    with pytest.raises(RequestInvalid, match=words) as caught:
        check(ask(**fields))
    assert caught.value.param == param


def test_a_prompt_leaves_room_for_one_token():
    check(ask([1] * 9))
    for size in (10, 11, 5000):
        with pytest.raises(ContextOverflow, match="maximum context length is 10 tokens"):
            check(ask([1] * size))


def test_huge_budgets_are_fine():
    check(ask(max_tokens=10**9))


def started(prompt=5, **fields):
    return admitted(Request(0, ask([1] * prompt, **fields), now_s=10.0), now_s=11.0)


def admitted(request, *, cached_tokens=0, now_s=0.0):
    request.leave_queue(now_s=now_s)
    request.check()
    request.restored(cached_tokens)
    return request


def test_the_life_of_a_request_and_its_times():
    request = started(5)
    request.prefilled(3, now_s=12.0)
    assert request.state is RequestState.PREFILLING
    assert request.prompt_left == 2
    request.prefilled(2, now_s=14.0)
    assert request.state is RequestState.DECODING
    request.generated(7)
    request.generated(8)
    request.check()
    request.end(RequestState.FINISHED, now_s=20.0)
    request.check()
    usage = request.usage(now_s=99.0)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 2, 0)
    assert (usage.queue_s, usage.prefill_s, usage.decode_s) == (1.0, 3.0, 6.0)


def test_durations_of_a_request_that_never_ran():
    request = Request(0, ask(), now_s=10.0)
    assert request.usage(now_s=12.0).queue_s == 2.0
    request.end(RequestState.CANCELLED, now_s=15.0)
    usage = request.usage(now_s=99.0)
    assert (usage.queue_s, usage.prefill_s, usage.decode_s) == (5.0, 0.0, 0.0)


def test_cached_tokens_are_not_prefilled_again():
    request = Request(0, ask([1] * 5), now_s=0.0)
    admitted(request, cached_tokens=4)
    assert request.prompt_left == 1
    request.check()
    with pytest.raises(AssertionError):
        admitted(Request(0, ask([1] * 5), now_s=0.0), cached_tokens=5)


@pytest.mark.parametrize(
    ("generated", "text_bytes", "ended"),
    [(1, 0, False), (2, 0, True), (1, 64, True), (1, 63, False)],
)
def test_exhaustion_by_budget_and_text(generated, text_bytes, ended):
    request = started(5, max_tokens=2)
    request.prefilled(5, now_s=0.0)
    for token in range(generated):
        request.generated(token)
    request.text_bytes = text_bytes
    assert request.exhausted(context_tokens=100, max_text_bytes=64) is ended


def test_exhaustion_by_context_counts_prompt_and_reply():
    request = started(5)
    request.prefilled(5, now_s=0.0)
    for _ in range(4):
        request.generated(1)
        assert not request.exhausted(context_tokens=10, max_text_bytes=64)
    request.generated(1)
    assert request.exhausted(context_tokens=10, max_text_bytes=64)


def test_overdue_by_cancel_or_deadline():
    assert not Request(0, ask(), now_s=0.0).overdue(1e9)
    timed = Request(0, ask(timeout_s=5.0), now_s=10.0)
    assert not timed.overdue(14.999)
    assert timed.overdue(15.0)
    timed = Request(0, ask(timeout_s=5.0), now_s=10.0)
    timed.cancel()
    timed.cancel()
    assert timed.overdue(10.0)


def test_illegal_moves_are_our_mistake():
    request = Request(0, ask(), now_s=0.0)
    with pytest.raises(AssertionError):
        request.generated(1)
    with pytest.raises(AssertionError):
        request.prefilled(1, now_s=0.0)
    with pytest.raises(AssertionError):
        request.end(RequestState.FINISHED, now_s=0.0)
    with pytest.raises(AssertionError):
        request.end(RequestState.DECODING, now_s=0.0)
    request.end(RequestState.FAILED, now_s=0.0)
    with pytest.raises(AssertionError):
        request.end(RequestState.CANCELLED, now_s=0.0)
    with pytest.raises(AssertionError):
        request.leave_queue(now_s=0.0)


def test_every_state_can_be_broken_off_until_it_is_terminal():
    for state, moves in LEGAL_MOVES.items():
        assert state.terminal == (not moves)
        if moves:
            assert {RequestState.CANCELLED, RequestState.FAILED} <= moves


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(0, 3))
def test_books_balance_after_every_chunk(chunks, cached):
    request = Request(0, ask([1] * (sum(chunks) + cached)), now_s=0.0)
    admitted(request, cached_tokens=cached)
    for chunk in chunks:
        assert request.state is RequestState.PREFILLING
        request.prefilled(chunk, now_s=1.0)
        request.check()
    assert request.state is RequestState.DECODING


def test_a_request_that_was_put_back_prefills_what_it_said():
    request = started(5, max_tokens=9)
    request.prefilled(5, now_s=12.0)
    for token in (7, 8):
        request.generated(token)
    request.put_back()
    request.check()
    assert request.queued
    assert request.prompt_left == 7
    admitted(request, cached_tokens=6, now_s=20.0)
    request.check()
    assert request.next_prompt_ids(1) == (8,)
    assert request.cached_tokens == 0  # finding one's own state again saves nobody anything
    request.prefilled(1, now_s=21.0)
    request.generated(9)
    request.end(RequestState.FINISHED, now_s=25.0)
    usage = request.usage(now_s=99.0)
    assert (usage.queue_s, usage.prefill_s, usage.decode_s) == (1.0, 1.0, 13.0)
    assert request.sequence_ids == (1, 1, 1, 1, 1, 7, 8, 9)


def test_the_first_cause_of_an_end_counts():
    request = Request(0, ask(timeout_s=5.0), now_s=10.0)
    assert request.overdue(15.0) is CancelCause.TIMEOUT
    request.cancel(CancelCause.ABORTED)
    request.cancel()
    assert request.overdue(15.0) is CancelCause.ABORTED
