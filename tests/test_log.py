from __future__ import annotations

import io
import logging
import re

import pytest

from civetta.log import format_event, log_event, set_up_logging


@pytest.fixture
def stream():
    return io.StringIO()


def test_an_event_is_one_line_with_its_fields(stream):
    set_up_logging("info", stream)
    log_event(logging.getLogger("civetta.x"), logging.INFO, "loaded", n=3, s=0.5, none=None)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d{3} info civetta\.x loaded n=3 s=0\.5\n", stream.getvalue()
    )


def test_control_characters_cannot_forge_a_line(stream):
    set_up_logging("debug", stream)
    logger = logging.getLogger("civetta.x")
    log_event(logger, logging.INFO, "got", path="/a\n12:00 error fake", esc="\x1b[31m")
    logger.info("raw %s", "a\nb\u2028c")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "\x1b" not in stream.getvalue()


def test_values_that_would_be_ambiguous_are_quoted():
    assert format_event("e", {"a": "x y", "b": "", "c": "k=v", "d": 'q"'}) == (
        'e a="x y" b="" c="k=v" d="q\\""'
    )


def test_levels_and_repeated_setup(stream):
    set_up_logging("debug", stream)
    set_up_logging("warn", stream)
    logger = logging.getLogger("civetta.x")
    logger.info("hidden")
    logger.warning("shown")
    assert stream.getvalue().count("\n") == 1


def test_a_traceback_follows_its_line(stream):
    set_up_logging("error", stream)
    try:
        int("broken")
    except ValueError:
        logging.getLogger("civetta.x").exception("failed")
    assert "ValueError: invalid literal" in stream.getvalue()
