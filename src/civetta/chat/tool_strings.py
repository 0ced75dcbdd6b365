"""What a tool's schema asks of a parameter that is bare text, as terms of a Lark terminal.

A string inside an array or an object is JSON, and the grammar engine knows its keywords. A
parameter that is a string itself is written without quotes, so its `pattern`, lengths and `format`
are said here. A pattern of JSON schema matches anywhere in the text unless it has anchors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": r"P([0-9]+W|([0-9]+Y)?([0-9]+M)?([0-9]+D)?(T([0-9]+H)?([0-9]+M)?([0-9]+S)?)?)",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "email": rf"[A-Za-z0-9!#$%&'*+=?^_`{{|}}~.-]+@{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>\x22{}|\\^`]+",
}
"""Texts of each format that can be carried out, as regular expressions."""
_END = r"(?s:.*)<\/parameter>\n(<parameter=|<\/function>\n<\/tool_call>)(?s:.*)"


def is_bounded(schema: object) -> bool:
    """Whether the schema asks more of a text than that it is one."""
    if not isinstance(schema, Mapping) or schema.get("type") != "string":
        return False  # of several types: the bounds are those of one
    return any(key in schema for key in ("pattern", "minLength", "maxLength", "format"))


def unknown_format(schema: Mapping[str, Any]) -> str | None:
    """The format that the schema names and FORMATS lacks."""
    name = schema.get("format")
    return None if name is None or name in FORMATS else str(name)


def text_terminal(schema: Mapping[str, Any]) -> str:
    """A terminal's body: a line end, then texts that fit and do not hold what ends a value.

    Whether the pattern is one that can be carried out is for the grammar's compiler to say.
    """
    terms = [r"/\n(?s:.*)/"]
    pattern, form = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str):
        terms.append(_term(_anywhere(pattern)))
    least, most = _count(schema.get("minLength")), _count(schema.get("maxLength"))
    if least or most is not None:
        terms.append(_term(f"(?s:.{{{least or 0},{'' if most is None else most}}})"))
    if isinstance(form, str) and form in FORMATS:
        terms.append(_term(FORMATS[form]))
    return " & ".join([*terms, f"~/{_END}/"])


def _anywhere(pattern: str) -> str:
    """The pattern for the whole text. Anchors elsewhere than at the ends are left to be refused."""
    if "|" in pattern and not (pattern.startswith("^(") and pattern.endswith(")$")):
        # an anchor binds its alternative alone; one that is left in makes the compiler refuse
        return f"(?s:.*)({pattern})(?s:.*)"
    head, tail = "(?s:.*)", "(?s:.*)"
    if pattern.startswith("^"):
        head, pattern = "", pattern[1:]
    if pattern.endswith("$") and not _escaped(pattern, len(pattern) - 1):
        tail, pattern = "", pattern[:-1]
    return f"{head}({pattern}){tail}"


def _escaped(text: str, place: int) -> bool:
    return (place - len(text[:place].rstrip("\\"))) % 2 == 1


def _count(value: object) -> int | None:
    return int(value) if isinstance(value, (int, float)) and value >= 0 else None


def _term(regex: str) -> str:
    """A Lark regular expression behind the line end that begins a value."""
    out, slash = "", False
    for char in regex:
        out += "\\/" if char == "/" and not slash else "\\n" if char == "\n" else char
        slash = char == "\\" and not slash
    return f"/\\n({out})/"
