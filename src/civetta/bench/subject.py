"""`Subject`: a loaded model with one group of settings, ready to be measured."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from civetta.engine.load import (
    choose_ops,
    dtype_name,
    dtype_of,
    load_trunk_only,
    stored_format,
    table_options,
    thread_count,
)
from civetta.engine.load_drafting import drafting_of
from civetta.errors import DeviceError, UsageError
from civetta.kernels.select import resolve_device
from civetta.ngram.feed import RowFeed
from civetta.ngram.placement import open_store

if TYPE_CHECKING:
    from contextlib import ExitStack

    from civetta.bench.case import RandomModel
    from civetta.chat.tokenizer import Tokenizer
    from civetta.engine.load import Progress
    from civetta.engine.speculation import Drafting
    from civetta.model.trunk import Trunk
    from civetta.options import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """`label` is A or B; `prefill_batch` the tokens of a prefill launch, all sessions together;
    `known` what a row of results says of the model itself."""

    label: str
    settings: Settings
    trunk: Trunk
    context_tokens: int
    prefill_batch: int
    known: dict[str, str | int]
    drafting: Drafting | None = None
    tokenizer: Tokenizer | None = None

    def activate(self) -> None:
        """Set what is one setting for the whole process: its compute threads."""
        choose_ops(self.settings.model)

    def facts(self) -> dict[str, str | int]:
        """What a row of results says of its model and settings."""
        return self.known | {
            "device": str(self.trunk.device),
            "backend": self.trunk.ops.name,
            "dtype": dtype_name(self.trunk.dtype),
            "threads": thread_count(self.settings.model),
            "prefill_batch": self.prefill_batch,
            "speculative": self.settings.drafting.speculative,
        }


def load_subject(
    label: str, settings: Settings, *, progress: Progress = lambda *_: None
) -> Subject:
    """Load the model that the settings name. Raises as `load_trunk_only`."""
    loaded = load_trunk_only(settings, progress=progress)
    tensors = loaded.checked.checkpoint.tensors.values()
    return Subject(
        label=label,
        settings=settings,
        trunk=loaded.trunk,
        context_tokens=loaded.context_tokens,
        prefill_batch=settings.engine.batch_on(loaded.device),
        drafting=drafting_of(settings.drafting, loaded.trunk),
        tokenizer=loaded.tokenizer,
        known={
            "model": loaded.path.name if settings.model.model is not None else "civetta-nano",
            "model_bytes": sum(info.nbytes for info in tensors),
            "parameters": sum(prod(info.shape) for info in tensors),
            "format": stored_format(loaded.checked),
        },
    )


def random_subject(label: str, settings: Settings, wanted: RandomModel, held: ExitStack) -> Subject:
    """A model of random weights at the real sizes on the settings' GPU.

    `held` deletes the table's file. Raises UsageError without a GPU, DeviceError when its memory
    or the disk does not suffice.
    """
    if settings.drafting.speculative != "off":
        raise UsageError("--random-weights have no draft head: leave --speculative out.")
    options = settings.model
    device = resolve_device(options.device)
    if device.type == "cpu":
        raise UsageError("--random-weights are made on a GPU: add --device cuda.")
    from civetta.model.gpu.random import (
        flash_next_config,
        parameters,
        random_weights,
        weight_bytes,
        write_random_table,
    )
    from civetta.model.gpu.trunk import GpuTrunk

    dtype = dtype_of(options.dtype, device)
    config = flash_next_config(wanted.layers, wanted.ngram_base)
    folder = held.enter_context(tempfile.TemporaryDirectory(prefix="civetta-bench-"))
    try:
        layout = write_random_table(config, wanted.mix, Path(folder) / "ngram-table")
        weights = random_weights(config, wanted.mix, device)
    except (OSError, torch.OutOfMemoryError) as error:
        raise DeviceError(
            f"The random model does not fit: {str(error).splitlines()[0]}. Use fewer --layers or a"
            " smaller --ngram-base."
        ) from error
    size = weight_bytes(weights)
    store = open_store(layout, table_options(options).store, device=device, other_bytes=size)
    assert config.ple is not None
    prefetch = options.ngram_prefetch == "on"
    rows = RowFeed(config.ple.hash, store, dtype=dtype, device=device, prefetch=prefetch)
    trunk = GpuTrunk(config, None, weights, choose_ops(options), dtype, rows, device=device)
    return Subject(
        label=label,
        settings=settings,
        trunk=trunk,
        context_tokens=config.context_tokens,
        prefill_batch=settings.engine.batch_on(str(device)),
        known={
            "model": f"random-{wanted.mix}-{wanted.layers}-layers",
            "model_bytes": size + layout.nbytes,
            "parameters": parameters(weights) + layout.rows * layout.cols,
            "format": f"random {wanted.mix}",
        },
    )
