"""The drawing: well-formed, every point where its figure says, nothing outside the axes."""

from __future__ import annotations

import itertools
from typing import Any
from xml.etree import ElementTree

import pytest

from civetta.bench.case import Case
from civetta.bench.chart import BOTTOM, HEIGHT, TOP, WIDTH, draw
from civetta.bench.result import FIELDS, Row

NUMBERS = {"prefill": 70, "decode": 3}


def row(kind: Any, depth: int, sessions: int, setting: str, rate: float) -> Row:
    case = Case(kind=kind, tokens=NUMBERS[kind], depth=depth, sessions=sessions)
    known = {
        "test": case.name, "setting": setting, "kind": kind, "depth": depth, "sessions": sessions,
        "rate_mean": rate, "rate_min": rate * 0.9, "rate_max": rate * 1.1,
    }  # fmt: skip
    return Row(**{name: known.get(name) for name in FIELDS})


def texts(drawing: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in drawing.findall(".//{*}text")]


def test_every_combination_has_its_points() -> None:
    rows = [
        row(kind, depth, sessions, setting, 100.0 + depth + sessions)
        for kind, depth, sessions, setting in itertools.product(NUMBERS, (0, 20, 40), (1, 2), "AB")
    ]
    found = ElementTree.fromstring(draw(rows))
    assert len(found.findall(".//{*}circle")) == 2 * len(rows)  # over depth and over sessions
    words = texts(found)
    for word in (
        "Prefill over depth", "Decoding over depth", "Prefill over sessions",
        "Decoding over sessions", "pp70 A x2", "tg3 @ d40 B",
    ):  # fmt: skip
        assert word in words
    assert float(found.attrib["width"]) == 4 * WIDTH
    lowest = max(float(text.attrib["y"]) for text in found.findall(".//{*}text"))
    assert lowest < float(found.attrib["height"])


def test_points_lie_at_their_rates() -> None:
    rows = [row("prefill", depth, 1, "A", rate) for depth, rate in ((0, 200.0), (512, 50.0))]
    found = ElementTree.fromstring(draw(rows))
    heights = [float(c.attrib["cy"]) for c in found.findall(".//{*}circle")]
    floor, top = HEIGHT - BOTTOM, 250.0  # the axis ends at the first round number above 220
    assert heights == pytest.approx([floor - (floor - TOP) * r / top for r in (200, 50)], abs=0.06)
    assert "250" in texts(found)


@pytest.mark.parametrize("rate", [1e-3, 0.7, 3.0, 99.0, 1234.5, 8.2e6])
def test_nothing_leaves_the_axes(rate: float) -> None:
    rows = [row("decode", depth, 1, "A", rate / (1 + depth)) for depth in range(5)]
    found = ElementTree.fromstring(draw(rows))
    for circle in found.findall(".//{*}circle"):
        assert 0 < float(circle.attrib["cx"]) < WIDTH
        assert TOP <= float(circle.attrib["cy"]) <= HEIGHT - BOTTOM
    ends = [float(e.attrib[k]) for e in found.findall(".//{*}line") for k in ("y1", "y2")]
    assert all(TOP <= y <= HEIGHT - BOTTOM for y in ends)


def test_one_kind_alone_has_one_panel() -> None:
    found = ElementTree.fromstring(draw([row("decode", 0, 4, "A", 5.0)]))
    assert float(found.attrib["width"]) == WIDTH
    assert texts(found).count("Decoding over depth") == 1
