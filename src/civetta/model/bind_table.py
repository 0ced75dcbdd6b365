"""The n-gram table in either container: its hash constants, and where its rows lie.

Only headers and scales are read here; rows stay in the files until a gather wants them
(model.md A.3, A.7, A.8, C.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from civetta.checkpoint.formats import F8_E4M3, INTEGER_FORMATS, NVFP4, U8, QuantFormat
from civetta.errors import CheckpointMalformed, TensorMissing, TensorShapeWrong, TensorTypeUnknown
from civetta.model.binder import FP8_BLOCK, NVFP4_GROUP, Binder
from civetta.ngram.layout import Field, Shard, TableLayout

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.checkpoint.tensors import TensorInfo
    from civetta.model.config import ModelConfig, PleConfig

GGUF_TABLE = "per_layer_token_embd.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One shard: how its rows are stored, and its pieces of every row."""

    format: QuantFormat
    widths: tuple[int, ...]  # bytes of a row, piece by piece
    shards: tuple[Shard, ...]


def bind_gguf_table(b: Binder, c: ModelConfig) -> tuple[PleConfig, TableLayout] | None:
    """The table as one tensor; its hash comes from the metadata."""
    p = c.ple
    if p is None:
        return None
    info = b.stored(GGUF_TABLE)
    _expect(info, max(_rows(info), p.hash.rows), p.row_values)
    if info.format in (*INTEGER_FORMATS, F8_E4M3):
        raise _unreadable(info, p.row_values)
    return p, _layout(p, (_whole(info, info.format),))


def bind_hf_table(b: Binder, c: ModelConfig) -> tuple[PleConfig, TableLayout] | None:
    """The table's shards in numeric order, and its hash with the file's own constants."""
    p = c.ple
    if p is None:
        return None
    root = "model.language_model."
    if not b.has(f"{root}layers.{p.layer}.ple.key_proj.weight"):
        root = "model."
    at = f"{root}layers.{p.layer}.ple.ple_embedding."
    h = p.hash
    multipliers = b.integers(at + "layer_multipliers", h.size)
    sizes = b.integers(at + "ngram_heads_vocab_sizes", h.heads)
    offsets = b.integers(at + "ngram_heads_offsets", h.heads)
    layout = _hf_layout(b, p, at + "ngram_embedding.")
    if not multipliers:  # a dry run
        return p, layout
    need = max(o + s for o, s in zip(offsets, sizes, strict=True))
    if min(*sizes, *multipliers) < 1 or min(offsets) < 0 or need > layout.rows:
        raise CheckpointMalformed(
            f"the n-gram table has {layout.rows} rows but its hash needs {need}; the file is"
            " damaged"
        )
    known = replace(h, multipliers=multipliers, vocab_sizes=sizes, offsets=offsets, rows=need)
    return replace(p, hash=known), layout


def _hf_layout(b: Binder, p: PleConfig, at: str) -> TableLayout:
    whole = at + "weight"
    names = [whole] if b.has(whole) else []
    while not b.has(whole) and b.has(f"{at}shard_{len(names)}.weight"):
        names.append(f"{at}shard_{len(names)}.weight")
    if not names:
        raise TensorMissing(
            f"tensor {at + 'shard_0.weight'!r} is missing: the files have no n-gram table;"
            " the download is incomplete"
        )
    scale = scale_2 = None
    if names != [whole]:  # a whole table finds its scales as any matrix does
        scale = b.vector(at + "weight_scale", 1) if b.has(at + "weight_scale") else None
        scale_2 = b.vector(at + "weight_scale_2", 1) if b.has(at + "weight_scale_2") else None
    rows = b.rows(names[0])
    total = sum(b.rows(name) for name in names)
    uneven = any(b.rows(n) != rows for n in names[:-1]) or b.rows(names[-1]) > rows
    if total < p.hash.rows or uneven:
        raise TensorShapeWrong(
            f"the n-gram table {at!r} has {total} rows in {len(names)} shards; the configuration"
            f" implies {p.hash.rows} in equal shards; the download is incomplete"
        )
    parts = tuple(_hf_part(b, p, name, scale, scale_2) for name in names)
    for name, part in zip(names, parts, strict=True):
        if (part.format, part.widths) != (parts[0].format, parts[0].widths):
            raise TensorTypeUnknown(
                f"tensor {name!r} is stored as {part.format.name}, but other parts of the n-gram"
                f" table as {parts[0].format.name}; the files do not belong together"
            )
    return _layout(p, parts)


