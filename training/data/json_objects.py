"""JSON objects on request: the fields and values named in the request, in that order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from training.data import lexicon, values
from training.data.dialogue import Turn, chat

if TYPE_CHECKING:
    from training.data.draw import Draw
    from training.data.sample import Chat

LEADS = (
    "Return a JSON object with {f}.",
    "Return a JSON object with the fields {f}.",
    "Write a JSON object with these fields: {f}.",
    "Give me a JSON object with {f}.",
    "Create a JSON object with the fields {f}.",
    "Answer with a JSON object only: {f}.",
    "Make a JSON object: {f}",
    "Please write JSON with {f}.",
    "Reply with JSON. The fields are {f}.",
    "Output a JSON object that has {f}.",
    "I need a JSON object with {f}.",
    "Convert to JSON: {f}",
    "Write this as a JSON object: {f}",
)
PAIRS = (
    "{k} = {v}",
    "{k} = {v}",
    "{k}: {v}",
    "{k} {v}",
    "{k} is {v}",
    '{k} "{v}"',
    "{k} set to {v}",
)


def _made_name(draw: Draw) -> str:
    """Return a field name that no list has, so that copying is what is learned."""
    first, second = values.word(draw), values.word(draw)
    return draw.choice((first, f"{first}_{second}", f"{first}{second.capitalize()}"))


def _fields(draw: Draw, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while len(found) < count:
        name, kind, _ = draw.choice(lexicon.rows("fields"))
        if draw.chance(0.25):
            name = _made_name(draw)
        found.setdefault(name, values.value(draw, kind))
    return found


def _joined(draw: Draw, parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    if draw.chance(0.5):
        return ", ".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _spoken(draw: Draw, fields: dict[str, Any]) -> str:
    pair = draw.choice(PAIRS)
    parts = []
    for name, item in fields.items():
        if isinstance(item, dict):
            inner = ", ".join(f"{k} = {values.spoken(v)}" for k, v in item.items())
            parts.append(f"{name} = ({inner})")
        elif isinstance(item, list):
            parts.append(f"{name} = [{', '.join(map(values.spoken, item))}]")
        else:
            plain = pair if isinstance(item, str) else pair.replace('"', "")
            parts.append(plain.format(k=name, v=values.spoken(item)))
    return _joined(draw, parts)


def _object(draw: Draw) -> dict[str, Any]:
    fields = _fields(draw, draw.between(1, 6))
    if draw.chance(0.15):
        fields[draw.choice(("address", "details", "data", "info", _made_name(draw)))] = _fields(
            draw, draw.between(1, 3)
        )
    if draw.chance(0.1):
        kind = draw.choice(("colour", "person", "city", "int100", "word"))
        size = draw.between(1, 4)
        fields[draw.choice(("tags", "items", "names", _made_name(draw)))] = [
            values.value(draw, kind) for _ in range(size)
        ]
    return fields


def turn(draw: Draw) -> Turn:
    """Return one request for an object, with the object as the answer."""
    made = draw.unseen(lambda: _object(draw), lambda made: f"json {json.dumps(made)}")
    ask = draw.choice(LEADS).format(f=_spoken(draw, made))
    names = ", ".join(made)
    return Turn(
        user=ask,
        answer=json.dumps(made, ensure_ascii=False),
        reasoning=f"I write a JSON object with {names}.",
    )


def make(draw: Draw) -> Chat:
    """Return a conversation with one or two requests for an object."""
    count = 1 if draw.single or draw.chance(0.7) else 2
    return chat(draw, "json", "", [turn(draw) for _ in range(count)])
