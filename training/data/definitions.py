"""Definitions of common words and well-known facts, in one fluent sentence each."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from training.data import lexicon
from training.data.dialogue import Turn, chat
from training.data.draw import split_of
from training.data.sample import Chat, Document

if TYPE_CHECKING:
    from training.data.draw import Draw

ASKS = (
    "What {is} {x}?",
    "What {is} {x}?",
    "what {is} {x}",
    "Define {w}.",
    "Define the word {w}.",
    "Define the word '{w}'.",
    "What does {w} mean?",
    'What does "{w}" mean?',
    "What does the word '{w}' mean?",
    "What is the meaning of {w}?",
    "Explain the word {w}.",
    "Explain what {x} {is}.",
    "Tell me what {x} {is}.",
    "Can you explain what {x} {is}?",
    "Give me a definition of {w}.",
    "Describe {x} in one sentence.",
    "Do you know what {x} {is}?",
    "Please define {w}.",
)
FACTS = {
    "capital": (
        "The capital of {s} is {v}.",
        ("What is the capital of {s}?", "What's the capital of {s}?", "Capital of {s}?",
         "Which city is the capital of {s}?", "Name the capital of {s}.",
         "Tell me the capital of {s}."),
    ),
    "opposite": (
        "The opposite of {s} is {v}.",
        ("What is the opposite of {s}?", "Tell me the opposite of {s}.", "Opposite of {s}?",
         "Which word means the opposite of {s}?"),
    ),
    "colour": (
        "The colour of {s} is {v}.",
        ("What colour is {s}?", "What color is {s}?", "Which colour is {s}?",
         "Tell me the colour of {s}."),
    ),
    "young": (
        "A young {s} is called a {v}.",
        ("What is a young {s} called?", "What do you call a young {s}?",
         "What is a baby {s} called?"),
    ),
    "legs": (
        "{S} has {v} legs.",
        ("How many legs does {s} have?", "Tell me how many legs {s} has."),
    ),
    "count": (
        "There are {v} {s}.",
        ("How many {s} are there?", "Tell me how many {s} there are.", "Number of {s}?"),
    ),
}  # fmt: skip


@cache
def entries() -> tuple[tuple[str, str, str, str], ...]:
    """Return (word, subject as used in a question, is or are, definition) for each word."""
    found = []
    for word, sentence in lexicon.rows("definitions"):
        verb = "are" if sentence.startswith("Stairs") else "is"
        subject = sentence.split(f" {verb} ")[0]
        if subject.split()[0] in ("A", "An", "The") or word != "Earth":
            subject = subject[0].lower() + subject[1:]
        found.append((word, subject, verb, sentence))
    return tuple(found)


def _definition(draw: Draw) -> tuple[str, Turn]:
    word, subject, verb, sentence = draw.choice(entries())
    ask = draw.choice(ASKS).format(x=subject, w=word, **{"is": verb})
    thought = f"The user asks for the meaning of {word}."
    return ask, Turn(user=ask, answer=sentence, reasoning=thought)


def _fact(draw: Draw) -> tuple[str, Turn]:
    kind, subject, value = draw.choice(lexicon.rows("facts"))
    sentence, asks = FACTS[kind]
    ask = draw.choice(asks).format(s=subject)
    answer = sentence.format(s=subject, v=value, S=subject[0].upper() + subject[1:])
    answer = answer.replace("a owlet", "an owlet")
    return ask, Turn(user=ask, answer=answer, reasoning="I know this fact.")


def turn(draw: Draw) -> Turn:
    """Return one question; the split goes by the question's wording, not by the fact."""
    maker = _definition if draw.chance(0.7) else _fact
    while True:
        ask, made = maker(draw)
        if split_of(f"ask {ask}") == draw.split:
            return made


def make(draw: Draw) -> Chat | Document:
    """Return one to four questions, or a page of definitions."""
    if not draw.single and draw.chance(0.15):
        picked = draw.rng.sample(entries(), draw.between(2, 10))
        return Document(ability="definitions", key="", text="\n".join(p[3] for p in picked))
    count = 1 if draw.single or draw.chance(0.4) else draw.between(2, 4)
    return chat(draw, "definitions", "", [turn(draw) for _ in range(count)])
