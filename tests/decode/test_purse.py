"""The account of what drafting may lose."""

from __future__ import annotations

from civetta.decode.purse import MOST_ROUNDS, REFRESH, SHARE, START_ROUNDS, WORST_ROUND, Purse


def seconds_of_useless_drafts(purse, rounds, *, a_round_s):
    """Plain rounds take a second, those with drafts `a_round_s`, and no draft ever stands."""
    seconds = 0.0
    for _ in range(rounds):
        if purse.open:
            purse.drafted(1, 1, a_round_s, expected_s=1.0)
            seconds += a_round_s
        else:
            purse.plain(1, 1.0)
            seconds += 1.0
    return seconds


def test_a_useless_head_loses_the_start_and_the_share():
    """Each draft round takes two and a half plain ones and brings one token."""
    rounds = 5000
    seconds = seconds_of_useless_drafts(Purse(), rounds, a_round_s=2.5)
    assert seconds <= rounds * (1 + SHARE) + START_ROUNDS + WORST_ROUND
    assert seconds > rounds  # it is tried again and again


def test_what_pays_stays_open_but_for_a_plain_round_now_and_then():
    purse, plain = Purse(), 0
    for _ in range(10 * (REFRESH + 1)):
        if purse.open:
            purse.drafted(2, 8, 2.0, expected_s=1.0)
        else:
            purse.plain(2, 1.0)
            plain += 1
    assert plain == 10
    assert purse.rounds == MOST_ROUNDS


def test_measured_rounds_count_more_than_expected_ones():
    """The estimate says that a plain round takes ten seconds; it takes one."""
    purse = Purse()
    for _ in range(3):
        purse.plain(1, 1.0)
    before = purse.rounds
    purse.drafted(1, 2, 4.0, expected_s=10.0)
    assert purse.rounds < before - 1


def test_one_stop_of_the_machine_does_not_close_it():
    purse = Purse()
    purse.drafted(1, 2, 1000.0, expected_s=1.0)
    assert purse.open
    assert purse.rounds >= START_ROUNDS - WORST_ROUND


def test_plain_rounds_that_were_measured_in_a_slow_hour_make_no_gain_of_useless_drafts():
    """Plain rounds took twice as long when they were measured; each draft round loses a fifth."""
    purse, rounds = Purse(), 4000
    for _ in range(5):
        purse.plain(1, 2.0)
    seconds = seconds_of_useless_drafts(purse, rounds, a_round_s=1.2)
    assert seconds <= rounds * (1 + SHARE) + START_ROUNDS + WORST_ROUND


def test_failed_rounds_fill_no_account():
    purse = Purse()
    purse.plain(1, 1.0)
    before = purse.rounds
    for _ in range(REFRESH):
        purse.drafted(1, 1, 0.5, expected_s=1.0)  # as quick as no round with drafts can be
    assert purse.rounds == before
    assert not purse.open  # until a plain round is measured again
    purse.plain(1, 1.0)
    assert purse.open
