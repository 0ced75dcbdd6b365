"""The search for the first op whose bits hang on how rows are launched (benchmarks/gpu_watch.py)."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

PROGRAMS = Path(__file__).parents[2] / "benchmarks"
ROWS = 6


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))
    yield __import__("gpu_watch")
    sys.modules.pop("gpu_watch", None)


def some_trace(watch):
    rows = tuple(torch.arange(1.0, 1 + ROWS * n).view(ROWS, n) for n in (3, 2))
    return watch.Trace(names=("op 0: x", "logits"), rows=rows)


def changed(trace, op, row):
    rows = [t.clone() for t in trace.rows]
    rows[op][row, 1] += 0.5
    return replace(trace, rows=tuple(rows))


def test_equal_traces_do_not_differ_also_where_both_have_no_number(watch):
    one = some_trace(watch)
    one.rows[0][2, 0] = float("nan")
    assert watch.difference(one, replace(one, rows=tuple(t.clone() for t in one.rows))) is None


def test_the_first_row_counts_then_the_first_op_of_that_row(watch):
    one = some_trace(watch)
    found = watch.difference(one, changed(changed(one, op=0, row=4), op=1, row=3))
    assert (found["row"], found["op"], found["columns"]) == (3, "logits", [1])
    assert found["relative"] == 0.5 / one.rows[1][3].max()
    assert (found["rows that differ"], found["rows whose logits differ"]) == (2, 1)
    assert (found["lowest op that differs anywhere"], found["its rows"]) == ("op 0: x", [4])


def test_a_number_where_there_was_none_differs(watch):
    one = some_trace(watch)
    other = changed(one, op=0, row=1)
    other.rows[0][1, 1] = float("nan")
    assert watch.difference(one, other)["row"] == 1
