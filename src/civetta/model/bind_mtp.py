"""The draft head's files: where they are, and their tensors as our weights (model.md A.4, C.7).

The head is part of the model's own files, or a sidecar beside them. A sidecar may bring embedding
and output of its own; without them the trunk's serve both. The two halves of the combiner come
split or side by side in one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from civetta.checkpoint.gguf_split import gguf_role, part_paths, read_gguf
from civetta.checkpoint.quant import QuantTensor, Weight
from civetta.checkpoint.source import Checkpoint, open_checkpoint
from civetta.errors import CheckpointMalformed, CheckpointNotFound, TensorMissing
from civetta.kernels.dequant.reference import dequantize
from civetta.model.bind_gguf import gguf_attention_block, gguf_hyper
from civetta.model.bind_hf import MTP_PREFIX, hf_attention_block, hf_hyper
from civetta.model.binder import Binder
from civetta.model.weights import MtpWeights

if TYPE_CHECKING:
    from pathlib import Path

    from civetta.model.config import ModelConfig
    from civetta.model.weights import TrunkWeights

SIDECAR_FOLDER = "MTP"
"""Folder beside a model where its publishers put sidecars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedHead:
    """A draft head whose names, shapes and types have been proved against the trunk's sizes.

    `at` is what its tensors' names begin with; `own_ends`: it brings embedding and output.
    """

    checkpoint: Checkpoint
    at: str
    own_ends: bool


def find_head(model: Checkpoint, config: ModelConfig, given: Path | None) -> CheckedHead | None:
    """The draft head of a model: at `given`, else in its files, else beside them; None if none.

    Nothing but headers is read. Raises the CheckpointError that names what is wrong; for a path
    that has no head CheckpointNotFound, and where several sidecars could be meant as well.
    """
    if given is not None:
        head = _head_in(open_checkpoint(given), config)
        if head is None:
            raise CheckpointNotFound(
                f"{given} has no draft head for this model; give the MTP sidecar that belongs to it"
            )
        return head
    head = _head_in(model, config)
    if head is not None or model.kind != "gguf":
        return head
    found = _sidecars(model.path)
    if len(found) > 1:
        raise CheckpointNotFound(
            "several draft sidecars lie beside the model: "
            + ", ".join(path.name for path in found)
            + "; name one with --mtp-model"
        )
    return _head_in(open_checkpoint(found[0]), config) if found else None


def bind_head(
    checked: CheckedHead, config: ModelConfig, trunk: TrunkWeights, *, copied: bool = False
) -> MtpWeights:
    """The head's weights as views of its files, or as copies."""
    return _bind(Binder(checked.checkpoint, dry=False, copied=copied), checked, config, trunk)


def _head_in(checkpoint: Checkpoint, config: ModelConfig) -> CheckedHead | None:
    at = MTP_PREFIX
    if checkpoint.kind == "gguf":
        block = _first_head_block(checkpoint)
        if block is None:
            return None
        at = f"blk.{block}."
    if not any(name.startswith(at) for name in checkpoint.tensors):
        return None
    sidecar = checkpoint.kind == "gguf" and gguf_role(checkpoint.metadata, checkpoint.tensors)
    own_ends = sidecar == "mtp" and "token_embd.weight" in checkpoint.tensors
    checked = CheckedHead(checkpoint=checkpoint, at=at, own_ends=own_ends)
    _check_sizes(checked, config)
    binder = Binder(checkpoint, dry=True)
    _bind(binder, checked, config, None)
    binder.finish("" if sidecar == "mtp" else at)
    return checked


def _first_head_block(checkpoint: Checkpoint) -> int | None:
    """Number of the block that is the head, by the file's own counts."""
    blocks = checkpoint.metadata.get("qwen4exp.block_count")
    heads = checkpoint.metadata.get("qwen4exp.nextn_predict_layers", 0)
    if not isinstance(blocks, int) or not isinstance(heads, int) or heads < 1:
        return None
    if heads != 1:
        raise CheckpointMalformed(
            f"{checkpoint.path} has {heads} draft blocks; this model has one, which is repeated"
        )
    return blocks - heads


def _check_sizes(checked: CheckedHead, config: ModelConfig) -> None:
    """What shapes do not show: a head of another model would draft noise."""
    metadata = checked.checkpoint.metadata
    wanted = {
        "embedding_length": config.hidden,
        "attention.head_count": config.heads,
        "expert_used_count": config.experts_a_token,
        "hyper_connection.count": config.streams,
        "rope.freq_base": config.rope_theta,
    }
    for key, value in wanted.items():
        found = metadata.get(f"qwen4exp.{key}", value)
        if found != value:
            raise CheckpointMalformed(
                f"{checked.checkpoint.path}: {key} is {found}, but the model's is {value};"
                " the draft head belongs to another model"
            )


