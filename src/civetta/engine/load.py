"""From settings to a running engine: model, tokenizer, template, memory for sessions."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from civetta.chat.template import ChatTemplate
from civetta.chat.tokenizer import Tokenizer
from civetta.engine.calibrate import calibrate
from civetta.engine.engine import Engine
from civetta.engine.memory import MemoryNeeds, available_host_bytes, plan_memory, state_sizes, tell
from civetta.engine.protocol import ModelInfo
from civetta.engine.speculation import Drafting
from civetta.errors import TokenizerError, UsageError
from civetta.kernels.select import select
from civetta.log import log_event
from civetta.model.bind_gguf import TABLE
from civetta.model.bind_mtp import find_head
from civetta.model.build import CheckedModel, build_trunk, check_checkpoint
from civetta.model.embedded import MODEL_ID, embedded_model_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from civetta.engine.memory import MemoryPlan
    from civetta.model.bind_mtp import CheckedHead
    from civetta.model.inputs import Piece
    from civetta.model.mtp import HiddenNorm
    from civetta.model.trunk import Trunk
    from civetta.options import DraftingOptions, Settings
    from civetta.state.session import Session

HEAD_NORMS: dict[str, HiddenNorm] = {"wide": "wide", "stream": "stream"}
DTYPES = {"auto": torch.float32, "f32": torch.float32, "bf16": torch.bfloat16}

_log = logging.getLogger(__name__)


class TrunkModel:
    """The trunk and its session store as the step loop sees them."""

    def __init__(self, trunk: Trunk, plan: MemoryPlan) -> None:
        self._trunk = trunk
        self._store = trunk.store(
            sessions=plan.needs.sessions,
            context_tokens=plan.needs.context_tokens,
            pages=plan.pages,
        )

    @property
    def pages_total(self) -> int:
        """Pages that all sessions and the cache share."""
        return self._store.pool.pages

    @property
    def pages_free(self) -> int:
        """Pages nobody holds."""
        return self._store.pool.free_pages

    def open_session(self) -> Session:
        """A new, empty session."""
        return self._store.open()

    def forward_pieces(self, pieces: Sequence[Piece]) -> Tensor:
        """Append each piece to its session; float32 logits of the wanted rows [n, vocab]."""
        return self._trunk.forward_pieces(pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTrunk:
    """A trunk with its text side; `context_tokens` is what a session may hold."""

    checked: CheckedModel
    trunk: Trunk
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    context_tokens: int
    path: Path


def load_trunk_only(settings: Settings) -> LoadedTrunk:
    """Model, tokenizer and template that `settings` describe, without an engine.

    Raises CheckpointError, TokenizerError, UsageError.
    """
    options = settings.model
    path = Path(options.model) if options.model is not None else embedded_model_path()
    checked = check_checkpoint(path)
    context = _context(options.context, checked.config.context_tokens)
    threads = options.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    ops = select(options.device, threads)
    tokenizer, template = read_text_side(checked)
    log_event(_log, logging.DEBUG, "loaded", ops=ops.name, threads=threads)
    return LoadedTrunk(
        checked=checked,
        trunk=build_trunk(
            checked,
            dtype=DTYPES[options.dtype],
            ops=ops,
            head=_head(settings.drafting, checked),
            head_norm=HEAD_NORMS[settings.drafting.mtp_norm],
        ),
        tokenizer=tokenizer,
        template=template,
        context_tokens=context,
        path=path,
    )


def load_engine(settings: Settings) -> Engine:
    """The engine that `settings` describe; the embedded model when they name none.

    Raises CheckpointError, TokenizerError, UsageError, and DeviceError when memory does not
    suffice.
    """
    loaded = load_trunk_only(settings)
    checked = loaded.checked
    needs = MemoryNeeds(
        sizes=state_sizes(loaded.trunk.state_shape, loaded.trunk.dtype),
        sessions=settings.engine.sessions,
        context_tokens=loaded.context_tokens,
        weights_bytes=_weight_bytes(checked),
        mapped=True,
    )
    plan = plan_memory(needs, available_bytes=available_host_bytes())
    tell(plan)
    embedded = settings.model.model is None
    info = ModelInfo(
        model_id=settings.server.served_model_name or _model_id(loaded.path, embedded=embedded),
        path=str(loaded.path),
        context_tokens=loaded.context_tokens,
        vocab_size=checked.config.vocab,
        parameters=sum(prod(info.shape) for info in checked.checkpoint.tensors.values()),
        format=_format(checked),
        device="cpu",
        dtype="bf16" if loaded.trunk.dtype == torch.bfloat16 else "f32",
        created_s=int(time.time()),
        has_tokenizer=loaded.tokenizer is not None,
    )
    return Engine(
        TrunkModel(loaded.trunk, plan),
        info,
        tokenizer=loaded.tokenizer,
        template=loaded.template,
        options=settings.engine,
        cache_drain_s=settings.server.drain_timeout,
        drafting=_drafting(settings.drafting, loaded.trunk),
    )


def _head(options: DraftingOptions, checked: CheckedModel) -> CheckedHead | None:
    """The draft head that the settings ask for."""
    if options.speculative != "mtp":
        if options.mtp_model is not None:
            raise UsageError("--mtp-model is of no use without --speculative mtp; give both")
        return None
    given = None if options.mtp_model is None else Path(options.mtp_model).expanduser()
    head = find_head(checked.checkpoint, checked.config, given)
    if head is None:
        raise UsageError(
            f"{checked.checkpoint.path} has no draft head and none lies beside it; name one with"
            " --mtp-model, or draft from the text alone with --speculative lookup"
        )
    return head


def _drafting(options: DraftingOptions, trunk: Trunk) -> Drafting | None:
    """How to draft on this machine; None for not at all."""
    if options.speculative == "off":
        return None
    launches, steps = calibrate(trunk)
    return Drafting(
        mode="lookup" if trunk.head is None else "mtp",
        most=options.draft_tokens,
        head=trunk.head,
        launches=launches,
        steps=steps,
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
        if name != TABLE and ".ngram_embedding." not in name
    )


def _model_id(path: Path, *, embedded: bool) -> str:
    if embedded:
        return MODEL_ID
    return path.stem if path.is_file() else path.resolve().name


def _format(checked: CheckedModel) -> str:
    """Container and the format that holds most bytes."""
    sizes: Counter[str] = Counter()
    for info in checked.checkpoint.tensors.values():
        sizes[info.format.name] += info.nbytes
    name = "GGUF" if checked.checkpoint.kind == "gguf" else "safetensors"
    return f"{name} {sizes.most_common(1)[0][0]}"
