"""Patterns and literal texts as terms of a Lark terminal, behind the line end that begins a value."""

from __future__ import annotations

import json


def anywhere(pattern: str) -> str:
    """Texts in which the pattern matches somewhere, as JSON schema reads it.

    Anchors elsewhere than at the ends of an alternative are left for the compiler to refuse.
    """
    return term("|".join(map(_whole, _alternatives(pattern))))


def term(regex: str) -> str:
    """Texts that match a regular expression as a whole."""
    out, slash = "", False
    for char in regex:
        out += "\\/" if char == "/" and not slash else "\\n" if char == "\n" else char
        slash = char == "\\" and not slash
    return f"/\\n({out})/"


def literal(text: str) -> str:
    """This one text."""
    return json.dumps("\n" + text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _whole(alternative: str) -> str:
    head, tail = "(?s:.*)", "(?s:.*)"
    if alternative.startswith("^"):
        head, alternative = "", alternative[1:]
    if alternative.endswith("$") and not _escaped(alternative, len(alternative) - 1):
        tail, alternative = "", alternative[:-1]
    return f"{head}({alternative}){tail}"


def _alternatives(pattern: str) -> list[str]:
    """The parts between the `|` that stand in no group and no class."""
    parts, depth, in_class, slash = [""], 0, False, False
    for char in pattern:
        if slash:
            slash = False
        elif char == "\\":
            slash = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            parts.append("")
            continue
        parts[-1] += char
    return parts


def _escaped(text: str, place: int) -> bool:
    return (place - len(text[:place].rstrip("\\"))) % 2 == 1
