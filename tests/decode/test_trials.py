"""How long drafts wait to be tried again."""

from __future__ import annotations

from civetta.decode.trials import Backoff


def rounds_of_trials(backoff, rounds, stands=()):
    """Rounds in which a trial was due and made; the trials numbered in `stands` stood."""
    made = []
    for number in range(rounds):
        if backoff.due:
            backoff.judged(stood=len(made) in stands)
            made.append(number)
        else:
            backoff.passed(1)
    return made


def test_the_first_is_due_at_once_and_each_failure_doubles_the_wait():
    assert rounds_of_trials(Backoff(shortest=2, longest=16), 60) == [0, 3, 8, 17, 34, 51]


def test_one_that_stands_is_followed_up_at_once():
    assert rounds_of_trials(Backoff(shortest=4, longest=64), 30, stands=(2,)) == [
        0,
        5,
        14,
        15,
        20,
        29,
    ]


def test_rounds_that_went_by_unplanned_count():
    backoff = Backoff(shortest=8, longest=8)
    backoff.judged(stood=False)
    backoff.passed(7)
    assert not backoff.due
    backoff.passed(1)
    assert backoff.due
