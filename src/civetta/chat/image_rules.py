"""How a model wants its images: patch sizes, limits, normalisation (model.md D.1). No PIL, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from civetta.errors import CheckpointMalformed, UsageError

if TYPE_CHECKING:
    from civetta.chat.video_rules import VideoRules

MIN_PIXELS = 65_536
MAX_PIXELS = 16_777_216
MAX_ASPECT = 200
BICUBIC = 3  # PIL's number, which preprocessor files use


class BadImage(Exception):
    """Why an image cannot be used: half a sentence that follows "because" or a colon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """Sizes in pixels; `merge` patches a side become one token; `temporal` frames one patch.

    min_pixels and max_pixels bound the resized area; mean and std are per channel, of 0..1 values.
    """

    patch: int
    merge: int
    temporal: int
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def factor(self) -> int:
        """Pixels of a token's side; both sides of a resized image are multiples of it."""
        return self.patch * self.merge

    def limited(self, min_tokens: int, max_tokens: int) -> ImageRules:
        """With other bounds, in tokens an image; 0 keeps the file's.

        Raises UsageError when the lower bound is above the upper one.
        """
        area = self.factor**2
        rules = replace(
            self,
            min_pixels=min_tokens * area or self.min_pixels,
            max_pixels=max_tokens * area or self.max_pixels,
        )
        if rules.min_pixels > rules.max_pixels:
            raise UsageError(
                f"An image would have at least {rules.min_pixels // area} tokens and at most"
                f" {rules.max_pixels // area}; lower --image-min-tokens or raise"
                " --image-max-tokens."
            )
        return rules

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The size an image is resized to: multiples of `factor`, area within the bounds, aspect
        kept as nearly as that allows (model.md D.1). Raises BadImage for a strip.
        """
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise BadImage(
                f"it is {width} x {height} pixels, and one side may be {MAX_ASPECT} times the other"
                " at most"
            )
        factor = self.factor
        new_height = round(height / factor) * factor
        new_width = round(width / factor) * factor
        if new_height * new_width > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
        elif new_height * new_width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * grow / factor) * factor
            new_width = math.ceil(width * grow / factor) * factor
        return new_height, new_width


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSupport:
    """What a client of the engine needs to put images into a prompt.

    `token_id` is the placeholder that the template emits once an image, and that a prompt repeats
    once an image token; `video_token_id` that of videos, whose frames are chosen by `video`.
    """

    rules: ImageRules
    token_id: int
    video: VideoRules | None = None
    video_token_id: int | None = None


def rules_of(preprocessor: Mapping[str, object], base: ImageRules, where: str) -> ImageRules:
    """The rules that a preprocessor_config.json states, over those of the vision tower (`base`).

    Raises CheckpointMalformed for a value that contradicts the tower or that is not supported.
    """
    for key, value, own in (
        ("patch_size", base.patch, preprocessor.get("patch_size")),
        ("merge_size", base.merge, preprocessor.get("merge_size")),
        ("temporal_patch_size", base.temporal, preprocessor.get("temporal_patch_size")),
        ("resample", BICUBIC, preprocessor.get("resample")),
        ("do_resize", True, preprocessor.get("do_resize")),
        ("do_rescale", True, preprocessor.get("do_rescale")),
        ("do_normalize", True, preprocessor.get("do_normalize")),
    ):
        if own is not None and own != value:
            raise _wrong(where, key, own, repr(value))
    scale = preprocessor.get("rescale_factor")
    if scale is not None and not (isinstance(scale, float) and abs(scale * 255 - 1) < 1e-6):
        raise _wrong(where, "rescale_factor", scale, "1/255")
    size = preprocessor.get("size")
    bounds = size if isinstance(size, Mapping) else {}
    low = _pixels(bounds.get("shortest_edge", preprocessor.get("min_pixels")), where, MIN_PIXELS)
    high = _pixels(bounds.get("longest_edge", preprocessor.get("max_pixels")), where, MAX_PIXELS)
    if low > high:
        raise _wrong(where, "size", f"{low}..{high}", "ascending")
    return replace(
        base,
        min_pixels=low,
        max_pixels=high,
        mean=channels(preprocessor.get("image_mean"), base.mean, where, "image_mean", zero=True),
        std=channels(preprocessor.get("image_std"), base.std, where, "image_std", zero=False),
    )


def channels(
    value: object, default: tuple[float, float, float], where: str, key: str, *, zero: bool
) -> tuple[float, float, float]:
    """Three numbers a channel; raises CheckpointMalformed for anything else."""
    if value is None:
        return default
    tolist = getattr(value, "tolist", None)  # arrays of GGUF metadata
    items: object = tolist() if callable(tolist) else value
    numbers = [x for x in items if isinstance(x, int | float)] if isinstance(items, list) else []
    good = len(numbers) == 3 and all(0 <= x <= 1e3 and (zero or x > 0) for x in numbers)
    if not good or numbers != items:
        raise _wrong(where, key, value, "three numbers")
    return float(numbers[0]), float(numbers[1]), float(numbers[2])


def _pixels(value: object, where: str, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 31:
        raise _wrong(where, "size", value, "pixel counts")
    return value


def _wrong(where: str, key: str, value: object, wanted: str) -> CheckpointMalformed:
    return CheckpointMalformed(
        f"{where}: the image preprocessor's {key} is {str(value)[:60]}, but must be {wanted};"
        " the file is damaged or made for another program"
    )
