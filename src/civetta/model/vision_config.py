"""`VisionConfig`: sizes of the vision tower, from HF or mmproj metadata (model.md A.2, C.8)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

from civetta.chat.image_rules import ImageRules, channels, rules_of
from civetta.chat.video_rules import video_rules_of
from civetta.errors import ArchitectureUnsupported, CheckpointMalformed
from civetta.model.config_keys import Keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from civetta.chat.video_rules import VideoRules

CHANNELS = 3
HF_NORM_EPS = 1e-6
ROPE_THETA = 1e4
MOST_LAYERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The tower of model.md D.2; positions is the learned table's rows, a square grid."""

    layers: int
    hidden: int
    heads: int
    mlp_width: int
    patch: int
    merge: int
    temporal: int
    positions: int
    out_width: int
    norm_eps: float = HF_NORM_EPS
    rope_theta: float = ROPE_THETA

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def side(self) -> int:
        """Positions of the learned grid along one side."""
        return isqrt(self.positions)

    @property
    def merged(self) -> int:
        """Width of a token's patches side by side."""
        return self.hidden * self.merge**2

    @property
    def rules(self) -> ImageRules:
        """How images are cut, with the limits that model.md D.1 gives."""
        return ImageRules(patch=self.patch, merge=self.merge, temporal=self.temporal)


def from_hf_vision(values: Mapping[str, object], where: str) -> VisionConfig:
    """The `vision_config` of a config.json; raises CheckpointMalformed."""
    keys = Keys(values, where, "")
    keys.fixed("model_type", ("qwen4_exp", "qwen4_exp_vision"))
    keys.fixed("hidden_act", ("gelu_pytorch_tanh",))
    keys.fixed("in_channels", (CHANNELS,))
    keys.fixed("deepstack_visual_indexes", ([],))
    theta = ROPE_THETA
    rope = values.get("rope_parameters")
    if rope is not None:
        rope_keys = Keys(rope if isinstance(rope, dict) else {}, where)
        rope_keys.fixed("rope_type", ("axial", "default"))
        theta = rope_keys.number("rope_theta", ROPE_THETA)
    return _checked(
        VisionConfig(
            layers=keys.integer("depth", high=MOST_LAYERS),
            hidden=keys.integer("hidden_size"),
            heads=keys.integer("num_heads"),
            mlp_width=keys.integer("intermediate_size"),
            patch=keys.integer("patch_size", high=256),
            merge=keys.integer("spatial_merge_size", high=16),
            temporal=keys.integer("temporal_patch_size", high=16),
            positions=keys.integer("num_position_embeddings"),
            out_width=keys.integer("out_hidden_size"),
            rope_theta=theta,
        ),
        where,
    )


def from_gguf_vision(
    metadata: Mapping[str, object], where: str, *, positions: int, temporal: int
) -> VisionConfig:
    """The tower of an mmproj file; table rows and frames a patch are counted from its tensors.

    Raises ArchitectureUnsupported for another projector, CheckpointMalformed.
    """
    kind = metadata.get("clip.projector_type", metadata.get("clip.vision.projector_type"))
    if metadata.get("general.architecture") != "clip" or kind != "qwen3vl_merger":
        raise ArchitectureUnsupported(
            f"{where} has the projector {kind!r}; the vision sidecar (mmproj) of this model has"
            " 'qwen3vl_merger'"
        )
    Keys(metadata, where).fixed("clip.has_vision_encoder", (True,))
    Keys(metadata, where).fixed("clip.use_gelu", (True,))
    keys = Keys(metadata, where, "clip.vision.")
    deep = keys.get("is_deepstack_layers")
    if deep is not None and any(deep.tolist() if hasattr(deep, "tolist") else [deep]):
        raise keys.wrong("is_deepstack_layers", deep, "false for every layer")
    return _checked(
        VisionConfig(
            layers=keys.integer("block_count", high=MOST_LAYERS),
            hidden=keys.integer("embedding_length"),
            heads=keys.integer("attention.head_count"),
            mlp_width=keys.integer("feed_forward_length"),
            patch=keys.integer("patch_size", high=256),
            merge=keys.integer("spatial_merge_size", 2, high=16),
            temporal=temporal,
            positions=positions,
            out_width=keys.integer("projection_dim"),
            norm_eps=keys.number("attention.layer_norm_epsilon"),
        ),
        where,
    )


def hf_rules(metadata: Mapping[str, object], config: VisionConfig, where: str) -> ImageRules:
    """Rules of a folder: preprocessor_config.json, else the image part of processor_config.json,
    else model.md D.1. Raises CheckpointMalformed."""
    found = metadata.get("preprocessor_config.json")
    if not isinstance(found, dict):
        whole = metadata.get("processor_config.json")
        found = whole.get("image_processor") if isinstance(whole, dict) else None
    if not isinstance(found, dict):
        return config.rules
    return rules_of(found, config.rules, where)


def hf_video_rules(metadata: Mapping[str, object], rules: ImageRules, where: str) -> VideoRules:
    """Rules of a folder's videos: video_preprocessor_config.json, else the video part of
    processor_config.json, else model.md D.1 with the images' normalisation.

    Raises CheckpointMalformed.
    """
    found = metadata.get("video_preprocessor_config.json")
    if not isinstance(found, dict):
        whole = metadata.get("processor_config.json")
        found = whole.get("video_processor") if isinstance(whole, dict) else None
    return video_rules_of(found if isinstance(found, dict) else None, rules, where)


def gguf_rules(metadata: Mapping[str, object], config: VisionConfig, where: str) -> ImageRules:
    """Rules of an mmproj file; limits it does not state are those of model.md D.1.

    Raises CheckpointMalformed.
    """
    keys = Keys(metadata, where, "clip.vision.")
    base = config.rules
    values: dict[str, object] = {
        "min_pixels": keys.integer("image_min_pixels", base.min_pixels),
        "max_pixels": keys.integer("image_max_pixels", base.max_pixels),
        "image_mean": list(
            channels(keys.get("image_mean"), base.mean, where, "image_mean", zero=True)
        ),
        "image_std": list(
            channels(keys.get("image_std"), base.std, where, "image_std", zero=False)
        ),
    }
    return rules_of(values, base, where)


def _checked(c: VisionConfig, where: str) -> VisionConfig:
    faults = [
        (c.hidden % c.heads, f"a width of {c.hidden} does not split into {c.heads} vision heads"),
        (c.head_dim % 4, f"vision heads of {c.head_dim} do not split into rows and columns"),
        (c.side**2 != c.positions, f"{c.positions} vision positions are no square grid"),
    ]
    for fault, text in faults:
        if fault:
            raise CheckpointMalformed(f"{where}: {text}; the file is damaged or not this model")
    return c
