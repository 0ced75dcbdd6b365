"""JSON as the chat template writes it, with numbers as they were spelled.

A model may write 1.50 within an array; a call that is sent back renders to the tokens it was sampled
as only if the number does, so a float that was not in its shortest form keeps its spelling.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

_DEPTH_MAX = 64
"""Deeper numbers are written in their shortest form."""


class SpelledFloat(float):
    """A number that is written as it was read."""

    __slots__ = ("spelling",)
    spelling: str

    def __new__(cls, spelling: str) -> SpelledFloat:
        """The number that `spelling`, which is JSON, says."""
        made = super().__new__(cls, spelling)
        made.spelling = spelling
        return made


def parsed_float(text: str) -> float:
    """A JSON number with a point or an exponent. Raises ValueError for one that is out of range."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is out of range")
    return value if repr(value) == text else SpelledFloat(text)


def parsed_int(text: str) -> int | float:
    """A JSON number without point and exponent. -0 has a spelling, and no integer does."""
    return SpelledFloat(text) if text == "-0" else int(text)


def read_json(text: str) -> Any:
    """The value of a JSON text, its numbers as they were spelled.

    Raises ValueError for broken JSON, NaN, infinities and numbers out of range, RecursionError for
    nesting that Python does not read.
    """
    return json.loads(
        text, parse_constant=_no_constant, parse_float=parsed_float, parse_int=parsed_int
    )


def json_text(value: Any) -> str:
    """JSON as the template writes it: non-ASCII kept, keys in order, numbers as they were read."""
    if not _has_spelled(value):
        return json.dumps(value, ensure_ascii=False)
    return _written(value, 0)


def without_spelling(value: Any) -> Any:
    """The value with plain numbers; what has no spelled one is returned as it is."""
    if not _has_spelled(value):
        return value
    if isinstance(value, SpelledFloat):
        return float(value) if value.spelling != "-0" else 0
    if isinstance(value, dict):
        return {key: without_spelling(item) for key, item in value.items()}
    return [without_spelling(item) for item in value]


def _has_spelled(value: Any) -> bool:
    level = [value]
    while level:
        if any(isinstance(item, SpelledFloat) for item in level):
            return True
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                below += item.values()
            elif isinstance(item, (list, tuple)):
                below += item
        level = below
    return False


def _written(value: Any, depth: int) -> str:
    if isinstance(value, SpelledFloat):
        return value.spelling
    if depth < _DEPTH_MAX and isinstance(value, Mapping):
        members = [f"{_key(key)}: {_written(item, depth + 1)}" for key, item in value.items()]
        return "{" + ", ".join(members) + "}"
    if depth < _DEPTH_MAX and isinstance(value, (list, tuple)):
        return "[" + ", ".join([_written(item, depth + 1) for item in value]) + "]"
    return json.dumps(value, ensure_ascii=False)


def _key(key: Any) -> str:
    return json.dumps(key, ensure_ascii=False) if isinstance(key, str) else json.dumps(str(key))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
