"""What a session's tokens are: pseudo-random ids, or a text for which drafts mean something.

"mixed" goes through prose, questions, code, lists and data; "repetitive" says the same few things over
and over. Both begin again when they are through, each session at a place of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.bench.case import token_stream
from civetta.errors import UsageError

if TYPE_CHECKING:
    from civetta.chat.tokenizer import Tokenizer

TEXTS = ("random", "mixed", "repetitive")

MIXED = (
    "The fox found the lantern under the old bridge. It was cold and dark, and nobody had lit it"
    " for many years. She carried it home and set it on the table, where her brother looked at it"
    " for a long time before he said anything.\n\n",
    "Question: Why does it rain?\nAnswer: Warm air takes up water from rivers and from the sea. When"
    " the air rises it cools, the water gathers in drops, and the drops fall.\n\n",
    "def area(width, height):\n    if width < 0 or height < 0:\n        raise ValueError('negative')\n"
    "    return width * height\n\nfor size in ((2, 3), (4, 5)):\n    print(area(*size))\n\n",
    "Shopping list:\n- bread\n- two apples\n- a bag of flour\n- milk, if there is any left\n- string\n\n",
    '{"name": "Clara", "age": 41, "city": "Lisbon", "kind": "guest"}\n'
    '{"name": "Hugo", "age": 29, "city": "Oslo", "kind": "member"}\n\n',
    "Dear Anna, thank you for the letter. The garden is full of snow, and the river has frozen as"
    " far as the mill. We hope to see you in spring, when the roads are open again.\n\n",
)
REPETITIVE = (
    "one two three four five six seven eight nine ten ",
    "The red fox runs over the green hill and down to the river. ",
    "apple, pear, plum, apple, pear, plum, ",
    "x = x + 1; y = y + 2; ",
)
TURNS = 24
"""How often a repetitive text says a thing before it goes on to the next."""


def stream(
    kind: str, *, seed: int, session: int, count: int, vocab: int, tokenizer: Tokenizer | None
) -> list[int]:
    """The first `count` ids of a session's stream. Raises UsageError without a tokenizer for a text."""
    assert kind in TEXTS
    if kind == "random":
        return token_stream(seed, session, count, vocab)
    if tokenizer is None:
        raise UsageError(f"--text {kind} needs a tokenizer, and this model has none: leave it out.")
    parts = MIXED if kind == "mixed" else [part * TURNS for part in REPETITIVE]
    first = (seed + session) % len(parts)
    ids = list(tokenizer.encode("".join([*parts[first:], *parts[:first]])))
    return (ids * -(-count // len(ids)))[:count] if count else []