def _sidecars(model: Path) -> list[Path]:
    """First files of the draft sidecars in the model's folder and in the publishers' subfolder."""
    own = set(part_paths(model))
    found = []
    for folder in (model.parent, model.parent / SIDECAR_FOLDER):
        if not folder.is_dir():
            continue
        for file in sorted(folder.glob("*.gguf")):
            first = part_paths(file)[0]
            if file not in own and file == first and read_gguf(file).role == "mtp":
                found.append(file)
    return found


def _bind(
    b: Binder, checked: CheckedHead, c: ModelConfig, trunk: TrunkWeights | None
) -> MtpWeights:
    """`trunk` None when dry: then nothing is borrowed, and placeholders come back."""
    if checked.checkpoint.kind == "safetensors":
        return _bind_hf(b, checked.at, c, trunk)
    at, nextn = checked.at, checked.at + "nextn."
    embed_in, hidden_in = _combiner(b, c, nextn)
    embed, head = _ends(b, c, trunk, own=checked.own_ends)
    return MtpWeights(
        embed=embed,
        embed_norm_D=b.vector(nextn + "enorm.weight", c.hidden),
        hidden_norm_SD=b.vector(nextn + "hnorm.weight", c.streams, c.hidden),
        embed_in=embed_in,
        hidden_in=hidden_in,
        block=gguf_attention_block(b, c, at),
        mixer=gguf_hyper(b, c, nextn + "hc_head_", inject=False),
        head=head,
    )


def _ends(
    b: Binder, c: ModelConfig, trunk: TrunkWeights | None, *, own: bool = False
) -> tuple[Weight, Weight]:
    """Embedding and output; placeholders when dry and borrowed."""
    if own:
        embed = b.matrix("token_embd.weight", c.vocab, c.hidden)
        has_output = b.has("output.weight")
        return embed, b.matrix("output.weight", c.vocab, c.hidden) if has_output else embed
    if trunk is None:
        return torch.zeros(0), torch.zeros(0)
    return trunk.embed, trunk.head


def _combiner(b: Binder, c: ModelConfig, nextn: str) -> tuple[Weight, Weight]:
    """[D, D] for the embedding and for each stream; one [D, 2 D] has them in this order."""
    if b.has(nextn + "embed_proj.weight"):
        return (
            b.matrix(nextn + "embed_proj.weight", c.hidden, c.hidden),
            b.matrix(nextn + "hidden_proj.weight", c.hidden, c.hidden),
        )
    if not b.has(nextn + "eh_proj.weight"):
        raise TensorMissing(
            f"the draft head has neither {nextn}eh_proj.weight nor {nextn}embed_proj.weight;"
            " the download is incomplete or the file is for another program"
        )
    both = b.matrix(nextn + "eh_proj.weight", c.hidden, 2 * c.hidden)
    return _columns(both, 0, c.hidden), _columns(both, c.hidden, 2 * c.hidden)


def _columns(w: Weight, start: int, stop: int) -> Weight:
    """Columns as a matrix of their own: stored blocks where they end between blocks, else floats."""
    if w.shape[0] == 0:  # dry
        return w
    if not isinstance(w, QuantTensor):
        return w[:, start:stop].clone()
    if start % w.format.block_values == 0 and stop % w.format.block_values == 0:
        return w.slice_cols(start, stop)
    return dequantize(w)[:, start:stop].clone()


def _bind_hf(b: Binder, at: str, c: ModelConfig, trunk: TrunkWeights | None) -> MtpWeights:
    embed, head = _ends(b, c, trunk)
    return MtpWeights(
        embed=embed,
        embed_norm_D=b.vector(at + "pre_fc_norm_embedding.weight", c.hidden, add=1.0),
        hidden_norm_SD=b.vector(at + "pre_fc_norm_hidden.weight", c.streams, c.hidden, add=1.0),
        embed_in=b.matrix(at + "fc_embedding.weight", c.hidden, c.hidden),
        hidden_in=b.matrix(at + "fc_hidden.weight", c.hidden, c.hidden),
        block=hf_attention_block(b, c, at + "layers.0."),
        mixer=hf_hyper(b, c, at + "hyper_connection_mixer.", inject=False),
        head=head,
    )
