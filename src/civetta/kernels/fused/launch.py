"""`Batch`: what the fused kernels know of a launch, as numbers in device memory.

A launch packs rows (tokens) of several sequences one after another. Everything that changes from
step to step lies in two int64 tables, so that a captured graph of the kernels serves every step of
the same size. Kernels read a session's state, page table and rope positions through addresses.

Legend: T rows, B sessions of a launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

ROW_FIELDS = ("position", "session", "rope_t", "rope_h", "rope_w", "token")
"""One column a row; session is -1 for a row that only fills the launch up."""

SESSION_FIELDS = (
    "first_row",
    "rows",
    "first",  # position of the first row
    "base",  # where the delta state stands before the launch
    "new_base",  # and after it
    "state",  # address of the recurrent state
    "table",  # address of the page numbers, int64
    "rope",  # address of the rope positions, int64 [3, rope_stride]
    "rope_stride",
)

POSITION = tl.constexpr(ROW_FIELDS.index("position"))
SESSION = tl.constexpr(ROW_FIELDS.index("session"))
ROPE = tl.constexpr(ROW_FIELDS.index("rope_t"))
FIRST_ROW = tl.constexpr(SESSION_FIELDS.index("first_row"))
ROWS = tl.constexpr(SESSION_FIELDS.index("rows"))
FIRST = tl.constexpr(SESSION_FIELDS.index("first"))
BASE = tl.constexpr(SESSION_FIELDS.index("base"))
NEW_BASE = tl.constexpr(SESSION_FIELDS.index("new_base"))
STATE = tl.constexpr(SESSION_FIELDS.index("state"))
TABLE = tl.constexpr(SESSION_FIELDS.index("table"))
ROPE_AT = tl.constexpr(SESSION_FIELDS.index("rope"))
ROPE_STRIDE = tl.constexpr(SESSION_FIELDS.index("rope_stride"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The tables, and bounds that decide grids.

    rows_FT, sessions_FB: int64, fields as above. most_rows: rows of the longest piece.
    in_place: no piece has more than REWIND_ROWS rows, so new rows may be written into the state
    while others read it. table_tokens: no sequence is longer after the launch.
    counts: zeros for products that run in parts.
    """

    rows_FT: Tensor
    sessions_FB: Tensor
    rows: int
    sessions: int
    most_rows: int
    in_place: bool
    table_tokens: int
    counts: Tensor


@triton.jit(do_not_specialize=["T", "B"])
def angle_kernel(rows, sessions, inverse, axis, cos, sin, T, B, R: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """cos and sin [T, R] of a row's rope position, which is also noted in its sequence."""
    t = tl.program_id(0)
    b = tl.load(rows + SESSION * T + t)
    i = tl.arange(0, BLOCK)
    ok = i < R
    which = tl.load(axis + i, mask=ok, other=0)
    place = tl.load(rows + (ROPE + which) * T + t, mask=ok, other=0)
    angle = place.to(tl.float32) * tl.load(inverse + i, mask=ok, other=0.0)
    tl.store(cos + t * R + i, tl.cos(angle), mask=ok)
    tl.store(sin + t * R + i, tl.sin(angle), mask=ok)
    if b >= 0:
        at = tl.load(sessions + ROPE_AT * B + b).to(tl.pointer_type(tl.int64))
        stride = tl.load(sessions + ROPE_STRIDE * B + b)
        position = tl.load(rows + POSITION * T + t)
        lane = tl.arange(0, 4)
        own = tl.load(rows + (ROPE + lane) * T + t, mask=lane < 3, other=0)
        tl.store(at + lane * stride + position, own, mask=lane < 3)


def angles(batch: Batch, inverse_R: Tensor, axis_R: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> None:
    """Fill cos and sin float32 [T, R] for every row; see `angle_kernel`."""
    half = inverse_R.numel()
    angle_kernel[(batch.rows,)](
        batch.rows_FT, batch.sessions_FB, inverse_R, axis_R, cos_TR, sin_TR, batch.rows,
        batch.sessions, R=half, BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
