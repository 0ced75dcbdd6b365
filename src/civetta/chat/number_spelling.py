"""How the numbers of a call were spelled, carried in the call's id.

A client that parses a call's arguments and writes them anew turns 1.50 into 1.5, 1e3 into 1000 and
1.0 into 1. Clients send ids back as they came, so an id ends with the spellings that would be lost:
`call_..._2n1p50` says that number 2 of the arguments, counted from 0 in their order, was 1.50. No
server has to remember anything, and a changed number is left as the client wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from civetta.chat.json_text import json_text, parsed_float, parsed_int

ID_CHARS_MAX = 64
"""OpenAI's bound for the id of a call; spellings that do not fit are left out."""

_DEPTH_MAX = 64
_SAME_EVERYWHERE = re.compile(r"0|-?[1-9][0-9]{0,14}|-?(?=[0-9.]{3,17}$)[0-9]+\.([0-9]{0,4}[1-9])")
"""Numbers that every JSON writer in use spells alike."""
_IN_ID = str.maketrans(".+", "pq")  # ids are letters, digits, _ and -
_FROM_ID = str.maketrans("pq", ".+")
_WITH_SPELLINGS = re.compile(r"[a-z]+_[0-9a-f]{24}((?:_[0-9]{1,5}n[0-9eEpq-]{1,48})+)")


def with_spellings(call_id: str, arguments: Mapping[str, Any]) -> str:
    """The id, followed by the spellings of the call's numbers that a client may lose."""
    place = -1

    def note(number: Any) -> Any:
        nonlocal call_id, place
        place += 1
        text = json_text(number)
        if not _SAME_EVERYWHERE.fullmatch(text):
            longer = f"{call_id}_{place}n{text.translate(_IN_ID)}"
            # one less: a dialect's own prefix may be a character longer
            call_id = longer if len(longer) < ID_CHARS_MAX else call_id
        return number

    _each_number(dict(arguments), note, 0)
    return call_id


def respelled(arguments: Mapping[str, Any], call_id: str) -> Mapping[str, Any]:
    """The arguments with numbers spelled as the id says, where they have the value that it says."""
    found = _WITH_SPELLINGS.fullmatch(call_id[: 2 * ID_CHARS_MAX])
    if found is None:
        return arguments
    pairs = (part.split("n", 1) for part in found[1].split("_")[1:])
    spellings = {int(place): text.translate(_FROM_ID) for place, text in pairs}
    place = -1

    def spell(number: Any) -> Any:
        nonlocal place
        place += 1
        text = spellings.get(place)
        return number if text is None else _spelled(number, text)

    made = _each_number(dict(arguments), spell, 0)
    assert isinstance(made, dict), "an object stays one"
    return made


def _spelled(number: Any, text: str) -> Any:
    """The number that `text` says if it is the same, as a client with doubles has it."""
    try:
        said = parsed_float(text) if set(text) & set(".eE") else parsed_int(text)
        return said if float(said) == float(number) else number
    except (ValueError, OverflowError):  # an id that no server of ours made
        return number


def _each_number(value: Any, change: Callable[[Any], Any], depth: int) -> Any:
    """A copy with `change` applied to every number in order; deep ones are left alone."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return change(value)
    if depth < _DEPTH_MAX and isinstance(value, Mapping):
        return {key: _each_number(item, change, depth + 1) for key, item in value.items()}
    if depth < _DEPTH_MAX and isinstance(value, (list, tuple)):
        return [_each_number(item, change, depth + 1) for item in value]
    return value
