"""From settings to a running engine: model, tokenizer, template, memory for sessions."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from civetta import __version__
from civetta.cache.fingerprint import model_fingerprint
from civetta.cache.setup import build_cache, plan_cache
from civetta.chat.template import ChatTemplate
from civetta.chat.tokenizer import Tokenizer
from civetta.engine.engine import Engine
from civetta.engine.load_drafting import HEAD_NORMS, draft_head, drafting_of
from civetta.engine.load_vision import copies_tower, find_vision, image_support, images_bytes
from civetta.engine.memory import MemoryNeeds, plan_memory, state_sizes, tell
from civetta.engine.protocol import ModelInfo
from civetta.engine.trunk_model import TrunkModel
from civetta.errors import CheckpointNotFound, TokenizerError, UsageError
from civetta.host import available_host_bytes
from civetta.kernels.ops import PAGE_TOKENS
from civetta.kernels.select import resolve_device, select
from civetta.log import log_event
from civetta.model.bind_table import GGUF_TABLE
from civetta.model.build import (
    CheckedModel,
    Loading,
    TableOptions,
    build_trunk,
    check_checkpoint,
)
from civetta.model.embedded import MODEL_ID, embedded_model_path
from civetta.model.trunk import state_shape
from civetta.model.vision_build import LazyTower
from civetta.ngram.placement import StoreOptions
from civetta.state.recurrent import REWIND_ROWS

if TYPE_CHECKING:
    from civetta.cache.setup import CachePlan
    from civetta.engine.memory import MemoryPlan
    from civetta.kernels.ops import Ops
    from civetta.model.config import ModelConfig
    from civetta.model.trunk import Trunk
    from civetta.options import (
        CacheOptions,
        ModelOptions,
        Settings,
    )

COPIED_BYTES = 256 << 20
"""Weights up to so much are copied by themselves: no load on other files slows them down then."""

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTrunk:
    """A trunk with its text side; `context_tokens` is what a session may hold."""

    checked: CheckedModel
    trunk: Trunk
    ops: Ops
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    context_tokens: int
    path: Path
    copied: bool

    @property
    def device(self) -> str:
        """Where it computes."""
        return str(self.trunk.device)


Progress = Callable[[str, int, int], None]
"""Told a phase of loading, the bytes of it that are done, and all of them (model/build.Loading)."""


def load_trunk_only(
    settings: Settings, *, progress: Progress = lambda *_: None, sessions: int = 0
) -> LoadedTrunk:
    """Model, tokenizer and template that `settings` describe, without an engine.

    On a GPU nothing is loaded unless weights, a launch and `sessions` sessions fit. Raises
    CheckpointError, TokenizerError, UsageError, DeviceError.
    """
    options = settings.model
    path = Path(options.model) if options.model is not None else embedded_model_path()
    checked = check_checkpoint(path)
    context = _context(options.context, checked.config.context_tokens)
    ops, device = choose_ops(options), resolve_device(options.device)
    copied = _copied(options, checked, device)
    tokenizer, template = read_text_side(checked)
    dtype, head = dtype_of(options.dtype, device), draft_head(settings.drafting, checked)
    log_event(_log, logging.DEBUG, "loaded", ops=ops.name, threads=thread_count(options))

    def room(weights_bytes: int, config: ModelConfig) -> None:
        from civetta.model.gpu.scratch import launch_bytes

        shape = replace(state_shape(config, has_head=head is not None), addressed=True)
        needs = MemoryNeeds(
            sizes=state_sizes(shape, dtype),
            sessions=sessions,
            context_tokens=context if sessions else PAGE_TOKENS,
            weights_bytes=weights_bytes,
            launch_bytes=launch_bytes(config, _most_rows(settings, device), context, dtype),
        )
        plan_memory(needs, available_bytes=_available_bytes(device))

    return LoadedTrunk(
        checked=checked,
        trunk=build_trunk(
            checked,
            dtype=dtype,
            ops=ops,
            head=head,
            head_norm=HEAD_NORMS[settings.drafting.mtp_norm],
            table=table_options(options),
            device=device,
            copied=copied,
            loading=Loading(room=room, progress=progress),
        ),
        ops=ops,
        tokenizer=tokenizer,
        template=template,
        context_tokens=context,
        path=path,
        copied=copied,
    )


def _most_rows(settings: Settings, device: torch.device) -> int:
    """Rows of the largest launch: a prefill beside every session's newest tokens and drafts."""
    return settings.engine.batch_on(str(device)) + REWIND_ROWS * settings.engine.sessions


