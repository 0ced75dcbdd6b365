"""The abilities by name, each with its generator."""

from __future__ import annotations

from collections.abc import Callable

from training.data import (
    arithmetic,
    chitchat,
    copying,
    definitions,
    json_objects,
    pictures,
    retrieval,
    stories,
    tool_calls,
)
from training.data.draw import Draw
from training.data.sample import Item

Generator = Callable[[Draw], Item]

ABILITIES: dict[str, Generator] = {
    "arithmetic": arithmetic.make,
    "retrieval": retrieval.make,
    "copy": copying.make,
    "vision": pictures.make,
    "counting": pictures.make_counting,
    "picking": pictures.make_picking,
    "tools": tool_calls.make,
    "toolbox": tool_calls.make_toolbox,
    "json": json_objects.make,
    "definitions": definitions.make,
    "stories": stories.make,
    "chat": chitchat.make,
}
