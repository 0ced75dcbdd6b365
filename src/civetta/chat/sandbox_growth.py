"""How long a text a filter or method of a template may make, told before it runs.

Each function takes what the filter or method takes, the text first, and gives an upper bound in
characters. What is not here makes nothing much longer than what it is given.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from civetta.chat.sandbox_meter import refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_LONG_WIDTH = re.compile(r"\d{5}")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")
_STARRED_FIELD = re.compile(r"%[-+ #0-9.]*\*")
_WIDTH_MAX = 9999


def format_chars(text: Any, arguments_chars: int) -> int:
    """Bound of `text % values`, `text.format(values)`; `arguments_chars` is the values' length.

    Refuses widths of five digits, and widths that are values themselves.
    """
    form = str(text)
    if _LONG_WIDTH.search(form) or _NESTED_FIELD.search(form) or _STARRED_FIELD.search(form):
        refuse("it formats a text to a width that is long or not written out")
    fields = form.count("%") + form.count("{")
    return len(form) + fields * (arguments_chars + _WIDTH_MAX)


def _replace(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    whole, part = str(text), str(new)
    return len(whole) + whole.count(str(old)) * len(part)


def _width(text: Any, width: Any = 80, *_: Any, **__: Any) -> int:
    return len(str(text)) + (width if isinstance(width, int) else 0)


def _indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    whole = str(text)
    step = width if isinstance(width, int) else len(str(width))
    return len(whole) + (len(whole.splitlines()) + 1) * step


def _wordwrap(
    text: Any, _width: int = 79, _break: bool = True, wrapstring: Any = "\n", *_: Any, **__: Any
) -> int:
    return len(str(text)) * (1 + len(str(wrapstring)))


def _tabs(text: Any, tabsize: Any = 8) -> int:
    return len(str(text)) * (1 + (tabsize if isinstance(tabsize, int) else 0))


def _counted(_items: Any, count: Any = 0, *_: Any, **__: Any) -> int:
    return count if isinstance(count, int) else 0


FILTER_CHARS: Mapping[str, Callable[..., int]] = {
    "replace": _replace,
    "center": _width,
    "indent": _indent,
    "wordwrap": _wordwrap,
    "batch": _counted,
    "slice": _counted,
}
METHOD_CHARS: Mapping[str, Callable[..., int]] = {
    "replace": _replace,
    "center": _width,
    "ljust": _width,
    "rjust": _width,
    "zfill": _width,
    "expandtabs": _tabs,
}
REFUSED_METHODS = frozenset({"translate", "maketrans", "encode", "to_bytes", "fromkeys"})
"""Nothing a chat template needs, and each a way to a large value in one step."""
REFUSED_FILTERS = frozenset({"random", "pprint", "urlize", "striptags", "xmlattr"})
"""One gives another prompt each time; the others are for web pages, and slow on long texts."""
