import pytest

from civetta.bench.spread import Spread


def test_figures_of_a_known_set():
    found = Spread.of([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    assert (found.mean, found.median, found.low, found.high) == (5.0, 4.5, 2.0, 9.0)
    assert found.sd == pytest.approx(32**0.5 / 7**0.5)


def test_one_figure_has_no_deviation():
    assert Spread.of([3.0]) == Spread(mean=3.0, median=3.0, low=3.0, high=3.0, sd=0.0)