def _hf_part(
    b: Binder, p: PleConfig, name: str, scale: Tensor | None, scale_2: Tensor | None
) -> _Part:
    """One shard; scale and scale_2 are those of the whole table, if it has them."""
    info = b.stored(name)
    rows, cols = _rows(info), p.row_values
    own = name.removesuffix("weight")
    codes, groups = cols // 2, cols // NVFP4_GROUP
    if info.format == U8 and b.has(own + "weight_scale_2"):
        _expect(info, rows, codes)
        inner = b.stored(own + "weight_scale")
        if inner.shape != (rows, groups) or inner.format != F8_E4M3:
            raise _unreadable(inner, cols)
        own_scale_2 = b.vector(own + "weight_scale_2", 1)
        b.ignore(own + "input_scale", "activations are not quantised here")
        pieces = (_whole(info, NVFP4, scale_2=own_scale_2), _whole(inner, NVFP4))
        return _Part(
            format=NVFP4,
            widths=(codes, groups),
            shards=tuple(piece.shards[0] for piece in pieces),
        )
    if info.format == U8 and scale_2 is not None and not cols % NVFP4_GROUP:
        if info.shape[1] != codes + groups:
            raise _unreadable(info, cols)
        return _whole(info, NVFP4, scale_2=scale_2)
    if info.format in INTEGER_FORMATS:
        raise _unreadable(info, cols)
    _expect(info, rows, cols)
    if info.format != F8_E4M3:
        return _whole(info, info.format)
    if b.has(own + "weight_scale_inv"):
        grid = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
        return _whole(info, F8_E4M3, scale=b.vector(own + "weight_scale_inv", *grid))
    if scale is None:
        scale = b.vector(own + "weight_scale", 1)
    return _whole(info, F8_E4M3, scale=scale)


def _whole(
    info: TensorInfo,
    fmt: QuantFormat,
    *,
    scale: Tensor | None = None,
    scale_2: Tensor | None = None,
) -> _Part:
    """A tensor as one piece of every row."""
    shard = Shard(
        path=info.path, offset=info.offset, rows=info.shape[0], scale=scale, scale_2=scale_2
    )
    return _Part(format=fmt, widths=(info.row_bytes,), shards=(shard,))


def _layout(p: PleConfig, parts: tuple[_Part, ...]) -> TableLayout:
    fields = tuple(
        Field(row_bytes=width, shards=tuple(part.shards[n] for part in parts))
        for n, width in enumerate(parts[0].widths)
    )
    return TableLayout(format=parts[0].format, cols=p.row_values, fields=fields)


def _rows(info: TensorInfo) -> int:
    if len(info.shape) != 2:
        raise TensorShapeWrong(
            f"{info.path}: tensor {info.name!r} has shape {list(info.shape)}, but must be a matrix;"
            " the file is damaged or made for another program"
        )
    return info.shape[0]


def _expect(info: TensorInfo, rows: int, cols: int) -> None:
    if info.shape != (rows, cols):
        raise TensorShapeWrong(
            f"{info.path}: tensor {info.name!r} has shape {list(info.shape)}, but the configuration"
            f" implies {[rows, cols]}; the configuration and the weights do not belong together"
        )


def _unreadable(info: TensorInfo, cols: int) -> TensorShapeWrong:
    return TensorShapeWrong(
        f"tensor {info.name!r} is {info.format.name} {list(info.shape)}; an n-gram table of"
        f" {cols} values a row cannot be read from it"
    )
