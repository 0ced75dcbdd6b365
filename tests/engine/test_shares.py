from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from civetta.engine.shares import PrefillShares, QueueTickets


def test_a_late_client_stands_level_with_an_early_one():
    tickets = QueueTickets()
    burst = [tickets.take("a") for _ in range(5)]
    late = [tickets.take("b") for _ in range(2)]
    assert burst == [1, 2, 3, 4, 5]
    assert late == [1, 2]


def test_absence_earns_no_credit():
    tickets = QueueTickets()
    for _ in range(10):
        tickets.used(tickets.take("busy"))
    assert tickets.take("new") == tickets.take("busy") == 11


@given(st.lists(st.sampled_from("aabc"), min_size=1, max_size=60))
def test_nobody_is_passed_by_more_than_one_request_of_each_other_client_per_own(clients):
    tickets = QueueTickets()
    queue = [(tickets.take(client), number, client) for number, client in enumerate(clients)]
    order = sorted(queue)
    for place, (_, number, client) in enumerate(order):
        own_before = sum(1 for _, other, c in queue if c == client and other < number)
        for rival in set(clients) - {client}:
            passed = sum(1 for _, _, c in order[:place] if c == rival)
            assert passed <= own_before + 1


def test_a_client_that_comes_back_starts_level():
    shares = PrefillShares()
    shares.of({"a", "b"})
    shares.give("a", 500)
    shares.give("b", 400)
    assert shares.of({"a", "b", "c"}) == {"a": 500, "b": 400, "c": 400}
    shares.give("c", 50)
    assert shares.of({"c"}) == {"c": 450}
    assert shares.of({"a", "c"}) == {"a": 450, "c": 450}
