"""The one logger setup: `key=value` lines on stderr, never prompt text, never a key.

A line reads `12:00:00.123 info civetta.api request id=r1 status=200`. Values with spaces or
control characters are quoted and escaped, so that one event is always one line.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

LEVELS = {
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
_LEVEL_NAMES = {number: name for name, number in LEVELS.items()}
_ROOT = "civetta"


class KeyValueFormatter(logging.Formatter):
    """One record, one line: time of day, level, logger, message."""

    def format(self, record: logging.LogRecord) -> str:
        """One line with control characters escaped, then the traceback if there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = _LEVEL_NAMES.get(record.levelno, record.levelname.lower())
        message = _escape(record.getMessage())
        line = f"{clock}.{int(record.msecs):03d} {level} {record.name} {message}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def set_up_logging(level: str, stream: TextIO | None = None) -> None:
    """Send civetta's records of `level` (a key of LEVELS) and above to `stream` (default stderr).

    Calling it again replaces the earlier setup. Other libraries' loggers are left alone.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(KeyValueFormatter())
    logger = logging.getLogger(_ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(LEVELS[level])
    logger.propagate = False


def log_event(logger: logging.Logger, level: int, event: str, **fields: object) -> None:
    """Log `event key=value ...`; fields that are None are left out."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", format_event(event, fields))


def format_event(event: str, fields: dict[str, object]) -> str:
    """Spell an event and its fields as one `key=value` line."""
    parts = [event]
    parts += [f"{key}={_value(value)}" for key, value in fields.items() if value is not None]
    return " ".join(parts)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = text.isprintable() and not any(mark in text for mark in ' "=') and text != ""
    return text if plain else json.dumps(text, ensure_ascii=True)


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else ascii(mark)[1:-1] for mark in text)
