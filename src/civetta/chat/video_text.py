"""A video's one placeholder becomes its groups of frames, each after its time (model.md D.3).

The template shows a video once. What the model was trained on has, for every group of frames,
`<T.T seconds>` and a placeholder of its own. The times are text, so they are put in before the
prompt is encoded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from civetta.chat.builtin_text import VIDEO_TEXT
from civetta.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.chat.template import Rendered


def with_times(rendered: Rendered, videos: Sequence[Sequence[float]]) -> Rendered:
    """The text with video number n shown once for each of its times, in seconds.

    Raises TemplateError when the template shows more or fewer videos than there are.
    """
    places = _places(rendered)
    if len(places) != len(videos):
        raise TemplateError(
            f"The chat template shows {len(places)} of the conversation's {len(videos)} videos;"
            " use the model's own template.",
            param="messages",
        )
    shown = ["".join(f"<{s:.1f} seconds>{VIDEO_TEXT}" for s in seconds) for seconds in videos]
    text, done = [], 0
    for place, frames in zip(places, shown, strict=True):
        text += [rendered.text[done:place], frames]
        done = place + len(VIDEO_TEXT)
    text.append(rendered.text[done:])

    def moved(at: int) -> int:
        return at + sum(
            len(frames) - len(VIDEO_TEXT)
            for place, frames in zip(places, shown, strict=True)
            if place < at
        )

    return replace(
        rendered,
        text="".join(text),
        spans=tuple(replace(s, start=moved(s.start), end=moved(s.end)) for s in rendered.spans),
        literal_starts=frozenset(moved(at) for at in rendered.literal_starts),
    )


def _places(rendered: Rendered) -> list[int]:
    """Where the template itself shows a video; what users typed does not count."""
    found, place = [], rendered.text.find(VIDEO_TEXT)
    while place >= 0:
        if place not in rendered.literal_starts:
            found.append(place)
        place = rendered.text.find(VIDEO_TEXT, place + 1)
    return found
