"""Rows as Markdown, JSON, JSON lines or CSV, each written as soon as it is known."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from civetta.bench.phases import PHASES
from civetta.bench.result import FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from civetta.bench.result import Row


class Writer(Protocol):
    """Takes rows in order; `end` closes the document."""

    def add(self, rows: Sequence[Row]) -> None:
        """Rows of one case."""
        ...

    def end(self) -> None:
        """No more rows."""
        ...


class Markdown:
    """A table of rates, then those of ratios, phases and memory where they were asked for."""

    HEAD = (
        *("model", "size", "params", "backend", "threads", "dtype", "batch", "sessions", "test"),
        *("tok/s", "min-max", "a session", "ids"),
    )

    def __init__(self, write: Callable[[str], None], head: Mapping[str, Any]) -> None:
        self._write = write
        self._rows: list[Row] = []
        self._compared = "setting_b" in head
        titles = ("", *self.HEAD) if self._compared else self.HEAD
        self._write(_line(titles) + "\n" + "|---" * len(titles) + "|\n")

    def add(self, rows: Sequence[Row]) -> None:
        """Lines of the first table."""
        for row in rows:
            self._rows.append(row)
            cells = (
                *((row.setting,) if self._compared else ()),
                *(f"{row.model} {row.format}", _size(row.model_bytes), _count(row.parameters)),
                *(row.backend, str(row.threads), row.dtype, str(row.prefill_batch)),
                *(str(row.sessions), row.test, f"{_rate(row.rate_mean)} ± {_rate(row.rate_sd)}"),
                f"{_rate(row.rate_min)}-{_rate(row.rate_max)}",
                *(_rate(row.session_rate), row.ids_sha256[:12]),
            )
            self._write(_line(cells) + "\n")

    def end(self) -> None:
        """The other tables."""
        self._table(
            ("test", "sessions", "B over A", "min-max", "sd", "same output"),
            [
                (
                    *(row.test, str(row.sessions), f"{row.ratio_median:.3f}"),
                    *(f"{row.ratio_min:.3f}-{row.ratio_max:.3f}", f"{row.ratio_sd:.3f}"),
                    "yes" if row.same_output else "no",
                )
                for row in self._rows
                if row.ratio_median is not None
            ],
        )
        self._table(
            (*self._named, *PHASES),
            [
                (*self._name(row), *_shares(row.phases_s))
                for row in self._rows
                if row.phases_s is not None
            ],
        )
        self._table(
            (*self._named, "host peak", "device peak", "threads"),
            [
                (
                    *self._name(row),
                    *(_size(row.rss_peak_bytes), _size(row.device_peak_bytes)),
                    str(row.threads_peak),
                )
                for row in self._rows
                if row.rss_peak_bytes is not None
            ],
        )

        self._table(
            (*self._named, "drafting", "drafts that stood"),
            [
                (
                    *self._name(row),
                    row.speculative,
                    f"{row.draft_tokens_accepted} of {row.draft_tokens}",
                )
                for row in self._rows
                if row.draft_tokens is not None
            ],
        )

    @property
    def _named(self) -> tuple[str, ...]:
        return ("setting", "test", "sessions") if self._compared else ("test", "sessions")

    def _name(self, row: Row) -> tuple[str, ...]:
        own = (row.test, str(row.sessions))
        return (row.setting, *own) if self._compared else own

    def _table(self, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        if lines:
            text = [_line(head), "|---" * len(head) + "|", *map(_line, lines)]
            self._write("\n" + "\n".join(text) + "\n")


class Json:
    """One document: what is common to all rows, and the rows."""

    def __init__(self, write: Callable[[str], None], head: Mapping[str, Any]) -> None:
        self._write, self._head = write, head
        self._rows: list[Row] = []

    def add(self, rows: Sequence[Row]) -> None:
        """Keep them for the end."""
        self._rows += rows

    def end(self) -> None:
        """Write the document."""
        document = {**self._head, "rows": [asdict(row) for row in self._rows]}
        self._write(json.dumps(document, indent=1) + "\n")


class JsonLines:
    """An object a row, each with all that is common."""

    def __init__(self, write: Callable[[str], None], head: Mapping[str, Any]) -> None:
        self._write, self._head = write, head

    def add(self, rows: Sequence[Row]) -> None:
        """A line each."""
        for row in rows:
            self._write(json.dumps({**self._head, **asdict(row)}) + "\n")

    def end(self) -> None:
        """Nothing is left to say."""


class Csv:
    """A line of names, then a line a row; lists and phases are JSON in their field."""

    def __init__(self, write: Callable[[str], None], head: Mapping[str, Any]) -> None:
        self._write, self._head = write, head
        self._line((*head, *FIELDS))

    def add(self, rows: Sequence[Row]) -> None:
        """A line each."""
        for row in rows:
            values = asdict(row)
            self._line((*self._head.values(), *(values[name] for name in FIELDS)))

    def end(self) -> None:
        """Nothing is left to say."""

    def _line(self, values: Sequence[Any]) -> None:
        buffer = io.StringIO()
        nested = (dict, list, tuple)
        flat = [json.dumps(v) if isinstance(v, nested) else v for v in values]
        csv.writer(buffer, lineterminator="\n").writerow(flat)
        self._write(buffer.getvalue())


WRITERS: dict[str, type[Markdown] | type[Json] | type[JsonLines] | type[Csv]] = {
    "md": Markdown,
    "json": Json,
    "csv": Csv,
    "jsonl": JsonLines,
}


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shares(phases_s: Mapping[str, float]) -> list[str]:
    """Milliseconds a repetition, and of all."""
    total_s = sum(phases_s.values())
    return [
        f"{1000 * phases_s[name]:.2f} ms ({100 * phases_s[name] / total_s:.0f} %)"
        for name in PHASES
    ]


def _rate(tokens_a_s: float) -> str:
    return f"{tokens_a_s:.2f}" if tokens_a_s < 1000 else f"{tokens_a_s:.0f}"


def _size(count: int | None) -> str:
    if not count:
        return "-"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1024:.0f} KiB"


def _count(parameters: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if parameters >= size:
            return f"{parameters / size:.2f} {unit}"
    return f"{parameters / 1000:.0f} K"
