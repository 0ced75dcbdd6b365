"""From settings to the vision tower in use, and the placeholders that stand for what it sees."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from civetta.chat.image_rules import ImageSupport
from civetta.checkpoint.existing import existing
from civetta.errors import TokenizerError
from civetta.model.vision_build import (
    check_mmproj,
    check_width,
    find_mmproj,
    weight_bytes,
    work_bytes,
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from civetta.chat.tokenizer import Tokenizer
    from civetta.model.build import CheckedModel
    from civetta.model.vision_build import CheckedVision
    from civetta.options import VisionOptions

IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
DEFAULT_IMAGE_TOKEN = 248056  # model.md F-22: older GGUF files state none


def find_vision(settings: VisionOptions, checked: CheckedModel) -> CheckedVision | None:
    """The tower to use: the sidecar that is named, else the model's own or the one beside it.

    Raises CheckpointError, and UsageError for bounds that contradict each other.
    """
    vision = checked.vision
    if settings.mmproj == "none":
        return None
    sidecar: Path | None = None
    if settings.mmproj is not None:
        sidecar = existing(settings.mmproj, of="the vision sidecar (--mmproj)")
    elif checked.checkpoint.kind == "gguf":
        sidecar = find_mmproj(checked.checkpoint.path)
    if sidecar is not None:
        vision = check_mmproj(sidecar)
        check_width(vision, checked.config.hidden)
    if vision is None:
        return None
    limits = settings.image_min_tokens, settings.image_max_tokens
    return replace(vision, rules=vision.rules.limited(*limits))


def copies_tower(vision: CheckedVision | None, room_bytes: int | None) -> bool:
    """Whether the tower is copied like all other weights: a sidecar where there is room for it; a
    folder's tensors are counted with the others. None is room for any."""
    if vision is None or room_bytes is None or vision.names == "hf":
        return True
    return weight_bytes(vision) <= room_bytes


def images_bytes(
    vision: CheckedVision | None, options: VisionOptions, device: torch.device, *, copied: bool
) -> int:
    """Memory that images will take and that is not taken yet: the tower unless it stays in its
    file, its largest image, and the rows that are kept."""
    if vision is None:
        return 0
    on_cpu = device.type == "cpu"
    weights = weight_bytes(vision) if copied or not on_cpu else 0
    return weights + work_bytes(vision, 4 if on_cpu else 2) + (options.image_cache_mib << 20)


def image_support(
    vision: CheckedVision, checked: CheckedModel, tokenizer: Tokenizer | None
) -> ImageSupport:
    """Rules and placeholders of images and videos. Raises TokenizerError.

    Without a placeholder of its own, videos are not taken.
    """
    pad = [] if tokenizer is None else tokenizer.encode(VIDEO_PAD)
    return ImageSupport(
        rules=vision.rules,
        token_id=image_token(checked, tokenizer),
        video=vision.video,
        video_token_id=pad[0] if len(pad) == 1 else None,
    )


def image_token(checked: CheckedModel, tokenizer: Tokenizer | None) -> int:
    """The placeholder of images: the tokenizer's, which must be the configuration's.

    Raises TokenizerError when they differ.
    """
    stated = checked.config.image_token_id
    found = [] if tokenizer is None else tokenizer.encode(IMAGE_PAD)
    if len(found) != 1:
        return DEFAULT_IMAGE_TOKEN if stated is None else stated
    if stated not in (None, found[0]):
        raise TokenizerError(
            f"{checked.checkpoint.path}: the configuration calls token {stated} the image's"
            f" placeholder, the tokenizer token {found[0]}; the files do not belong together"
        )
    return found[0]
