"""`Subject`: a loaded model with one group of settings, ready to be measured."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from civetta.engine.load import choose_ops, load_trunk_only, stored_format, thread_count

if TYPE_CHECKING:
    from civetta.engine.load import LoadedTrunk
    from civetta.model.trunk import Trunk
    from civetta.options import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """`label` is A or B; `prefill_batch` the tokens of a prefill launch, all sessions together."""

    label: str
    settings: Settings
    loaded: LoadedTrunk
    prefill_batch: int

    @property
    def trunk(self) -> Trunk:
        """The network."""
        return self.loaded.trunk

    def activate(self) -> None:
        """Set what is one setting for the whole process: its compute threads."""
        choose_ops(self.settings.model)

    def facts(self) -> dict[str, str | int]:
        """What a row of results says of its model and settings."""
        tensors = self.loaded.checked.checkpoint.tensors.values()
        model = self.settings.model.model
        return {
            "model": self.loaded.path.name if model is not None else "civetta-nano",
            "model_bytes": sum(info.nbytes for info in tensors),
            "parameters": sum(prod(info.shape) for info in tensors),
            "format": stored_format(self.loaded.checked),
            "device": self.loaded.device,
            "backend": self.trunk.ops.name,
            "dtype": "bf16" if self.trunk.dtype == torch.bfloat16 else "f32",
            "threads": thread_count(self.settings.model),
            "prefill_batch": self.prefill_batch,
        }


def load_subject(label: str, settings: Settings) -> Subject:
    """Load the model that the settings name. Raises CheckpointError, TokenizerError, UsageError."""
    loaded = load_trunk_only(settings)
    return Subject(
        label=label,
        settings=settings,
        loaded=loaded,
        prefill_batch=settings.engine.batch_on(loaded.device),
    )