def thread_count(options: ModelOptions) -> int:
    """CPU threads that compute."""
    return options.threads or os.cpu_count() or 1


def choose_ops(options: ModelOptions) -> Ops:
    """The ops of the device; sets the compute threads, which are one setting for the process.

    Raises UsageError.
    """
    threads = thread_count(options)
    torch.set_num_threads(threads)
    return select(options.device, threads)


def load_engine(settings: Settings, *, progress: Progress = lambda *_: None) -> Engine:
    """The engine that `settings` describe; the embedded model when they name none.

    Raises CheckpointError, TokenizerError, UsageError, and DeviceError when memory does not
    suffice.
    """
    loaded = load_trunk_only(settings, progress=progress, sessions=settings.engine.sessions)
    checked, device = loaded.checked, loaded.trunk.device
    vision = find_vision(settings.vision, checked)
    room = COPIED_BYTES - _weight_bytes(checked) if settings.model.weights == "auto" else None
    tower_copied = loaded.copied and copies_tower(vision, room)
    needs = MemoryNeeds(
        sizes=state_sizes(loaded.trunk.state_shape, loaded.trunk.dtype),
        sessions=settings.engine.sessions,
        context_tokens=loaded.context_tokens,
        weights_bytes=_weight_bytes(checked),
        weights="loaded" if loaded.copied or device.type != "cpu" else "mapped",
        images_bytes=images_bytes(vision, settings.vision, device, copied=tower_copied),
        launch_bytes=loaded.trunk.launch_bytes(_most_rows(settings, device), loaded.context_tokens),
    )
    kept, plan = _divide(needs, settings.cache, _available_bytes(device))
    tell(plan)
    embedded = settings.model.model is None
    images = None
    if vision is not None:
        images = image_support(vision, checked, loaded.tokenizer)
    info = ModelInfo(
        model_id=settings.server.served_model_name or _model_id(loaded.path, embedded=embedded),
        path=str(loaded.path),
        context_tokens=loaded.context_tokens,
        vocab_size=checked.config.vocab,
        parameters=sum(prod(info.shape) for info in checked.checkpoint.tensors.values()),
        format=stored_format(checked),
        device=loaded.device,
        dtype=dtype_name(loaded.trunk.dtype),
        created_s=int(time.time()),
        has_tokenizer=loaded.tokenizer is not None,
        images=images,
    )
    tower = None
    if vision is not None:
        tower = LazyTower(
            vision,
            dtype=loaded.trunk.dtype,
            ops=loaded.ops,
            device=device,
            copied=tower_copied,
        )
    store = loaded.trunk.store(
        sessions=needs.sessions,
        context_tokens=needs.context_tokens,
        pages=plan.pages + kept.spare_pages,
    )
    cache = build_cache(
        settings.cache,
        kept,
        store,
        model=partial(_fingerprint, loaded),
        boundary_ids=_message_starts(loaded.tokenizer),
    )
    return Engine(
        TrunkModel(loaded.trunk, store, tower),
        info,
        cache=cache,
        tokenizer=loaded.tokenizer,
        template=loaded.template,
        options=settings.engine,
        cache_drain_s=settings.server.drain_timeout,
        image_cache_bytes=settings.vision.image_cache_mib << 20,
        drafting=drafting_of(settings.drafting, loaded.trunk),
    )


def table_options(options: ModelOptions) -> TableOptions:
    """How to keep the n-gram table."""
    return TableOptions(
        store=StoreOptions(
            placement=options.ngram_placement,
            reader=options.ngram_reader,
            cache_bytes=options.ngram_cache_mib << 20,
        ),
        prefetch=options.ngram_prefetch == "on",
    )


