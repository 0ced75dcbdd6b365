"""Short stories from a grammar of plots: opening, setting, the beats of one plot, ending."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from training.data import lexicon
from training.data.dialogue import Turn, chat
from training.data.draw import split_of
from training.data.sample import Chat, Document

if TYPE_CHECKING:
    from training.data.draw import Draw

ASKS = (
    "Tell me a story.",
    "Tell me a short story.",
    "Write a short story.",
    "Please tell me a story.",
    "Can you tell me a story?",
    "Tell me a bedtime story.",
    "I would like to hear a story.",
    "Make up a story for me.",
)
ABOUT = (
    "Tell me a story about {x}.",
    "Write a short story about {x}.",
    "Tell me a short story about {x}.",
    "Please write a story about {x}.",
    "Can you tell me a story about {x}?",
    "Make up a story about {x}.",
)
HE = {"he": "he", "him": "him", "his": "his", "He": "He", "His": "His", "himself": "himself"}
SHE = {"he": "she", "him": "her", "his": "her", "He": "She", "His": "Her", "himself": "herself"}


@dataclass(frozen=True, slots=True)
class Grammar:
    """The parsed `stories.txt`: parts without a plot, and the beats of each plot."""

    parts: dict[str, tuple[str, ...]]
    plots: tuple[tuple[tuple[str, ...], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One story: its sentences, and the words that name what it is about."""

    sentences: tuple[str, ...]
    hero: str
    friend: str
    subject: str
    filled: dict[str, str]

    @property
    def text(self) -> str:
        """The story as one paragraph."""
        return " ".join(self.sentences)


@cache
def grammar() -> Grammar:
    """Read the grammar once."""
    parts: dict[str, list[str]] = {}
    plots: list[list[list[str]]] = []
    target: list[str] = []
    for line in lexicon.lines("stories"):
        if line.startswith("[plot "):
            plots.append([])
        elif line.startswith("["):
            target = parts.setdefault(line[1:-1], [])
        elif line.strip() == "-":
            target = []
            plots[-1].append(target)
        else:
            target.append(line)
    return Grammar(
        parts={name: tuple(options) for name, options in parts.items()},
        plots=tuple(tuple(tuple(beat) for beat in plot) for plot in plots),
    )


def _people(draw: Draw) -> dict[str, str]:
    (hero, hero_she), (friend, friend_she) = draw.rng.sample(lexicon.people(), 2)
    slots = {"hero": hero, "friend": friend, **(SHE if hero_she else HE)}
    pronouns = SHE if friend_she else HE
    slots.update({f"f_{name}": value for name, value in pronouns.items()})
    kinds = lexicon.choices("story_slots", "kind")
    kind = draw.choice([k for k in kinds if k != ("boy" if hero_she else "girl")])
    return {**slots, "kind": kind, "a_kind": lexicon.with_article(kind)}


def slots(draw: Draw) -> dict[str, str]:
    """Fill every slot of the grammar for one story."""
    filled = _people(draw)
    toy = draw.choice(lexicon.choices("nouns", "toys"))
    if " " not in toy and draw.chance(0.5):
        toy = f"{draw.choice(lexicon.choices('nouns', 'colours'))} {toy}"
    nouns = {
        "thing": toy,
        "food": draw.choice(lexicon.choices("nouns", "foods")),
        "animal": draw.choice(lexicon.choices("nouns", "animals")),
        "weather": draw.choice(lexicon.choices("nouns", "weathers")),
        **{
            name: draw.choice(lexicon.choices("story_slots", name))
            for name in ("trait", "trait2", "building")
        },
    }
    filled.update(nouns)
    filled.update({f"a_{name}": lexicon.with_article(noun) for name, noun in nouns.items()})
    for name in ("helper", "treasure", "every", "pet", "number"):
        filled[name] = draw.choice(lexicon.choices("story_slots", name))
    filled["a_treasure"] = filled["treasure"]
    filled["helper_cap"] = filled["helper"][0].upper() + filled["helper"][1:]
    filled["place"] = draw.choice(lexicon.choices("places", "story"))
    filled["colour"] = draw.choice(lexicon.choices("nouns", "colours"))
    # These plurals take no article.
    for noun in ("soup", "bread", "honey", "cheese"):
        if filled["food"] == noun:
            filled["a_food"] = f"some {noun}"
    return filled


def tell(draw: Draw) -> Story:
    """Make one story of the wanted side; the two names and the toy decide the side."""
    while True:
        filled = slots(draw)
        if split_of(story_key(filled)) == draw.split:
            break
    return Story(
        sentences=_sentences(draw, filled),
        hero=filled["hero"],
        friend=filled["friend"],
        subject=filled["a_thing"],
        filled=filled,
    )


def _sentences(draw: Draw, filled: dict[str, str]) -> tuple[str, ...]:
    rules = grammar()
    plot = draw.choice(rules.plots)
    beats = [rules.parts["opening"], rules.parts["setting"], *plot, rules.parts["ending"]]
    return tuple(draw.choice(beat).format_map(filled) for beat in beats)


def _naming_both(draw: Draw, story: Story) -> Story:
    """The story, told again until its friend is named: one in thirty leaves the friend out."""
    while story.friend not in re.findall(r"\w+", story.text):
        story = replace(story, sentences=_sentences(draw, story.filled))
    return story


def story_key(filled: dict[str, str]) -> str:
    """Name the item that the split looks at."""
    return f"story {filled['hero']} {filled['friend']} {filled['thing']}"


def make(draw: Draw) -> Chat | Document:
    """Return a story on request, or as a plain document of one to four stories.

    A story about two people names both; most requests are for such a one, since a model that
    learned from few of them lets the first do everything.
    """
    if not draw.single and draw.chance(0.35):
        count = max(1, min(draw.between(1, 4), draw.room // 260))
        text = "\n\n".join(tell(draw).text for _ in range(count))
        return Document(ability="stories", key="", text=text)
    story = tell(draw)
    both = f"{story.hero} and {story.friend}"
    about = [both, story.hero] if draw.single else [both, both, both, both, story.hero]
    if any(story.subject in sentence for sentence in story.sentences):
        about += [story.subject, story.subject]
    if draw.chance(0.3):
        ask = draw.choice(ASKS)
    else:
        ask = draw.choice(ABOUT).format(x=draw.choice(about))
    if both in ask:
        story = _naming_both(draw, story)
    thought = f"I tell a story about {story.hero} and {story.friend}."
    return chat(draw, "stories", "", [Turn(user=ask, answer=story.text, reasoning=thought)])
