"""From files to a vision tower: find it, check it without reading a weight, bind it on first use."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from civetta.chat.video_rules import VideoRules
from civetta.checkpoint.gguf_split import gguf_role
from civetta.checkpoint.source import open_checkpoint
from civetta.checkpoint.tensors import not_found
from civetta.errors import ArchitectureUnsupported, TensorShapeWrong
from civetta.log import log_event
from civetta.model.binder import Binder
from civetta.model.place import place_tower
from civetta.model.vision import VisionTower
from civetta.model.vision_config import (
    from_gguf_vision,
    from_hf_vision,
    gguf_rules,
    hf_rules,
    hf_video_rules,
)
from civetta.model.vision_weights import (
    HF_PREFIX,
    bind_gguf_vision,
    bind_hf_vision,
    patch_name,
)

if TYPE_CHECKING:
    from pathlib import Path

    from civetta.chat.image_rules import ImageRules
    from civetta.chat.images import PreparedImage
    from civetta.checkpoint.source import Checkpoint
    from civetta.checkpoint.tensors import TensorInfo
    from civetta.kernels.ops import Ops
    from civetta.model.vision import ImageEncoding
    from civetta.model.vision_config import VisionConfig
    from civetta.model.vision_weights import VisionWeights

_POSITIONS = "v.position_embd.weight"
_PRECISION = ("bf16", "f16", "f32")
_SAMPLE_BYTES = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedVision:
    """A tower whose names, shapes and types are proved; `rules` say how images are cut for it,
    `video` how frames are chosen and cut."""

    checkpoint: Checkpoint
    names: Literal["hf", "mmproj"]
    config: VisionConfig
    rules: ImageRules
    video: VideoRules


def hf_vision(checkpoint: Checkpoint) -> CheckedVision | None:
    """The tower of a Hugging Face folder, None when it has no `model.visual` tensors.

    Its tensors are proved with the trunk's (build.check_checkpoint). Raises CheckpointMalformed.
    """
    if not any(name.startswith(HF_PREFIX) for name in checkpoint.tensors):
        return None
    outer = checkpoint.metadata["config.json"]
    values = outer.get("vision_config") if isinstance(outer, dict) else None
    if not isinstance(values, dict):
        return None
    where = str(checkpoint.path)
    config = from_hf_vision(values, where)
    rules = hf_rules(checkpoint.metadata, config, where)
    video = hf_video_rules(checkpoint.metadata, rules, where)
    return CheckedVision(checkpoint=checkpoint, names="hf", config=config, rules=rules, video=video)


def check_mmproj(path: Path | str) -> CheckedVision:
    """Open and check a vision sidecar. Raises CheckpointError, naming what is wrong."""
    checkpoint = open_checkpoint(path)
    where = str(checkpoint.path)
    if checkpoint.kind != "gguf" or gguf_role(checkpoint.metadata, checkpoint.tensors) != "mmproj":
        raise ArchitectureUnsupported(
            f"{where} is no vision sidecar (mmproj GGUF); give another --mmproj"
        )
    table = checkpoint.tensors.get(_POSITIONS)
    frames = 0
    while patch_name(frames) in checkpoint.tensors:
        frames += 1
    config = from_gguf_vision(
        checkpoint.metadata,
        where,
        positions=table.shape[0] if table is not None and table.shape else 1,
        temporal=max(frames, 1),
    )
    rules = gguf_rules(checkpoint.metadata, config, where)
    binder = Binder(checkpoint, dry=True)
    bind_gguf_vision(binder, config)
    binder.finish()
    return CheckedVision(
        checkpoint=checkpoint,
        names="mmproj",
        config=config,
        rules=rules,
        video=VideoRules(image=rules),
    )


def find_mmproj(model: Path) -> Path | None:
    """The vision sidecar beside a GGUF model, None when there is none.

    Its name has `mmproj` in it. Of several, the one in the weights' own precision: BF16, then F16,
    then F32, then by name. Raises CheckpointNotFound when the folder cannot be read.
    """
    try:
        files = sorted(
            file
            for file in model.parent.iterdir()
            if file.suffix == ".gguf" and "mmproj" in file.name.lower()
        )
    except OSError as error:
        raise not_found(model.parent, error) from error
    if not files:
        return None
    best = min(files, key=lambda file: (_rank(file.name.lower()), file.name))
    log_event(_log, logging.INFO, "mmproj_found", file=best.name, candidates=len(files))
    return best


def check_width(vision: CheckedVision, hidden: int) -> None:
    """Raise TensorShapeWrong when the tower belongs to a model of another width."""
    if vision.config.out_width != hidden:
        raise TensorShapeWrong(
            f"{vision.checkpoint.path}: the vision tower gives rows of {vision.config.out_width}"
            f" values, but the model takes {hidden}; the files do not belong together"
        )


def bind_vision(binder: Binder, vision: CheckedVision) -> VisionWeights:
    """The tower's tensors through `binder`, dry or not."""
    bind = bind_hf_vision if vision.names == "hf" else bind_gguf_vision
    return bind(binder, vision.config)


