"""Draws the loss curves of docs/nano.svg from the logs beside this file.

python -m training.plot_log
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
OUT = HERE.parent / "docs" / "nano.svg"
WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 220, 52, 34, 60
COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#7b5ea7")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot: a title, and curves of (step, value) by name; values are shown by their log."""

    title: str
    curves: dict[str, list[tuple[float, float]]]


def panels() -> list[Panel]:
    """The text model, the stages with pictures, the draft head."""
    text = _lines("nano_log.jsonl")
    stages = _lines("nano_stages_log.jsonl")
    seen = _joined([x for x in stages if x["stage"] != "draft"])
    draft = _joined([x for x in stages if x["stage"] == "draft"])
    return [
        Panel(title="Text model", curves=_curves(text, ("text", "reply"))),
        Panel(
            title="see, both (300), count (1,100), pick (1,440), names (2,000)",
            curves=_curves(seen, ("reply", "cells")),
        ),
        Panel(
            title="Draft head, by depth; again (300, 520)",
            curves=_curves(draft, ("kl1", "kl2", "kl3", "kl4")),
        ),
    ]


def _lines(name: str) -> list[dict[str, float | str]]:
    lines = [json.loads(line) for line in (HERE / name).read_text().splitlines()]
    return [line for line in lines if "step" in line and "heldout" not in line]


def _joined(lines: list[dict[str, float | str]]) -> list[dict[str, float | str]]:
    """Stages one behind the other: each begins at step 1 of its own."""
    joined: list[dict[str, float | str]] = []
    start, last = 0.0, 0.0
    for line in lines:
        step = float(line["step"])
        if step <= last:
            start += last
        last = step
        joined.append(line | {"step": start + step})
    return joined


def _curves(
    lines: list[dict[str, float | str]], names: tuple[str, ...]
) -> dict[str, list[tuple[float, float]]]:
    return {
        name: [(float(x["step"]), float(x[name])) for x in lines if name in x] for name in names
    }


def draw(panel: Panel, x0: float) -> list[str]:
    """SVG elements of one panel whose left edge is at x0."""
    points = [point for curve in panel.curves.values() for point in curve]
    most = max(step for step, _ in points)
    low = math.floor(math.log10(min(value for _, value in points)) * 2) / 2
    high = math.ceil(math.log10(max(value for _, value in points)) * 2) / 2

    def at(step: float, value: float) -> tuple[float, float]:
        part = (math.log10(value) - low) / (high - low)
        return x0 + LEFT + step / most * WIDTH, TOP + HEIGHT * (1 - part)

    out = [f'<text x="{x0 + LEFT}" y="{TOP - 12}" font-weight="bold">{panel.title}</text>']
    ticks = [low + 0.5 * i for i in range(round((high - low) * 2) + 1)]
    for tick in ticks:
        y = at(0, 10**tick)[1]
        out.append(f'<path d="M{x0 + LEFT} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        label = f"{10**tick:.2g}"
        out.append(f'<text x="{x0 + LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for part in (0.0, 0.5, 1.0):
        x, y = x0 + LEFT + part * WIDTH, TOP + HEIGHT + 18
        out.append(f'<text x="{x:.0f}" y="{y}" text-anchor="middle">{part * most:.0f}</text>')
    for number, (name, curve) in enumerate(panel.curves.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve))
        colour = COLOURS[number]
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        x, y = x0 + LEFT + WIDTH - 50, TOP + 18 + 16 * number
        out.append(f'<text x="{x}" y="{y}" fill="{colour}">{name}</text>')
    return out


def main() -> None:
    """Write the picture."""
    parts: list[str] = []
    for number, panel in enumerate(panels()):
        parts += draw(panel, number * (WIDTH + GAP))
    size = (3 * (WIDTH + GAP) + LEFT, TOP + HEIGHT + 40)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}"'
        ' font-family="sans-serif" font-size="12">'
    )
    background = f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>'
    OUT.write_text("\n".join([head, background, *parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
