"""Reads the word lists and grammars of `lexicon/`, once a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "lexicon"


@cache
def lines(name: str) -> tuple[str, ...]:
    """Return the lines of `lexicon/NAME.txt` without comments and empty lines."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    rows = (line.rstrip() for line in text.splitlines())
    return tuple(row for row in rows if row and not row.startswith("#"))


@cache
def words() -> tuple[str, ...]:
    """Return the common words, the most frequent first."""
    return tuple(" ".join(lines("words")).split())


@cache
def rows(name: str) -> tuple[tuple[str, ...], ...]:
    """Return the `a | b | c` rows of a list as tuples."""
    return tuple(tuple(cell.strip() for cell in line.split(" | ")) for line in lines(name))


@cache
def choices(name: str, kind: str) -> tuple[str, ...]:
    """Return the comma-separated options in the row of `name` that starts with `kind`."""
    for row in rows(name):
        if row[0] == kind:
            return tuple(option.strip() for option in row[1].split(","))
    raise KeyError(f"{name}.txt has no row {kind}")


@cache
def people() -> tuple[tuple[str, bool], ...]:
    """Return first names, each with whether the person is a she."""
    return tuple(
        (name, row[0] == "F") for row in map(str.split, lines("names")) for name in row[1:]
    )


@cache
def first_names() -> tuple[str, ...]:
    """Return first names alone."""
    return tuple(name for name, _ in people())


def with_article(noun: str) -> str:
    """Put `a` or `an` before a noun phrase; a phrase with its own quantity keeps it."""
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"
