"""Rates as an SVG drawing: over depth, and over the number of sessions, prefill beside decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from civetta.bench.result import Row

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 40, 56
LEGEND_COLUMNS, LEGEND_ROW = 3, 15
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
"""Told apart by most colour-blind readers; further lines begin again, and each is named."""

Point = tuple[float, float, float, float]
"""x, mean, low, high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes; lines are equally spaced along x, which holds few and uneven values."""

    title: str
    x_title: str
    lines: dict[str, list[Point]]


def draw(rows: Sequence[Row]) -> str:
    """The whole drawing, an SVG document in UTF-8."""
    panels = [panel for kind in ("prefill", "decode") for panel in _panels(rows, kind)]
    names = max((len(panel.lines) for panel in panels), default=0)
    width = WIDTH * max(len(panels), 1)
    height = HEIGHT + LEGEND_ROW * (-(-names // LEGEND_COLUMNS) - 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, panel in enumerate(panels):
        parts += [f'<g transform="translate({i * WIDTH} 0)">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panels(rows: Sequence[Row], kind: str) -> list[Panel]:
    own = [row for row in rows if row.kind == kind]
    found = []
    word = "Prefill" if kind == "prefill" else "Decoding"
    several = {row.sessions for row in own}
    if own and (len({row.depth for row in own}) > 1 or len(several) == 1):
        lines = _lines(own, lambda row: row.depth, lambda row: _label(row, several))
        found.append(Panel(title=f"{word} over depth", x_title="depth, tokens", lines=lines))
    if len(several) > 1:
        depths = {row.depth for row in own}
        lines = _lines(
            own,
            lambda row: row.sessions,
            lambda row: f"{row.test if len(depths) > 1 else _short(row)} {row.setting}",
        )
        found.append(Panel(title=f"{word} over sessions", x_title="sessions", lines=lines))
    return found


def _short(row: Row) -> str:
    return row.test.partition(" ")[0]


def _label(row: Row, several: set[int]) -> str:
    return f"{_short(row)} {row.setting}" + (f" x{row.sessions}" if len(several) > 1 else "")


def _lines(
    rows: Sequence[Row], x_of: Callable[[Row], float], label: Callable[[Row], str]
) -> dict[str, list[Point]]:
    lines: dict[str, list[Point]] = {}
    for row in rows:
        point = (x_of(row), row.rate_mean, row.rate_min, row.rate_max)
        lines.setdefault(label(row), []).append(point)
    return {name: sorted(points) for name, points in lines.items()}


def _panel(panel: Panel) -> list[str]:
    xs = sorted({point[0] for points in panel.lines.values() for point in points})
    top = _ceiling(max(point[3] for points in panel.lines.values() for point in points))
    inner, floor = WIDTH - LEFT - RIGHT, HEIGHT - BOTTOM

    def x_at(value: float) -> float:
        return LEFT + inner * (xs.index(value) + 0.5) / len(xs)

    def y_at(rate: float) -> float:
        return floor - (floor - TOP) * rate / top

    parts = [_text(WIDTH / 2, 18, panel.title, "middle", "bold")]
    for step in range(5):
        rate = top * step / 4
        y = y_at(rate)
        parts.append(_stroke((LEFT, y, WIDTH - RIGHT, y), "#ddd"))
        parts.append(_text(LEFT - 6, y + 4, f"{rate:g}", "end"))
    parts += [_text(x_at(x), floor + 16, f"{x:g}", "middle") for x in xs]
    parts.append(_text(WIDTH / 2, floor + 32, f"{panel.x_title}; tokens/s, all sessions", "middle"))
    for i, (name, points) in enumerate(panel.lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{x_at(x):.1f},{y_at(mean):.1f}" for x, mean, _, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, mean, low, high in points:
            parts.append(_stroke((x_at(x), y_at(low), x_at(x), y_at(high)), colour))
            parts.append(
                f'<circle cx="{x_at(x):.1f}" cy="{y_at(mean):.1f}" r="3" fill="{colour}"/>'
            )
        place = 12 + (WIDTH - 12) / LEGEND_COLUMNS * (i % LEGEND_COLUMNS)
        height = floor + 48 + LEGEND_ROW * (i // LEGEND_COLUMNS)
        parts.append(_text(place, height, name, "start", colour=colour))
    return parts


def _ceiling(value: float) -> float:
    """The least 1, 2, 2.5 or 5 times a power of ten that is not below `value` > 0."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= value)


def _text(
    x: float, y: float, text: str, anchor: str, weight: str = "normal", colour: str = "#222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
        f' fill="{colour}">{escape(text)}</text>'
    )


def _stroke(ends: tuple[float, float, float, float], colour: str) -> str:
    x1, y1, x2, y2 = ends
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
