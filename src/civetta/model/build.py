"""From a path to a running trunk: read headers, check everything, then bind views of the files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from civetta.checkpoint.gguf_split import gguf_role
from civetta.checkpoint.source import Checkpoint, open_checkpoint
from civetta.errors import ArchitectureUnsupported, TensorMissing
from civetta.kernels.select import select
from civetta.model.bind_gguf import bind_gguf
from civetta.model.bind_hf import bind_hf
from civetta.model.bind_mtp import bind_head
from civetta.model.bind_table import bind_gguf_table, bind_hf_table
from civetta.model.binder import Binder
from civetta.model.config import ModelConfig, PleConfig, from_gguf, from_hf
from civetta.model.mtp import MtpHead
from civetta.model.place import place_head
from civetta.model.stored import stored_bytes
from civetta.model.trunk import Trunk
from civetta.model.vision_build import bind_vision, check_width, hf_vision
from civetta.ngram.feed import RowFeed
from civetta.ngram.placement import StoreOptions, open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from civetta.kernels.ops import Ops
    from civetta.model.bind_mtp import CheckedHead
    from civetta.model.mtp import HiddenNorm
    from civetta.model.vision_build import CheckedVision
    from civetta.model.weights import TrunkWeights
    from civetta.ngram.layout import TableLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModel:
    """A checkpoint whose names, shapes and types have been proved against its configuration.

    `vision` is the tower in the same files, None when they have none.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    ignored: dict[str, str]
    vision: CheckedVision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Who is asked and told while a model is loaded.

    `room(bytes, config)`: so many are about to be taken on a device; it raises where they are not free.
    `progress(phase, done_bytes, total_bytes)`: "weights" to a device, or the n-gram "table" into memory.
    """

    room: Callable[[int, ModelConfig], None] = lambda *_: None
    progress: Callable[[str, int, int], None] = lambda *_: None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """How the n-gram table is kept, and whether its rows are read ahead."""

    store: StoreOptions = field(default_factory=StoreOptions)
    prefetch: bool = True


def check_checkpoint(path: Path | str) -> CheckedModel:
    """Open and check a model without reading a weight.

    Raises the CheckpointError that names what is wrong: see civetta.errors.
    """
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint)
    vision = hf_vision(checkpoint) if checkpoint.kind == "safetensors" else None
    binder = Binder(checkpoint, dry=True)
    _bind(binder, checkpoint, config)
    if vision is not None:
        check_width(vision, config.hidden)
        bind_vision(binder, vision)
    binder.finish()
    return CheckedModel(
        checkpoint=checkpoint, config=config, ignored=binder.ignored(), vision=vision
    )


def load_trunk(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    ops: Ops | None = None,
    table: TableOptions | None = None,
) -> Trunk:
    """A trunk ready to run on the CPU; weights stay views of the files."""
    return build_trunk(check_checkpoint(path), dtype=dtype, ops=ops or select("cpu"), table=table)


def build_trunk(
    checked: CheckedModel,
    *,
    dtype: torch.dtype,
    ops: Ops,
    head: CheckedHead | None = None,
    head_norm: HiddenNorm = "wide",
    table: TableOptions | None = None,
    device: torch.device | None = None,
    copied: bool = False,
    loading: Loading | None = None,
) -> Trunk:
    """The trunk of a checked model, with its draft head if given.

    On the CPU weights stay views of the files, unless `copied`. Raises UsageError, DeviceError,
    ReadFailed or CheckpointMalformed for the n-gram table, and what `loading.room` raises.
    """
    loading = loading or Loading()
    device = device or torch.device("cpu")
    weights, found = _bind(
        Binder(checked.checkpoint, dry=False, copied=copied), checked.checkpoint, checked.config
    )
    config, rows, table = checked.config, None, table or TableOptions()
    if found is not None:
        config = replace(config, ple=found[0])
    if device.type != "cpu":
        from civetta.model.gpu.weights import device_bytes

        in_table = found[1].nbytes if found and table.store.placement == "gpu" else 0
        loading.room(device_bytes(weights, dtype) + in_table, config)
    if found is not None:
        rows = _open_table(checked, *found, dtype, table, device, loading)
    bound = None if head is None else bind_head(head, config, weights, copied=copied)
    packed = None
    if device.type != "cpu":
        from civetta.model.gpu.weights import gpu_weights

        packed = gpu_weights(
            weights,
            config,
            device,
            dtype,
            Counted("weights", stored_bytes(weights), loading.progress),
            place=checked.checkpoint.place,
        )
        if bound is not None:
            bound = place_head(bound, weights, packed.head, device, dtype)
    mtp = None
    if bound is not None:
        mtp = MtpHead(config, bound, ops, dtype, norm=head_norm, device=device)
    if packed is not None:
        from civetta.model.gpu.trunk import GpuTrunk

        return GpuTrunk(config, weights, packed, ops, dtype, rows, mtp, device=device)
    return Trunk(config, weights, ops, dtype, rows, mtp, device=device)


class Counted:
    """Adds up the bytes of a phase and tells how many are done."""

    def __init__(self, phase: str, total_bytes: int, tell: Callable[[str, int, int], None]) -> None:
        self._phase, self._total_bytes, self._tell = phase, total_bytes, tell
        self._done_bytes = 0

    def __call__(self, nbytes: int) -> None:
        """So many more are done."""
        self._done_bytes += nbytes
        self._tell(self._phase, self._done_bytes, self._total_bytes)


def table_layout(checked: CheckedModel) -> TableLayout | None:
    """Where the n-gram table of a checked model lies; None for a model without one."""
    found = _bind(Binder(checked.checkpoint, dry=True), checked.checkpoint, checked.config)[1]
    return None if found is None else found[1]


def _open_table(
    checked: CheckedModel,
    ple: PleConfig,
    layout: TableLayout,
    dtype: torch.dtype,
    options: TableOptions,
    device: torch.device,
    loading: Loading,
) -> RowFeed:
    all_bytes = sum(info.nbytes for info in checked.checkpoint.tensors.values())
    store = open_store(
        layout,
        options.store,
        device=device,
        other_bytes=all_bytes - layout.nbytes,
        read=Counted("table", layout.nbytes, loading.progress),
    )
    return RowFeed(ple.hash, store, dtype=dtype, device=device, prefetch=options.prefetch)


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """The model's sizes; raises ArchitectureUnsupported or CheckpointMalformed."""
    where = str(checkpoint.path)
    if checkpoint.kind == "safetensors":
        config = checkpoint.metadata["config.json"]
        assert isinstance(config, dict)
        return from_hf(config, where)
    if checkpoint.metadata.get("general.architecture") == "clip":
        raise ArchitectureUnsupported(
            f"{where} is a vision sidecar (mmproj), not a model; give the model's own file"
        )
    tensors = checkpoint.tensors
    if gguf_role(checkpoint.metadata, tensors) == "mtp":
        raise ArchitectureUnsupported(
            f"{where} is a draft sidecar (MTP), not a model; give the model's own file"
        )
    has_indexer = any(".indexer.k_proj." in name for name in tensors)
    embed = tensors.get("token_embd.weight")
    config = from_gguf(
        checkpoint.metadata,
        where,
        has_indexer=has_indexer,
        vocab=embed.shape[0] if embed is not None and embed.shape else 1,
    )
    if embed is None:
        raise TensorMissing(f"{where}: tensor 'token_embd.weight' is missing; the file is no model")
    return config


def _bind(
    binder: Binder, checkpoint: Checkpoint, config: ModelConfig
) -> tuple[TrunkWeights, tuple[PleConfig, TableLayout] | None]:
    if checkpoint.kind == "safetensors":
        return bind_hf(binder, config), bind_hf_table(binder, config)
    return bind_gguf(binder, config), bind_gguf_table(binder, config)
