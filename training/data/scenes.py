"""Draws pictures of coloured shapes on plain backgrounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from training.data.draw import Draw

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 220),
    "yellow": (245, 220, 40),
    "orange": (250, 140, 20),
    "purple": (130, 40, 170),
    "black": (15, 15, 15),
    "white": (250, 250, 250),
}
BACKGROUNDS: tuple[Colour, ...] = (
    (255, 255, 255),
    (255, 255, 255),
    (240, 240, 240),
    (200, 200, 200),
    (128, 128, 128),
    (70, 70, 70),
    (0, 0, 0),
    (245, 235, 215),
    (205, 225, 240),
    (215, 240, 215),
    (60, 50, 40),
)
KINDS = ("circle", "square", "triangle", "star", "cross")
SIZES = (128, 128, 256)
LEAST_CONTRAST = 90
"""Smallest distance in RGB between a shape and the background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One shape: what it is, and its centre and radius in pixels."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        """The shape in words."""
        return f"{self.colour} {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A square picture: its side in pixels, its background, its shapes from left to right."""

    side: int
    background: Colour
    shapes: tuple[Shape, ...]

    @property
    def key(self) -> str:
        """Name of the item: what is in the picture and about where."""
        spots = " ".join(f"{s.name} {s.x:.0f} {s.y:.0f}" for s in self.shapes)
        return f"scene {self.side} {spots}"


def cells(made: Scene, cell: int) -> np.ndarray:
    """What has its centre in each cell of `cell` pixels a side, row by row, int64.

    0 is nothing, 1 + 8 * shape + colour anything else.
    """
    count = made.side // cell
    labels = np.zeros((count, count), dtype=np.int64)
    names = list(COLOURS)
    for shape in made.shapes:
        label = 1 + len(names) * KINDS.index(shape.kind) + names.index(shape.colour)
        labels[int(shape.y) // cell, int(shape.x) // cell] = label
    return labels.reshape(-1)


def _distance(a: Colour, b: Colour) -> float:
    return math.dist(a, b)


def _place(draw: Draw, side: int, count: int) -> list[tuple[float, float, float]]:
    """Return centres and radii of shapes that do not touch, from left to right."""
    most = side * (0.38 if count == 1 else 0.24 if count <= 3 else 0.17)
    least = side * 0.085
    while True:
        spots: list[tuple[float, float, float]] = []
        for _ in range(60):
            r = least + (most - least) * draw.rng.random()
            x = r + 2 + (side - 2 * r - 4) * draw.rng.random()
            y = r + 2 + (side - 2 * r - 4) * draw.rng.random()
            if all(math.hypot(x - u, y - v) > r + s + 3 for u, v, s in spots):
                spots.append((x, y, r))
            if len(spots) == count:
                return sorted(spots)


def scene(draw: Draw, count: int, side: int, *, few: bool = False) -> Scene:
    """Make up a scene; one in four has shapes of one kind, one in four of one colour.

    `few` leaves two kinds and two colours at most.
    """
    background = draw.choice(BACKGROUNDS)
    visible = [n for n, c in COLOURS.items() if _distance(c, background) >= LEAST_CONTRAST]
    kinds = (draw.choice(KINDS),) if draw.chance(0.25) else KINDS
    colours = [draw.choice(visible)] if draw.chance(0.25) else visible
    if few:
        kinds = (draw.choice(kinds), draw.choice(kinds))
        colours = [draw.choice(colours), draw.choice(colours)]
    shapes = tuple(
        Shape(kind=draw.choice(kinds), colour=draw.choice(colours), x=x, y=y, radius=r)
        for x, y, r in _place(draw, side, count)
    )
    return Scene(side=side, background=background, shapes=shapes)


def _polygon(shape: Shape, angles: list[float], radii: list[float]) -> list[tuple[float, float]]:
    return [
        (shape.x + r * shape.radius * math.cos(a), shape.y + r * shape.radius * math.sin(a))
        for a, r in zip(angles, radii, strict=True)
    ]


def _paint(canvas: ImageDraw.ImageDraw, shape: Shape, fill: Colour, scale: int) -> None:
    big = Shape(
        kind=shape.kind,
        colour=shape.colour,
        x=shape.x * scale,
        y=shape.y * scale,
        radius=shape.radius * scale,
    )
    x, y, r = big.x, big.y, big.radius
    if shape.kind == "circle":
        canvas.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape.kind == "square":
        h = r * 0.85
        canvas.rectangle((x - h, y - h, x + h, y + h), fill=fill)
    elif shape.kind == "cross":
        w = r * 0.3
        canvas.rectangle((x - r, y - w, x + r, y + w), fill=fill)
        canvas.rectangle((x - w, y - r, x + w, y + r), fill=fill)
    elif shape.kind == "triangle":
        up = -math.pi / 2
        canvas.polygon(
            _polygon(big, [up + i * math.tau / 3 for i in range(3)], [1.0] * 3), fill=fill
        )
    else:
        angles = [-math.pi / 2 + i * math.tau / 10 for i in range(10)]
        canvas.polygon(_polygon(big, angles, [1.0, 0.42] * 5), fill=fill)


def render(draw: Draw, made: Scene) -> np.ndarray:
    """Draw a scene as uint8 [side, side, 3], smooth or jagged, with a little noise or none."""
    scale = 2 if draw.chance(0.5) else 1
    picture = Image.new("RGB", (made.side * scale,) * 2, made.background)
    canvas = ImageDraw.Draw(picture)
    for shape in made.shapes:
        shift = 0 if draw.chance(0.4) else 18
        fill = tuple(
            min(255, max(0, c + draw.between(-shift, shift))) for c in COLOURS[shape.colour]
        )
        _paint(canvas, shape, fill, scale)  # type: ignore[arg-type]
    if scale == 2:
        picture = picture.resize((made.side, made.side), Image.Resampling.BOX)
    pixels = np.asarray(picture)
    if draw.chance(0.3):
        noise = np.random.default_rng(draw.between(0, 2**31)).integers(
            -6, 7, pixels.shape, dtype=np.int16
        )
        pixels = np.clip(pixels.astype(np.int16) + noise, 0, 255).astype(np.uint8)
    return np.ascontiguousarray(pixels)