def build_tower(
    vision: CheckedVision,
    *,
    dtype: torch.dtype,
    ops: Ops,
    device: torch.device | None = None,
    copied: bool = False,
) -> VisionTower:
    """The tower of a checked file; on the CPU matrices stay views of it, unless `copied`.

    Attention reads float32 on a CPU, which computes in it anyway; on a GPU with `dtype` bfloat16 it
    reads float16, which is as fast and rounds an eighth as much.
    """
    weights = bind_vision(Binder(vision.checkpoint, dry=False, copied=copied), vision)
    if device is None or device.type == "cpu":
        return VisionTower(vision.config, weights, ops, dtype)
    weights = place_tower(weights, device, dtype)
    attended = torch.float16 if dtype == torch.bfloat16 else dtype
    return VisionTower(vision.config, weights, ops, dtype, attended=attended)


def weight_bytes(vision: CheckedVision) -> int:
    """Bytes of the tower's tensors as they are stored."""
    return sum(info.nbytes for _, info in _tensors(vision))


def work_bytes(vision: CheckedVision, attended_bytes: int) -> int:
    """What the largest image takes in the tower: its rows in float32, and the queries, keys and
    values of a layer in numbers of `attended_bytes`."""
    patches = vision.rules.max_pixels // vision.config.patch**2
    return patches * vision.config.hidden * (4 + 3 * attended_bytes)


def fingerprint(vision: CheckedVision) -> bytes:
    """16 bytes that tell towers apart: sizes, rules, every tensor's name, type and some bytes."""
    digest = hashlib.blake2b(f"{vision.config} {vision.rules}".encode(), digest_size=16)
    for name, info in _tensors(vision):
        data = vision.checkpoint.bytes_of(name)
        digest.update(f"{name} {info.shape} {info.format.name}".encode())
        digest.update(data[:_SAMPLE_BYTES].tobytes() + data[-_SAMPLE_BYTES:].tobytes())
    return digest.digest()


def _tensors(vision: CheckedVision) -> list[tuple[str, TensorInfo]]:
    """Names and facts of the tower's tensors, by name."""
    return [
        (name, info)
        for name, info in sorted(vision.checkpoint.tensors.items())
        if vision.names == "mmproj" or name.startswith(HF_PREFIX)
    ]


class LazyTower:
    """A checked tower that binds its weights when the first image comes."""

    def __init__(
        self,
        vision: CheckedVision,
        *,
        dtype: torch.dtype,
        ops: Ops,
        device: torch.device | None = None,
        copied: bool = False,
    ) -> None:
        self._vision, self._dtype, self._ops, self._device = vision, dtype, ops, device
        self._copied = copied
        self._tower: VisionTower | None = None
        self._fingerprint: bytes | None = None

    def digest(self, image: PreparedImage) -> bytes:
        """16 bytes that tell apart what the trunk sees of images: pixels, rules and tower."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._vision)
        seen = self._fingerprint + image.digest
        return hashlib.blake2b(seen, digest_size=16).digest()

    def begin(self, image: PreparedImage) -> ImageEncoding:
        """Start to encode an image. Raises CheckpointError when the file has gone."""
        if self._tower is None:
            self._tower = build_tower(
                self._vision,
                dtype=self._dtype,
                ops=self._ops,
                device=self._device,
                copied=self._copied,
            )
        return self._tower.begin(image)


def _rank(name: str) -> int:
    return next((i for i, word in enumerate(_PRECISION) if word in name), len(_PRECISION))
