"""A marked fact hidden at a random depth of filler text, and the question about it at the end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from training.data import lexicon, stories
from training.data.dialogue import Turn, chat
from training.data.draw import split_of

if TYPE_CHECKING:
    from training.data.draw import Draw
    from training.data.sample import Chat

CHARS_PER_TOKEN = 4.34
"""Measured on filler text with the nano tokenizer; the length of a sample is aimed with it."""

OVERHEAD_TOKENS = 110
"""Room for the effort sentence, the question, the thinking block and the answer."""

MARKS = ("secret code", "secret code", "secret code", "password", "magic number", "access code")
INTROS = (
    "Read the text and answer the question at the end.",
    "Here is a long text. Remember what it says.",
    "Read this text carefully.",
    "Text:",
    "",
)
ASKS = (
    "What is the {m} for {w}?",
    "What is the {m} for {w}?",
    "Tell me the {m} for {w}.",
    "According to the text, what is the {m} for {w}?",
    "Question: What is the {m} for {w}?",
    "Which {m} does the text give for {w}?",
)


class Fact(NamedTuple):
    """One marked fact: what kind of mark, whose it is, and its value."""

    mark: str
    owner: str
    code: str

    @property
    def sentence(self) -> str:
        """The fact as it stands in the text and in the answer."""
        return f"The {self.mark} for {self.owner} is {self.code}."


def code(draw: Draw) -> str:
    """Return a code of four to six digits, of letters, or of a word and digits."""
    roll = draw.rng.random()
    if roll < 0.75:
        return "".join(draw.choice("0123456789") for _ in range(draw.between(4, 6)))
    if roll < 0.85:
        return "".join(draw.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(draw.between(4, 6)))
    return f"{draw.choice(lexicon.words())}-{draw.between(100, 9999)}"


def owner(draw: Draw) -> str:
    """Return whom or what a fact is about."""
    roll = draw.rng.random()
    if roll < 0.6:
        return draw.choice(lexicon.first_names())
    if roll < 0.8:
        return draw.choice(lexicon.choices("places", "cities"))
    adjective = draw.choice(lexicon.choices("nouns", "adjectives"))
    return f"the {adjective} {draw.choice(lexicon.choices('nouns', 'objects'))}"


def facts(draw: Draw, count: int) -> list[Fact]:
    """Return facts about different owners, all of the wanted side."""
    found: dict[str, Fact] = {}
    while len(found) < count:
        fact = Fact(draw.choice(MARKS), owner(draw), code(draw))
        if split_of(f"{fact.owner} {fact.code}") == draw.split:
            found.setdefault(fact.owner, fact)
    return list(found.values())


def filler(draw: Draw, chars: int) -> list[str]:
    """Return sentences of stories, about `chars` characters long together."""
    sentences: list[str] = []
    size = 0
    while size < chars:
        for sentence in stories.tell(draw).sentences:
            sentences.append(sentence)
            size += len(sentence) + 1
            if size >= chars:
                break
    return sentences


def length(draw: Draw) -> int:
    """Return how many tokens the sample should have: short ones are more frequent."""
    if draw.single:
        return draw.room
    low, high = math.log(128), math.log(max(draw.room, 129))
    return int(math.exp(low + (high - low) * draw.rng.random()))


def passage(draw: Draw, hidden: list[Fact], tokens: int) -> str:
    """Return filler text of about `tokens` tokens with every fact at a random depth."""
    taken = sum(len(fact.sentence) + 1 for fact in hidden)
    chars = int((tokens - OVERHEAD_TOKENS) * CHARS_PER_TOKEN) - taken
    text = filler(draw, max(chars, 0))
    for fact in hidden:
        text.insert(draw.between(0, len(text)), fact.sentence)
    return " ".join(text)


def make(draw: Draw) -> Chat:
    """Return a text with one to eight facts and questions about some of them.

    With `single` there is one question; `room` is then the length of the prompt in tokens.
    """
    tokens = length(draw)
    if draw.single:
        count, asked = draw.between(1, 3), 1
    else:
        count = min(draw.between(1, 8), 1 + tokens // 60)
        asked = draw.between(1, count)
    hidden = facts(draw, count)
    # Every further question costs about as much as its own overhead.
    text = passage(draw, hidden, tokens - 45 * (asked - 1))
    turns = []
    for fact in draw.rng.sample(hidden, asked):
        ask = draw.choice(ASKS).format(m=fact.mark, w=fact.owner)
        thought = f'The text says: "{fact.sentence}"'
        turns.append(Turn(user=ask, answer=fact.sentence, reasoning=thought))
    intro = draw.choice(INTROS)
    start = f"{intro}\n\n{text}\n\n{turns[0].user}" if intro else f"{text}\n\n{turns[0].user}"
    turns[0] = Turn(user=start, answer=turns[0].answer, reasoning=turns[0].reasoning)
    return chat(draw, "retrieval", "", turns)
