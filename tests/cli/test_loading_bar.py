"""What is shown while a model is loaded."""

import logging

import pytest

from civetta.cli import loading_bar
from civetta.cli.loading_bar import LINE_EVERY_S, LoadingBar

GB = 10**9


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Drawn:
    """Stands in for rich's bar; writes down what it is told."""

    def __init__(self):
        self.told = []

    def start(self):
        self.told.append("start")

    def stop(self):
        self.told.append("stop")

    def add_task(self, words, total):
        self.told.append((words, total))
        return words

    def update(self, task, completed):
        self.told.append((task, completed))


def lines(caplog):
    return [record.getMessage() for record in caplog.records if "loading" in record.getMessage()]


def test_a_log_line_every_few_seconds_with_bytes_and_time_left(caplog):
    clock = Clock()
    with caplog.at_level(logging.INFO), LoadingBar(terminal=False, clock=clock) as bar:
        for done in range(1, 11):
            bar("weights", done * GB, 10 * GB)
            clock.now_s += LINE_EVERY_S / 2
    told = lines(caplog)
    assert len(told) == 5
    assert told[0] == 'loading phase=weights done="3 GB" total="10 GB" took_s=5 left_s=12'
    assert "left_s" not in told[-1]
    assert 'done="10 GB"' in told[-1]


def test_what_is_quickly_read_is_not_shown(caplog):
    with caplog.at_level(logging.INFO), LoadingBar(terminal=False) as bar:
        bar("weights", 1 << 20, 1 << 20)
    assert not lines(caplog)


def test_a_terminal_gets_one_bar_with_a_line_a_phase(monkeypatch, caplog):
    drawn = Drawn()
    monkeypatch.setattr(loading_bar, "_new_bar", lambda: drawn)
    with caplog.at_level(logging.INFO), LoadingBar(terminal=True) as bar:
        bar("table", 1 * GB, 2 * GB)
        bar("table", 2 * GB, 2 * GB)
        bar("weights", 3 * GB, 3 * GB)
    table, weights = "Loading the n-gram table", "Loading weights"
    assert drawn.told == [
        "start",
        (table, 2 * GB),
        (table, 1 * GB),
        (table, 2 * GB),
        (weights, 3 * GB),
        (weights, 3 * GB),
        "stop",
    ]
    assert not lines(caplog)


def test_a_bar_that_was_drawn_ends_with_an_error(monkeypatch):
    drawn = Drawn()
    monkeypatch.setattr(loading_bar, "_new_bar", lambda: drawn)

    def load():
        with LoadingBar(terminal=True) as bar:
            bar("weights", 1 * GB, 2 * GB)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        load()
    assert drawn.told[-1] == "stop"


def test_the_real_bar_can_be_drawn(capsys):
    with LoadingBar(terminal=True) as bar:
        bar("weights", 1 * GB, 2 * GB)
        bar("weights", 2 * GB, 2 * GB)
    assert capsys.readouterr().out == ""
