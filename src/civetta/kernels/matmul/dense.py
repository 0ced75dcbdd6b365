"""Products of many rows with a weight that is decoded once, not once for every tile of rows.

`unpack` writes a packed weight as numbers of the rows' dtype, [N, K]; `dense` multiplies by them, both
operands staged in shared memory. Bits are those of product_kernel: the decoder is the same, a dot adds
along K in one order, and parts of the inner dimension have the same length and are added in order.

Legend: M rows of x, N outputs (of a pair: gate and up rows), K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.matmul.tiles import weight_tile
from civetta.kernels.matmul.tiling import part_cols, recipe_on, shared_bytes
from civetta.kernels.packed import TILE

if TYPE_CHECKING:
    from torch import Tensor

    from civetta.kernels.packed import PackedWeight

LEAST_ROWS = 1024
"""From so many rows on a weight is worth writing out."""

MOST_BYTES = 1 << 27
"""Of a weight written out; a larger one (a head's) stays packed."""

ROWS, OUTPUTS, INPUTS = 128, 128, 64
"""A program's tile, and the inputs of a step."""

STAGED_BYTES = 140_000
"""Shared memory that four steps loaded ahead take."""

BESIDE = 8
"""Tiles of rows that run beside each other over the same outputs, so that both stay in the cache."""


def pays(w: PackedWeight, rows: int, dtype: torch.dtype) -> bool:
    """Whether `dense` takes this product: operands of 16 bits, many rows, one matrix, not too large."""
    if rows < LEAST_ROWS or dtype.itemsize != 2 or w.experts > 1:
        return False
    return w.tiles * TILE * w.cols * dtype.itemsize <= MOST_BYTES


@triton.jit
def unpack_kernel(
    y, codes, high, scale, minimum, d, dmin, table, K: tl.constexpr, KP: tl.constexpr,
    BITS: tl.constexpr, CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, SPAN: tl.constexpr, LOW: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """One tile of 64 outputs and 64 S inputs."""
    tile, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * 64 * S
    w = weight_tile(codes, high, scale, minimum, d, dmin, table, tile, k, 1, S, 1, KP, BITS, CODE,
                    OFFSET, GROUP, SCALE, SPAN, LOW)  # fmt: skip
    n, c = tile * 64 + tl.arange(0, 64), k + tl.arange(0, 64 * S)
    tl.store(y + n[:, None] * K + c[None, :], w.to(y.dtype.element_ty), mask=(c < K)[None, :])


@triton.jit
def _part(x, w, i_x, i_w, ok_m, ok_n, low, high, BM: tl.constexpr, BN: tl.constexpr,
          BK: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Sum over columns [low, high): float32 [BM, BN]."""
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(low, high, BK):
        c = k + tl.arange(0, BK)
        ok_x, ok_w = ok_m[:, None], ok_n[None, :]
        if K % BK != 0:
            ok_x, ok_w = ok_x & (c < K)[None, :], ok_w & (c < K)[:, None]
        b_x = tl.load(x + i_x[:, None] + c[None, :], mask=ok_x, other=0.0)
        b_w = tl.load(w + i_w[None, :] + c[:, None], mask=ok_w, other=0.0)
        acc = tl.dot(b_x, b_w, acc)
    return acc


@triton.jit(do_not_specialize=["M"])
def dense_kernel(
    x, w, y, M, N, x_stride, y_stride, act_divisor, K: tl.constexpr, PART: tl.constexpr,
    TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BESIDE: tl.constexpr, PAIR: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """BM rows by BN outputs of a weight [64 TILES, K]; y [M, N]. PAIR, ACT: see product_kernel."""
    i, across, down = tl.program_id(0), tl.cdiv(TILES * 64, BN), tl.cdiv(M, BM)
    band = i // (BESIDE * across)
    tall = tl.minimum(down - band * BESIDE, BESIDE)
    inside = i % (BESIDE * across)
    first = (inside // tall) * BN
    m, n = (band * BESIDE + inside % tall) * BM + tl.arange(0, BM), first + tl.arange(0, BN)
    ok_m, ok_n = m < M, n < TILES * 64
    i_x, i_w = m.to(tl.int64) * x_stride, n.to(tl.int64) * K
    if PART >= K:
        total = _part(x, w, i_x, i_w, ok_m, ok_n, 0, K, BM, BN, BK, K)
    else:
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for low in range(0, K, PART):
            total += _part(x, w, i_x, i_w, ok_m, ok_n, low, min(low + PART, K), BM, BN, BK, K)
    OUT: tl.constexpr = BN // 2 if PAIR else BN
    if PAIR:
        halves = tl.permute(tl.reshape(total, (BM, BN // 16, 2, 8)), (0, 1, 3, 2))
        gate, up = tl.split(halves)
        total = gate * (1.0 / (1.0 + tl.exp(tl.minimum(-gate, 80.0)))) * up
        total = tl.reshape(total, (BM, OUT))
    if ACT == "squeeze":
        total = total / act_divisor
        total = total * (1.0 / (1.0 + tl.exp(tl.minimum(-total, 80.0))))
    o = first // (BN // OUT) + tl.arange(0, OUT)
    p_y = y + m.to(tl.int64)[:, None] * y_stride + o[None, :]
    tl.store(p_y, total.to(y.dtype.element_ty), mask=ok_m[:, None] & (o < N)[None, :])


def unpack(w: PackedWeight, planes: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """One matrix as numbers of `dtype` [64 tiles, K]: the values that a product rounds to.

    planes: those of `w` as the kernels take them.
    """
    r, device = recipe_on(w.recipe, w.codes.device), w.codes.device
    y = torch.empty((w.tiles * TILE, w.cols), dtype=dtype, device=device)
    unpack_kernel[(w.tiles, -(-w.cols // (2 * TILE)))](
        y, *planes, K=w.cols, KP=w.padded_cols, BITS=r.bits, CODE=r.code, OFFSET=r.offset,
        GROUP=r.group, SCALE=r.scale, SPAN=r.span, LOW=r.low, S=2, num_warps=4,
    )  # fmt: skip
    return y


def dense(
    x_MK: Tensor,
    w: PackedWeight,
    planes: tuple[Tensor, ...],
    y_MN: Tensor,
    act: str,
    divisor: float,
) -> None:
    """Write x w^T into y, whose rows may be strided; see `product`."""
    rows, numbers = y_MN.shape[0], unpack(w, planes, x_MK.dtype)
    stages = 4 if shared_bytes(y_MN.device) > STAGED_BYTES else 2
    dense_kernel[(-(-rows // ROWS) * -(-len(numbers) // OUTPUTS),)](
        x_MK, numbers, y_MN, rows, w.rows // 2 if w.pair else w.rows, x_MK.stride(0),
        y_MN.stride(0), divisor, K=w.cols, PART=part_cols(w), TILES=w.tiles, BM=ROWS, BN=OUTPUTS,
        BK=INPUTS, BESIDE=BESIDE, PAIR=w.pair, ACT=act, num_warps=8, num_stages=stages,
    )  # fmt: skip
