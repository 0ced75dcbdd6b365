"""Questions about pictures of shapes: colour, shape, count, and a list from left to right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from training.data import scenes
from training.data.dialogue import Turn, chat

if TYPE_CHECKING:
    from training.data.draw import Draw
    from training.data.sample import Chat
    from training.data.scenes import Scene

TOKEN_SIDE = 32
"""Pixels along one side of the square that one image token stands for (model.md D.1)."""

COUNT_ALL = (
    "How many shapes are there?",
    "How many shapes are in the image?",
    "How many shapes do you see?",
    "Count the shapes.",
    "How many objects are in the picture?",
    "How many shapes are in this picture? Answer with a number.",
)
COUNT_SOME = (
    "How many {x} are there?",
    "How many {x} are in the image?",
    "How many {x} do you see?",
    "Count the {x}.",
)
COLOUR_ONE = (
    "What colour is the {k}?",
    "What color is the {k}?",
    "Which colour does the {k} have?",
    "What is the color of the {k}?",
    "What is the colour of the {k}? Answer with one word.",
)
COLOUR_ANY = ("What colour is the shape?", "What color is the shape?", "Which colour is it?",
              "What color is this?", "What colour is the object in the picture?")  # fmt: skip
KIND_ONE = (
    "What shape is {c}?",
    "Which shape is {c}?",
    "What is the {c} shape?",
    "What shape is the {c} object?",
)
KIND_ANY = ("What shape is this?", "What shape is in the image?", "Which shape do you see?",
            "What is in the picture?", "Name the shape.",
            "What shape is it? Answer with one word.")  # fmt: skip
LIST = (
    "List the shapes from left to right.",
    "Describe the image.",
    "Describe the picture.",
    "What do you see in the image?",
    "What is in this image?",
)


def plural(kind: str) -> str:
    """Return the plural of a shape's name."""
    return f"{kind}es" if kind == "cross" else f"{kind}s"


def listing(scene: Scene) -> str:
    """Return the shapes from left to right in words."""
    names = [shape.name for shape in scene.shapes]
    if len(names) == 1:
        return f"a {names[0]}".replace("a orange", "an orange")
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _thought(scene: Scene) -> str:
    return f"I see, from left to right: {listing(scene)}."


def _count(draw: Draw, scene: Scene) -> tuple[str, str]:
    if draw.chance(0.5):
        return draw.choice(COUNT_ALL), str(len(scene.shapes))
    shape = draw.choice(scene.shapes)
    if draw.chance(0.15):
        shape = draw.choice(scenes.scene(draw, 1, scene.side).shapes)
    return _count_some(draw, scene, shape.kind if draw.chance(0.5) else shape.colour)


def _count_some(draw: Draw, scene: Scene, trait: str) -> tuple[str, str]:
    """Ask for the shapes of one kind or colour."""
    what = plural(trait) if trait in scenes.KINDS else f"{trait} shapes"
    same = [trait in (shape.kind, shape.colour) for shape in scene.shapes]
    return draw.choice(COUNT_SOME).format(x=what), str(sum(same))


def _colour(draw: Draw, scene: Scene) -> tuple[str, str] | None:
    if len(scene.shapes) == 1 and draw.chance(0.5):
        return draw.choice(COLOUR_ANY), scene.shapes[0].colour
    kinds = Counter(shape.kind for shape in scene.shapes)
    unique = [shape for shape in scene.shapes if kinds[shape.kind] == 1]
    if not unique:
        return None
    shape = draw.choice(unique)
    return draw.choice(COLOUR_ONE).format(k=shape.kind), shape.colour


def _kind(draw: Draw, scene: Scene) -> tuple[str, str] | None:
    if len(scene.shapes) == 1 and draw.chance(0.5):
        return draw.choice(KIND_ANY), scene.shapes[0].kind
    colours = Counter(shape.colour for shape in scene.shapes)
    unique = [shape for shape in scene.shapes if colours[shape.colour] == 1]
    if not unique:
        return None
    shape = draw.choice(unique)
    return draw.choice(KIND_ONE).format(c=shape.colour), shape.kind


def question(draw: Draw, scene: Scene) -> Turn:
    """Return one question that the scene answers without doubt."""
    while True:
        made: tuple[str, str] | None
        roll = draw.rng.random()
        if not draw.single and roll < 0.2:
            made = (draw.choice(LIST if len(scene.shapes) > 1 else LIST[1:3]), listing(scene))
        else:
            made = draw.choice((_count, _colour, _kind))(draw, scene)
        if made is not None:
            return Turn(user=made[0], answer=made[1], reasoning=_thought(scene))


def make_counting(draw: Draw) -> Chat:
    """Return one picture of few kinds and colours, so that counting one of them is hard."""
    side = draw.choice(scenes.SIZES if draw.room >= 192 else (128,))
    count = draw.between(2, 6)
    scene = draw.unseen(lambda: scenes.scene(draw, count, side, few=True), lambda made: made.key)
    turns: dict[str, Turn] = {}
    for _ in range(1 if draw.single else draw.between(3, 6)):
        ask, answer = _count(draw, scene)
        turns.setdefault(ask, Turn(user=ask, answer=answer, reasoning=_thought(scene)))
    return _chat(draw, "counting", scene, list(turns.values()))


def make_picking(draw: Draw) -> Chat:
    """Return a small picture of three to six shapes; each question counts some among the others.

    Nine in ten have thinking off: listing the shapes first would make counting them easy.
    """
    draw = replace(draw, thinking=draw.chance(0.1) if draw.thinking is None else draw.thinking)
    side = 256 if draw.room >= 192 and draw.chance(0.2) else 128
    count, few = draw.choice((3, 4, 4, 5, 5, 5, 6, 6, 6, 6)), draw.chance(0.4)
    scene = draw.unseen(lambda: scenes.scene(draw, count, side, few=few), lambda made: made.key)
    shown = {trait for shape in scene.shapes for trait in (shape.kind, shape.colour)}
    asked = [trait for trait in (*scenes.KINDS, *scenes.COLOURS) if trait in shown]
    asked.append(draw.choice((*scenes.KINDS, *scenes.COLOURS)))
    draw.rng.shuffle(asked)
    made = [_count_some(draw, scene, trait) for trait in asked[: 1 if draw.single else 7]]
    turns = [Turn(user=ask, answer=answer, reasoning=_thought(scene)) for ask, answer in made]
    return _chat(draw, "picking", scene, turns)


def make(draw: Draw) -> Chat:
    """Return one picture with one to six questions about it."""
    side = draw.choice(scenes.SIZES if draw.room >= 192 else (128,))
    count = draw.between(1, 6) if draw.chance(0.75) else 1
    scene = draw.unseen(lambda: scenes.scene(draw, count, side), lambda made: made.key)
    asked = 1 if draw.single or draw.chance(0.2) else draw.between(2, 6)
    turns: dict[str, Turn] = {}
    for _ in range(asked):
        turn = question(draw, scene)
        turns.setdefault(str(turn.user), turn)
    return _chat(draw, "vision", scene, list(turns.values()))


def _chat(draw: Draw, ability: str, scene: Scene, turns: list[Turn]) -> Chat:
    """The conversation: the picture stands before or behind the first question."""
    first, *rest = turns
    parts: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": first.user}]
    if draw.chance(0.15):
        parts.reverse()
    first = Turn(user=parts, answer=first.answer, reasoning=first.reasoning)
    return chat(
        draw,
        ability,
        scene.key,
        [first, *rest],
        images=(scenes.render(draw, scene),),
        cells=(scenes.cells(scene, TOKEN_SIDE),),
    )
