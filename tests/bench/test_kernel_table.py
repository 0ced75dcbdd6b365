"""The kernel table: launches met with their times, sums and shares against figures worked out by hand."""

import pytest

from civetta.bench.kernel_costs import Cost
from civetta.bench.kernel_table import Ceilings, Launch, Timed, floor_of, kernel_rows, table_text

CEILINGS = Ceilings(bytes_a_s=4e12, flop_a_s=8e14)
LAUNCHES = [
    Launch(kernel="product_kernel", cost=Cost(nbytes=4e6, flop=8e6, detail="Q8_0")),
    Launch(kernel="mix_kernel", cost=None),
    Launch(kernel="product_kernel", cost=Cost(nbytes=4e3, flop=1.6e9, detail="Q4_K")),
    Launch(kernel="product_kernel", cost=Cost(nbytes=8e6, flop=0.0, detail="Q8_0")),
]
TIMES = [
    Timed(kernel="product_kernel", seconds=2e-6),
    Timed(kernel="mix_kernel", seconds=9e-6),
    Timed(kernel="product_kernel", seconds=8e-6),
    Timed(kernel="product_kernel", seconds=4e-6),
    Timed(kernel="Memcpy HtoD", seconds=1e-6),
]


def test_the_floor_is_the_longer_of_moving_and_computing():
    assert floor_of(Cost(nbytes=4e6, flop=8e6), CEILINGS) == pytest.approx(1e-6)
    assert floor_of(Cost(nbytes=4e3, flop=1.6e9), CEILINGS) == pytest.approx(2e-6)


def test_times_meet_their_launches_in_order_and_details_are_apart():
    rows = kernel_rows(LAUNCHES, TIMES, CEILINGS)
    assert [(row.kernel, row.calls) for row in rows] == [
        ("mix_kernel", 1),
        ("product_kernel Q4_K", 1),
        ("product_kernel Q8_0", 2),
        ("Memcpy HtoD", 1),
    ]
    by_name = {row.kernel: row for row in rows}
    whole = by_name["product_kernel Q8_0"]
    assert (whole.seconds, whole.nbytes, whole.flop) == pytest.approx((6e-6, 12e6, 8e6))
    assert whole.share == pytest.approx((1e-6 + 2e-6) / 6e-6)
    assert by_name["product_kernel Q4_K"].share == pytest.approx(0.25)
    assert by_name["mix_kernel"].share is by_name["Memcpy HtoD"].nbytes is None


def test_the_table_names_the_roofline_and_marks_what_is_not_known():
    text = table_text("pp4096", kernel_rows(LAUNCHES, TIMES, CEILINGS), CEILINGS)
    assert "4.00 TB/s, 800 TFLOP/s" in text
    assert "| product_kernel Q8_0 | 2 | 6.0 | 25.0 % | 3.0 | 12.00 | 0.01 | 50 % |" in text
    assert "| mix_kernel | 1 | 9.0 | 37.5 % | 9.0 | - | - | - |" in text
