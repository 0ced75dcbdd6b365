"""Which frames of a video a model sees, how large, and when (model.md D.1, D.3). No PIL, no numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from civetta.chat.image_rules import MAX_ASPECT, rules_of
from civetta.errors import CheckpointMalformed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.chat.image_rules import ImageRules

FPS = 2.0
MIN_FRAMES, MAX_FRAMES = 4, 768
MIN_PIXELS, MAX_PIXELS = 131_072, 786_432


class BadVideo(Exception):
    """Why a video cannot be used: half a sentence that follows "because" or a colon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRules:
    """How frames are chosen and cut; `image` has patch sizes and normalisation.

    `fps` frames a second are taken, between `min_frames` and `max_frames`; min_pixels and
    max_pixels bound the area of all resized frames together.
    """

    image: ImageRules
    fps: float = FPS
    min_frames: int = MIN_FRAMES
    max_frames: int = MAX_FRAMES
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS

    def chosen(self, total: int, rate: float) -> list[int]:
        """Numbers of the frames to take, ascending, of `total` at `rate` a second."""
        count = min(max(int(total / rate * self.fps), self.min_frames), self.max_frames, total)
        step = (total - 1) / max(count - 1, 1)
        return [*(round(i * step) for i in range(count - 1)), total - 1] if count > 1 else [0]

    def resized(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """The size of every frame: multiples of a token's side, all frames within the bounds.

        Raises BadVideo for a strip.
        """
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise BadVideo(
                f"its frames are {width} x {height} pixels, and one side may be {MAX_ASPECT} times"
                " the other at most"
            )
        side, frames = self.image.factor, max(frames, self.image.temporal)
        grow = max(side / height, side / width)
        if grow > 1:
            height, width = int(height * grow), int(width * grow)
        new_height, new_width = (round(length / side) * side for length in (height, width))
        area = round(frames / self.image.temporal) * self.image.temporal * new_height * new_width
        if area > self.max_pixels:
            shrink = math.sqrt(frames * height * width / self.max_pixels)
            new_height, new_width = (
                max(side, math.floor(length / shrink / side) * side) for length in (height, width)
            )
        elif area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            new_height, new_width = (
                math.ceil(length * grow / side) * side for length in (height, width)
            )
        return new_height, new_width

    def stamps(self, seconds: Sequence[float]) -> tuple[float, ...]:
        """The time of each group of frames that becomes one patch: mean of its first and last."""
        size = self.image.temporal
        whole = [*seconds, *[seconds[-1]] * (-len(seconds) % size)]
        return tuple((whole[i] + whole[i + size - 1]) / 2 for i in range(0, len(whole), size))


def video_rules_of(
    preprocessor: Mapping[str, object] | None, image: ImageRules, where: str
) -> VideoRules:
    """The rules that a video_preprocessor_config.json states, else those of model.md D.1.

    Raises CheckpointMalformed for a value that contradicts the tower or that is not supported.
    """
    rules = VideoRules(image=image)
    if preprocessor is None:
        return rules
    size = preprocessor.get("size")
    bounds = size if isinstance(size, Mapping) else {}
    stated = {
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS} | dict(bounds),
        **{key: value for key, value in preprocessor.items() if key != "size"},
    }
    checked = rules_of(stated, image, where)
    frames = (
        _number(preprocessor, "min_frames", MIN_FRAMES, where),
        _number(preprocessor, "max_frames", MAX_FRAMES, where),
    )
    if not 1 <= frames[0] <= frames[1]:
        raise _wrong(where, "min_frames", frames[0], f"1 to max_frames, {frames[1]}")
    return replace(
        rules,
        image=replace(checked, min_pixels=image.min_pixels, max_pixels=image.max_pixels),
        fps=_number(preprocessor, "fps", FPS, where),
        min_frames=int(frames[0]),
        max_frames=int(frames[1]),
        min_pixels=checked.min_pixels,
        max_pixels=checked.max_pixels,
    )


def _number(values: Mapping[str, object], key: str, default: float, where: str) -> float:
    value = values.get(key, default)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise _wrong(where, key, value, "a positive number")
    return value


def _wrong(where: str, key: str, value: object, wanted: str) -> CheckpointMalformed:
    return CheckpointMalformed(
        f"{where}: the video preprocessor's {key} is {str(value)[:60]}, but must be {wanted}; the"
        " file is damaged or made for another program"
    )
