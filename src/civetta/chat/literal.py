"""Tells text that users wrote from text that a template wrote, through any template.

Every control token of the model begins with "<|". While a template renders, a noncharacter stands
inside each "<|" of the users' strings; afterwards it is taken out and its place noted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from civetta.errors import TemplateError

CONTROL_OPEN = "<|"
# Unicode noncharacters, which are never part of real text
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


def choose_mark(value: Any) -> str:
    """A mark that no string of `value` has; "" when none has "<|", which is nearly always.

    Raises TemplateError when every possible mark is in use.
    """
    found: set[str] = set()
    needed = False

    def look(text: str) -> str:
        nonlocal needed
        needed = needed or CONTROL_OPEN in text
        if needed or not text.isascii():
            found.update(mark for mark in _MARKS if mark in text)
        return text

    _map_strings(value, look)
    if not needed:
        return ""
    free = [mark for mark in _MARKS if mark not in found]
    if not free:
        raise TemplateError("The messages use every Unicode noncharacter U+FDD0 to U+FDEF.")
    return free[0]


def marked(value: Any, mark: str) -> Any:
    """`value` with the mark put into every "<|" of its strings, keys included."""
    if not mark:
        return value
    return _map_strings(value, lambda text: text.replace(CONTROL_OPEN, f"<{mark}|"))


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(k, change): _map_strings(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


def unmark(text: str, mark: str) -> tuple[str, frozenset[int]]:
    """`text` without marks, and the offsets in it where a marked "<|" begins."""
    if not mark:
        return text, frozenset()
    pieces = text.split(mark)
    starts: list[int] = []
    length = 0
    for piece in pieces[:-1]:
        length += len(piece)
        starts.append(length - 1)
    return "".join(pieces), frozenset(starts)
