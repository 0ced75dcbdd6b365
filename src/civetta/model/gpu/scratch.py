"""What a launch needs beside weights, pages and state: its largest phase, from the config's sizes.

Every phase of a layer (model/gpu/layers.py) frees what it used; the streams lie through all of them.
A test holds these sums against the tensors that the launches make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from civetta.kernels.fused.sieve import ROOM
from civetta.kernels.ops import GDN_CHUNK
from civetta.kernels.qsa.triton import SCRATCH_VALUES

if TYPE_CHECKING:
    import torch

    from civetta.model.config import ModelConfig

SMALL_BYTES = 32 << 20
"""Tables, sorted slots, chunks that a launch only begins, and other tensors of little size."""


def launch_bytes(config: ModelConfig, rows: int, context_tokens: int, dtype: torch.dtype) -> int:
    """Most bytes that a launch of `rows` rows allocates, with sequences of up to `context_tokens`.

    Of the logits those of 64 rows are counted, the most that a prompt's scores are read at once.
    """
    c, item = config, dtype.itemsize
    streams = 4 * c.wide + 4 * c.rope_dims + (0 if c.ple is None else c.ple.embed * item)
    written = 4 * c.hidden
    entered = written + (c.wide + c.hidden + 2 * c.stream_rank) * item
    attended, h = _attention(c, item), c.hidden * item
    phases = (
        rows * entered + 4 * c.vocab * min(rows, 64),
        rows * (h + _gdn(c, item)),
        rows * (h + attended + c.heads * c.head_dim * item),
        rows * (h + attended) + _choice_bytes(config, rows, context_tokens),
        rows * (h + _experts(c, item)),
        0 if c.ple is None else rows * (written + 4 * (c.wide + c.hidden) + 8 * c.wide),
    )
    return rows * streams + max(phases) + SMALL_BYTES


def _gdn(c: ModelConfig, item: int) -> int:
    """Bytes a row: projections and gates, the mixed rows, then float32 factors of the chunks."""
    values = c.gdn_value_heads * c.gdn_head_dim
    entered = (c.gdn_channels + values) * item + 8 * c.gdn_value_heads
    mixed = c.gdn_channels * item + 8 * c.gdn_value_heads
    chunks = 8 * values + 4 * c.gdn_value_heads * (GDN_CHUNK + 1)
    return entered + mixed + values * item + max(chunks, values * item)


def _attention(c: ModelConfig, item: int) -> int:
    """Bytes a row before the keys are read: projections, queries, index queries, chosen blocks."""
    queries = c.heads * c.head_dim
    projected = 2 * (queries + c.kv_heads * c.head_dim) + (2 * c.index_heads + 1) * c.index_dim
    return (projected + queries) * item + 4 * (c.index_budget // c.index_ratio)


def _choice_bytes(c: ModelConfig, rows: int, context_tokens: int) -> int:
    """Scores of all blocks for as many rows as have room, and what the sieve leaves of them."""
    most = (1 << (context_tokens - 1).bit_length()) // c.index_ratio
    at_once = min(max(1, SCRATCH_VALUES // most), rows)
    return at_once * (4 * most + 8 * ROOM * (c.index_budget // c.index_ratio))


def _experts(c: ModelConfig, item: int) -> int:
    """Bytes a row: router, every slot's hidden and outputs, the shared expert's, their sum."""
    slots, router = c.experts_a_token, 4 * (c.experts + 1)
    hidden = item * (slots * c.expert_width + c.shared_width)
    return router + hidden + 4 * c.hidden * (slots + 2) + 24 * slots
