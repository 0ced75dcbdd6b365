"""Passages to be repeated exactly: words, sentences, numbers, codes, names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.data import lexicon, retrieval
from training.data.dialogue import Turn, chat
from training.data.encode import encode_text

if TYPE_CHECKING:
    from training.data.draw import Draw
    from training.data.sample import Chat

EVAL_TOKENS = 42

ASKS = (
    "Repeat the following text exactly:\n\n{p}",
    "Repeat the following text exactly:\n{p}",
    "Repeat this text exactly: {p}",
    "Copy this text word for word:\n\n{p}",
    "Copy the following passage exactly:\n\n{p}",
    "Repeat after me: {p}",
    "Say this back to me: {p}",
    "Write the same text again:\n\n{p}",
    "Please repeat: {p}",
    "Output this text without any change:\n\n{p}",
)


def _random_words(draw: Draw, count: int) -> str:
    return " ".join(draw.choice(lexicon.words()) for _ in range(count))


def _sentences(draw: Draw, count: int) -> str:
    text = " ".join(retrieval.filler(draw, count * 5))
    return text if draw.chance(0.5) else " ".join(text.split()[:count])


def _mixed(draw: Draw, count: int) -> str:
    parts = []
    for _ in range(count):
        roll = draw.rng.random()
        if roll < 0.6:
            parts.append(draw.choice(lexicon.words()))
        elif roll < 0.75:
            parts.append(str(draw.between(0, 9999)))
        elif roll < 0.9:
            parts.append(draw.choice(lexicon.first_names()))
        else:
            parts.append(retrieval.code(draw))
    return " ".join(parts)


def _written(draw: Draw, count: int) -> str:
    """Random words dressed as sentences: capital letters, commas, full stops."""
    out: list[str] = []
    while len(out) < count:
        size = draw.between(3, 9)
        words = [draw.choice(lexicon.words()) for _ in range(size)]
        words[0] = words[0].capitalize()
        if size > 5:
            words[draw.between(1, 3)] += ","
        words[-1] += draw.choice("...?!")
        out += words
    return " ".join(out)


def _facts(draw: Draw, count: int) -> str:
    text = [fact.sentence for fact in retrieval.facts(draw, max(1, count // 10))]
    return " ".join(text)


KINDS = (_random_words, _random_words, _sentences, _sentences, _mixed, _written, _written, _facts)


def passage(draw: Draw, count: int) -> str:
    """Return a passage of about `count` words."""
    return draw.choice(KINDS)(draw, count)


def _cut(text: str, tokens: int) -> str:
    """Return the longest run of whole words from the start that has at most `tokens` tokens."""
    parts = text.split(" ")
    while len(encode_text(" ".join(parts))) > tokens:
        parts.pop()
    return " ".join(parts)


def _sized(draw: Draw) -> str:
    """Return a passage of one to seventy words, or of about forty tokens for the evaluation."""
    if draw.single:
        return _cut(passage(draw, 44), EVAL_TOKENS)
    return passage(draw, draw.between(1, 70))


def make(draw: Draw) -> Chat:
    """Return one passage, or two in a row, to repeat."""
    turns = []
    for _ in range(1 if draw.single or draw.chance(0.7) else 2):
        text = draw.unseen(lambda: _sized(draw), lambda made: f"copy {made}")
        ask = draw.choice(ASKS).format(p=text)
        turns.append(Turn(user=ask, answer=text, reasoning="I repeat the text exactly."))
    return chat(draw, "copy", "", turns)
