"""Greetings, questions about the model itself, and conversations that mix several abilities."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from training.data import arithmetic, copying, definitions, json_objects, lexicon, stories
from training.data.dialogue import Turn, chat

if TYPE_CHECKING:
    from training.data.draw import Draw
    from training.data.sample import Chat

THOUGHTS = {
    "hello": "The user greets me. I greet back.",
    "thanks": "The user thanks me.",
    "bye": "The user says goodbye.",
    "joke": "The user wants a joke.",
    "dontknow": "I cannot know this.",
}


@cache
def topics() -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the questions and the answers of each topic."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    name = ""
    for line in lexicon.lines("chitchat"):
        if line.startswith("["):
            name = line[1:-1]
            found[name] = ([], [])
        else:
            found[name][0 if line.startswith("? ") else 1].append(line[2:])
    return {name: (tuple(asks), tuple(answers)) for name, (asks, answers) in found.items()}


def about(draw: Draw, topic: str) -> Turn:
    """Return a turn of one topic."""
    asks, answers = topics()[topic]
    thought = THOUGHTS.get(topic, "The user asks about me.")
    return Turn(user=draw.choice(asks), answer=draw.choice(answers), reasoning=thought)


def turn(draw: Draw) -> Turn:
    """Return a turn of any topic."""
    return about(draw, draw.choice(tuple(topics())))


def _task(draw: Draw) -> Turn:
    """Return a turn of another ability."""
    roll = draw.rng.random()
    if roll < 0.3:
        return arithmetic.turn(draw)
    if roll < 0.65:
        return definitions.turn(draw)
    if roll < 0.75:
        text = copying.passage(draw, draw.between(2, 20))
        ask = draw.choice(copying.ASKS).format(p=text)
        return Turn(user=ask, answer=text, reasoning="I repeat the text exactly.")
    if roll < 0.9:
        return json_objects.turn(draw)
    story = stories.tell(draw)
    thought = f"I tell a story about {story.hero} and {story.friend}."
    return Turn(user=draw.choice(stories.ASKS), answer=story.text, reasoning=thought)


def make(draw: Draw) -> Chat:
    """Return a conversation of one to five turns; evaluation asks one question about the model."""
    if draw.single:
        return chat(draw, "chat", "", [about(draw, draw.choice(("hello", "who", "thanks", "bye")))])
    turns = []
    if draw.chance(0.5):
        turns.append(about(draw, draw.choice(("hello", "howareyou"))))
    for _ in range(draw.between(1, 3)):
        turns.append(turn(draw) if draw.chance(0.45) else _task(draw))
    if draw.chance(0.3):
        turns.append(about(draw, draw.choice(("thanks", "bye"))))
    return chat(draw, "chat", "", turns)
