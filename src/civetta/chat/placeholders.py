"""One placeholder an image becomes one an image token (model.md D.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Sequence


def expand(
    ids: Sequence[int], runs: Sequence[tuple[int, int]], token_ids: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids with each placeholder repeated, and where each run starts.

    `runs`: (placeholder id, tokens) of every image and group of frames, in the order of the prompt;
    `token_ids`: all ids that are placeholders. Raises TemplateError when the template made other
    placeholders than that.
    """
    places = [i for i, found in enumerate(ids) if found in token_ids]
    if [ids[place] for place in places] != [token_id for token_id, _ in runs]:
        raise TemplateError(
            f"The chat template shows {len(places)} of the conversation's {len(runs)} images, or"
            " others; use the model's own template.",
            param="messages",
        )
    out: list[int] = []
    starts: list[int] = []
    done = 0
    for place, (token_id, count) in zip(places, runs, strict=True):
        out += ids[done:place]
        starts.append(len(out))
        out += [token_id] * count
        done = place + 1
    out += ids[done:]
    return tuple(out), tuple(starts)
