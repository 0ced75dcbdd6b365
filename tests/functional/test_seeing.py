"""What a served model sees in pictures, through the openai SDK: drawings as data URLs, greedy.

The questions ask for one word or number, so that a model that talks more can pass too. A server
without images fails here; leave the file out for a text model.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from asked import with_pictures
from training.data import scenes
from training.data.draw import Draw, seeded

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from asked import Asked
    from training.data.scenes import Scene

COLOUR = "What colour is the shape? Answer with one word."
KIND = "What shape is it? Answer with one word."
COUNT = "How many shapes are in this picture? Answer with a number."
WHITE = (255, 255, 255)


def drawn(count: int, side: int, fits: Callable[[Scene], bool]) -> np.ndarray:
    """A held-out picture on white that is as asked for; noise and colours are those of training."""
    draw = Draw(rng=seeded("functional", count, side), split="heldout")
    while True:
        made = draw.unseen(lambda: scenes.scene(draw, count, side), lambda scene: scene.key)
        if made.background == WHITE and fits(made):
            return scenes.render(draw, made)


def words(asked: Asked, pixels: np.ndarray, question: str) -> list[str]:
    """The reply in words without capitals."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    messages = with_pictures([{"role": "user", "content": content}], (pixels,))
    return re.findall(
        r"\w+", (asked.send(messages, max_tokens=40).choices[0].message.content).lower()
    )


@pytest.mark.parametrize("side", [128, 256])
def test_one_question_about_two_pictures_has_two_answers(asked: Asked, side: int) -> None:
    for colour in ("red", "blue"):
        pixels = drawn(1, side, lambda scene, c=colour: scene.shapes[0].colour == c)
        assert set(words(asked, pixels, COLOUR)) & set(scenes.COLOURS) == {colour}


def test_it_names_the_shape(asked: Asked) -> None:
    for kind in ("circle", "star"):
        pixels = drawn(1, 256, lambda scene, k=kind: scene.shapes[0].kind == k)
        assert set(words(asked, pixels, KIND)) & set(scenes.KINDS) == {kind}


@pytest.mark.parametrize(("count", "word"), [(2, "two"), (5, "five")])
def test_it_counts(asked: Asked, count: int, word: str) -> None:
    found = words(asked, drawn(count, 128, lambda _: True), COUNT)
    assert {str(count), word} & set(found), found


def test_a_picture_and_a_later_question_without_one(asked: Asked) -> None:
    """The picture stays in sight in the next turn of the conversation."""
    pixels = drawn(1, 128, lambda scene: scene.shapes[0].name == "green square")
    first = [{"type": "image"}, {"type": "text", "text": KIND}]
    messages = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": "square"},
        {"role": "user", "content": COLOUR},
    ]
    done = asked.send(with_pictures(messages, (pixels,)), max_tokens=40)
    assert "green" in done.choices[0].message.content.lower()
