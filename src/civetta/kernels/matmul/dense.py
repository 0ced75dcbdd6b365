"""Products of many rows with a weight that is decoded once, not once for every tile of rows.

`unpack` writes a packed weight as numbers of the rows' dtype, [N, K]; `dense` multiplies by them, both
operands staged in shared memory. Bits are those of product_kernel: the decoder is the same, a dot adds
along K in one order, and parts of the inner dimension have the same length and are added in order.

Legend: M rows of x, N outputs (of a pair: gate and up rows), K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from civetta.kernels.matmul.tiles import weight_tile
from civetta.kernels.matmul.tiling import part_cols, recipe_on, shared_bytes
from civetta.kernels.packed import TILE

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older Triton
    TensorDescriptor = None

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

DESCRIBED_BYTES = 200_000
"""Shared memory that four steps loaded ahead by descriptors take, 256 outputs a tile."""

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


@triton.jit
def _corner(M, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BESIDE: tl.constexpr):
    """First row and first output of this program's tile."""
    i, across, down = tl.program_id(0), tl.cdiv(TILES * 64, BN), tl.cdiv(M, BM)
    band = i // (BESIDE * across)
    tall = tl.minimum(down - band * BESIDE, BESIDE)
    inside = i % (BESIDE * across)
    return (band * BESIDE + inside % tall) * BM, (inside // tall) * BN


@triton.jit
def _finish(total, y, m, first, M, N, y_stride, act_divisor, BM: tl.constexpr, BN: tl.constexpr,
            PAIR: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """What becomes of sums [BM, BN] of rows m and outputs from `first` on, into y."""
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
    tl.store(p_y, total.to(y.dtype.element_ty), mask=(m < M)[:, None] & (o < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def dense_kernel(
    x, w, y, M, N, x_stride, y_stride, act_divisor, K: tl.constexpr, PART: tl.constexpr,
    TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BESIDE: tl.constexpr, PAIR: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """BM rows by BN outputs of a weight [64 TILES, K]; y [M, N]. PAIR, ACT: see product_kernel."""
    top, first = _corner(M, TILES, BM, BN, BESIDE)
    m, n = top + tl.arange(0, BM), first + tl.arange(0, BN)
    ok_m, ok_n = m < M, n < TILES * 64
    i_x, i_w = m.to(tl.int64) * x_stride, n.to(tl.int64) * K
    if PART >= K:
        total = _part(x, w, i_x, i_w, ok_m, ok_n, 0, K, BM, BN, BK, K)
    else:
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for low in range(0, K, PART):
            total += _part(x, w, i_x, i_w, ok_m, ok_n, low, min(low + PART, K), BM, BN, BK, K)
    _finish(total, y, m, first, M, N, y_stride, act_divisor, BM, BN, PAIR, ACT)


@triton.jit(do_not_specialize=["M"])
def described_kernel(
    x, w, y, M, N, y_stride, act_divisor, K: tl.constexpr, PART: tl.constexpr,
    TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BESIDE: tl.constexpr, PAIR: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """As dense_kernel, with x [M, K] and w as tensor descriptors of [BM, BK] and [BN, BK].

    What lies beyond their shapes is zero. A part ends inside the one loop, so that loads stay ahead
    of the products from a part to the next; PART is a multiple of BK.
    """
    top, first = _corner(M, TILES, BM, BN, BESIDE)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    if PART >= K:
        for k in range(0, K, BK):
            total = tl.dot(x.load([top, k]), w.load([first, k]).T, total)
    else:
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(x.load([top, k]), w.load([first, k]).T, acc)
            if (k + BK) % PART == 0:
                total += acc
                acc = tl.zeros((BM, BN), dtype=tl.float32)
        if K % PART != 0:
            total += acc
    m = top + tl.arange(0, BM)
    _finish(total, y, m, first, M, N, y_stride, act_divisor, BM, BN, PAIR, ACT)


def unpack(w: PackedWeight, planes: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """One matrix as numbers of `dtype` [64 tiles, K]: the values that a product rounds to.

    planes: those of `w` as the kernels take them.
    """
    r, device = recipe_on(w.recipe, w.codes.device, dtype), w.codes.device
    y = torch.empty((w.tiles * TILE, w.cols), dtype=dtype, device=device)
    unpack_kernel[(w.tiles, -(-w.cols // (2 * TILE)))](
        y, *planes, K=w.cols, KP=w.padded_cols, BITS=r.bits, CODE=r.code, OFFSET=r.offset,
        GROUP=r.group, SCALE=r.scale, SPAN=r.span, LOW=r.low, S=2, num_warps=4,
    )  # fmt: skip
    return y


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTile:
    """Rows, outputs and inputs of a step of a program; warps, and steps loaded ahead."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


WIDE = DenseTile(rows=128, outputs=256, inputs=64, warps=8, stages=4)
"""Of a weight that is not cut: its sums take every other register."""

CUT = DenseTile(rows=128, outputs=128, inputs=64, warps=8, stages=5)
"""Of a weight in parts, which has two sums a thread, and of one too narrow for WIDE."""

WIDE_OUTPUTS = 8 * 256
"""Outputs from which on tiles of 256 leave none of the multiprocessors without work."""


def described_tile(w: PackedWeight) -> DenseTile:
    """The fastest of those tried (docs/measurements/h200.md)."""
    whole = part_cols(w) >= w.cols
    return WIDE if whole and w.tiles * TILE >= WIDE_OUTPUTS else CUT


def describes(x_MK: Tensor, numbers_NK: Tensor) -> bool:
    """Whether both operands may be tensor descriptors, and the device has what loads by them.

    That is NVIDIA's from compute capability 9.0 on, with room for the steps ahead (12.0 has none).
    Rows and the first number lie at multiples of 16 bytes, a row's numbers beside each other.
    """
    if not has_descriptors(x_MK.device):
        return False
    return all(
        t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0
        for t in (x_MK, numbers_NK)
    )


@cache
def has_descriptors(device: torch.device) -> bool:
    """Whether the device loads tiles by tensor descriptors and this Triton takes them."""
    if device.type != "cuda" or torch.version.hip is not None or TensorDescriptor is None:
        return False
    return (
        torch.cuda.get_device_capability(device) >= (9, 0)
        and shared_bytes(device) > DESCRIBED_BYTES
    )


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
    outputs = w.rows // 2 if w.pair else w.rows
    if describes(x_MK, numbers):
        tile = described_tile(w)
        described_kernel[(-(-rows // tile.rows) * -(-len(numbers) // tile.outputs),)](
            TensorDescriptor.from_tensor(x_MK, [tile.rows, tile.inputs]),
            TensorDescriptor.from_tensor(numbers, [tile.outputs, tile.inputs]),
            y_MN, rows, outputs, y_MN.stride(0), divisor, K=w.cols, PART=part_cols(w),
            TILES=w.tiles, BM=tile.rows, BN=tile.outputs, BK=tile.inputs, BESIDE=BESIDE,
            PAIR=w.pair, ACT=act, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return
    stages = 4 if shared_bytes(y_MN.device) > STAGED_BYTES else 2
    dense_kernel[(-(-rows // ROWS) * -(-len(numbers) // OUTPUTS),)](
        x_MK, numbers, y_MN, rows, outputs, x_MK.stride(0), y_MN.stride(0), divisor, K=w.cols,
        PART=part_cols(w), TILES=w.tiles, BM=ROWS, BN=OUTPUTS, BK=INPUTS, BESIDE=BESIDE,
        PAIR=w.pair, ACT=act, num_warps=8, num_stages=stages,
    )  # fmt: skip
