"""One placeholder an image becomes one an image token (model.md D.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Sequence


def expand(
    ids: Sequence[int], token_id: int, tokens: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids with placeholder number n repeated tokens[n] times, and where each run starts.

    Raises TemplateError when the template made more or fewer placeholders than there are images.
    """
    places = [i for i, found in enumerate(ids) if found == token_id]
    if len(places) != len(tokens):
        raise TemplateError(
            f"The chat template shows {len(places)} of the conversation's {len(tokens)} images;"
            " use the model's own template.",
            param="messages",
        )
    out: list[int] = []
    starts: list[int] = []
    done = 0
    for place, count in zip(places, tokens, strict=True):
        out += ids[done:place]
        starts.append(len(out))
        out += [token_id] * count
        done = place + 1
    out += ids[done:]
    return tuple(out), tuple(starts)