def read_text_side(checked: CheckedModel) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and template of a checkpoint; None, None for one that brings no tokenizer.

    Raises TokenizerError or CheckpointMalformed when they are there but broken.
    """
    checkpoint = checked.checkpoint
    if checkpoint.kind == "gguf":
        if "tokenizer.ggml.tokens" not in checkpoint.metadata:
            return None, None
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
        return tokenizer, ChatTemplate.from_gguf(
            checkpoint.metadata, named_tokens=tokenizer.named_tokens
        )
    if not (checkpoint.path / "tokenizer.json").exists():
        return None, None
    tokenizer = Tokenizer.from_folder(checkpoint.path)
    if tokenizer.vocab_size > checked.config.vocab:
        raise TokenizerError(
            f"{checkpoint.path}: the tokenizer has {tokenizer.vocab_size} tokens, the model only"
            f" {checked.config.vocab}; the files do not belong together"
        )
    return tokenizer, ChatTemplate.from_folder(checkpoint.path, named_tokens=tokenizer.named_tokens)


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """What `--dtype` means; "auto" is float32 on a CPU and float16 on a GPU.

    Raises UsageError for float16 on a CPU, which has no kernels for it.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.float16
    if name == "f16" and device.type == "cpu":
        raise UsageError("--dtype f16 is for GPUs: give f32 or bf16, or add --device cuda.")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name that `--dtype` has for it."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def _copied(options: ModelOptions, checked: CheckedModel, device: torch.device) -> bool:
    """Whether weights are copied out of their files. Raises UsageError for --weights on a GPU."""
    if device.type != "cpu":
        if options.weights != "auto":
            raise UsageError(
                f"--weights {options.weights} is for a CPU, and {device} has copies always: leave"
                " it out."
            )
        return False
    if options.weights == "auto":
        return _weight_bytes(checked) <= COPIED_BYTES
    return options.weights == "copied"


def _available_bytes(device: torch.device) -> int:
    """Memory for state where it lives: the device's, or the host's for a CPU."""
    if device.type == "cpu":
        return available_host_bytes()
    return int(torch.cuda.mem_get_info(device)[0])


def _divide(
    needs: MemoryNeeds, options: CacheOptions, available_bytes: int
) -> tuple[CachePlan, MemoryPlan]:
    """Memory for the cache: what the options ask for, or a share of what sessions leave."""
    left = plan_memory(needs, available_bytes=available_bytes).left_bytes
    kept = plan_cache(options, needs.sizes.page_bytes, available_bytes=max(left, 0))
    plan = plan_memory(needs, available_bytes=available_bytes, cache_bytes=kept.ram_budget_bytes)
    return kept, plan


def _fingerprint(loaded: LoadedTrunk) -> str:
    """Names all that a stored state's bits depend on. Raises CheckpointNotFound."""
    trunk, checked = loaded.trunk, loaded.checked
    facts = {
        "civetta": __version__,
        "config": checked.config,
        "device": _device_name(trunk.device),
        "dtype": trunk.dtype,
        "ops": trunk.ops.name,
        "draft_head": trunk.head is not None,
        "torch": str(torch.__version__),
    }
    try:
        return model_fingerprint(checked.checkpoint.files, facts)
    except OSError as error:
        raise CheckpointNotFound(
            f"The model's files changed while they were loaded: {error}; start again."
        ) from error


def _device_name(device: torch.device) -> str:
    """Kind of device: bits are the same on all of one kind."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _message_starts(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The token that every message begins with, if the tokenizer has it."""
    if tokenizer is None:
        return ()
    ids = tokenizer.encode("<|im_start|>")
    return tuple(ids) if len(ids) == 1 else ()


def _context(asked: int, native: int) -> int:
    if asked > native:
        raise UsageError(
            f"--context {asked} is more than the model's own {native} tokens; give at most that"
        )
    return asked or native


def _weight_bytes(checked: CheckedModel) -> int:
    """Bytes of all tensors but the n-gram table, which has a placement of its own."""
    return sum(
        info.nbytes
        for name, info in checked.checkpoint.tensors.items()
        if name != GGUF_TABLE and ".ngram_embedding." not in name
    )


def _model_id(path: Path, *, embedded: bool) -> str:
    if embedded:
        return MODEL_ID
    return path.stem if path.is_file() else path.resolve().name


def stored_format(checked: CheckedModel) -> str:
    """Container and the format that holds most bytes."""
    sizes: Counter[str] = Counter()
    for info in checked.checkpoint.tensors.values():
        sizes[info.format.name] += info.nbytes
    name = "GGUF" if checked.checkpoint.kind == "gguf" else "safetensors"
    return f"{name} {sizes.most_common(1)[0][0]}"
