"""The kernels of products with packed weights: a tile of outputs for a tile of rows.

They compute y^T = W x^T, so that the decoded weights are the operand held in registers (tiles.py); how
a product is cut and launched: triton.py.

Legend: M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from civetta.kernels.matmul.tiles import weight_tile


@triton.jit
def _head(w, TYPE: tl.constexpr):
    """float32 numbers of TYPE's precision; what they leave of w is exact."""
    if tl.bfloat16 == TYPE:
        head = (w.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    else:
        head = w.to(TYPE).to(tl.float32)
    return head


@triton.jit
def _add_product(w, x_t, acc, PRECISE: tl.constexpr, WIDE: tl.constexpr):
    """acc + w x^T. PRECISE names the precision of float32 operands, "" for those of x's dtype; WIDE:
    a float32 w in three parts of x's dtype, which add up to it."""
    if PRECISE != "":
        acc = tl.dot(w.to(tl.float32), x_t.to(tl.float32), acc, input_precision=PRECISE)
    elif WIDE:
        first = _head(w, x_t.dtype)
        rest = w - first
        second = _head(rest, x_t.dtype)
        acc = tl.dot((rest - second).to(x_t.dtype), x_t, acc)
        acc = tl.dot(second.to(x_t.dtype), x_t, acc)
        acc = tl.dot(first.to(x_t.dtype), x_t, acc)
    else:
        acc = tl.dot(w.to(x_t.dtype), x_t, acc)
    return acc


@triton.jit
def part_sum(
    x, i_x, codes, high, scale, minimum, d, dmin, table, tile, k_start, k_stop, left, ok_m,
    K: tl.constexpr, NT: tl.constexpr, BM: tl.constexpr, KP: tl.constexpr, BITS: tl.constexpr,
    CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    SPAN: tl.constexpr, LOW: tl.constexpr, PRECISE: tl.constexpr, WIDE: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Sum over columns [k_start, k_stop) of W x^T: float32 [64 NT, BM].

    Row tiles are those from `tile` (int64) on, of which `left` exist; k_start is a multiple of 64 S.
    """
    acc = tl.zeros((64 * NT, BM), dtype=tl.float32)
    for k in range(k_start, k_stop, 64 * S):
        cols = k + tl.arange(0, 64 * S)
        w = weight_tile(codes, high, scale, minimum, d, dmin, table, tile, k, left, S, NT, KP,
                        BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW)  # fmt: skip
        mask = ok_m[None, :]
        if K % (64 * S) != 0:
            mask = mask & (cols < K)[:, None]
        x_t = tl.load(x + i_x[None, :] + cols[:, None], mask=mask, other=0.0)
        acc = _add_product(w, x_t, acc, PRECISE, WIDE)
    return acc


@triton.jit
def _finished(total, divisor, ACT: tl.constexpr):
    if ACT == "squeeze":
        total = total / divisor
        total = total * (1.0 / (1.0 + tl.exp(tl.minimum(-total, 80.0))))
    return total


@triton.jit
def one_product(
    i_n, i_m, part, across,
    x, y, parts, counters, codes, high, scale, minimum, d, dmin, table,
    slot, tile_expert, tile_row, end,
    M, N, x_stride, y_stride, x_divisor, act_divisor, K: tl.constexpr, TILES: tl.constexpr,
    NT: tl.constexpr, BM: tl.constexpr, KP: tl.constexpr, BITS: tl.constexpr,
    CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    SPAN: tl.constexpr, LOW: tl.constexpr, PRECISE: tl.constexpr, WIDE: tl.constexpr,
    S: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr, LAST: tl.constexpr,
    GROUPED: tl.constexpr, PAIR: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """One program's share of a product: see product_kernel. `across`: tiles of outputs beside i_n."""
    first = i_n * NT
    left = TILES - first
    if GROUPED == "sorted":
        expert = tl.load(tile_expert + i_m)
        place = tl.load(tile_row + i_m) + tl.arange(0, BM)
        ok_m = place < tl.load(end + expert)
        m = tl.load(slot + place, mask=ok_m, other=0)
        tile = expert.to(tl.int64) * TILES + first
    elif GROUPED == "direct":
        expert = tl.load(slot + i_m)
        m = i_m + tl.arange(0, BM)
        ok_m = m < i_m + 1
        tile = expert.to(tl.int64) * TILES + first
    else:
        m = i_m * BM + tl.arange(0, BM)
        ok_m = m < M
        tile = first.to(tl.int64)
    i_x = (m // x_divisor).to(tl.int64) * x_stride
    if SPLIT:
        k_start = part * PART
        total = part_sum(
            x, i_x, codes, high, scale, minimum, d, dmin, table, tile,
            k_start, min(k_start + PART, K), left, ok_m,
            K, NT, BM, KP, BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW, PRECISE, WIDE, S,
        )  # fmt: skip
        lane = tl.arange(0, 64 * NT)
        mask = (lane < left * 64)[:, None] & ok_m[None, :]
        at = m.to(tl.int64)[None, :] * (TILES * 64) + (first * 64 + lane)[:, None]
        tl.store(parts + part.to(tl.int64) * M * (TILES * 64) + at, total, mask=mask)
        tl.debug_barrier()
        counter = i_m * across + i_n
        done = tl.atomic_add(counters + counter, 1)
        PARTS: tl.constexpr = (K + PART - 1) // PART
        if done == PARTS - 1:
            tl.store(counters + counter, 0)
            last_m = i_m * BM + tl.arange(0, LAST)
            last_ok = last_m < M
            there = (lane < left * 64)[:, None] & last_ok[None, :]
            last_at = last_m.to(tl.int64)[None, :] * (TILES * 64) + (first * 64 + lane)[:, None]
            added = tl.zeros((64 * NT, LAST), dtype=tl.float32)
            for i in tl.static_range(PARTS):
                p_part = parts + i * (M * (TILES * 64)) + last_at
                added += tl.load(p_part, mask=there, other=0.0, cache_modifier=".cg")
            _written(
                y, added, last_m, last_ok, first, N, y_stride, act_divisor, NT, LAST, PAIR, ACT
            )
    else:
        if PART >= K:
            total = part_sum(
                x, i_x, codes, high, scale, minimum, d, dmin, table, tile, 0, K, left, ok_m,
                K, NT, BM, KP, BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW, PRECISE, WIDE, S,
            )  # fmt: skip
        else:
            total = tl.zeros((64 * NT, BM), dtype=tl.float32)
            for k_start in range(0, K, PART):
                total += part_sum(
                    x, i_x, codes, high, scale, minimum, d, dmin, table, tile,
                    k_start, min(k_start + PART, K), left, ok_m,
                    K, NT, BM, KP, BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW, PRECISE, WIDE, S,
                )  # fmt: skip
        _written(y, total, m, ok_m, first, N, y_stride, act_divisor, NT, BM, PAIR, ACT)


@triton.jit
def _written(y, total, m, ok_m, first, N, y_stride, act_divisor, NT: tl.constexpr,
             BM: tl.constexpr, PAIR: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """Sums [64 NT, BM] of rows m as outputs; gate and up rows first become one."""
    OUT: tl.constexpr = 32 if PAIR else 64
    if PAIR:
        halves = tl.permute(tl.reshape(total, (4 * NT, 2, 8, BM)), (0, 2, 3, 1))
        gate, up = tl.split(halves)
        total = gate * (1.0 / (1.0 + tl.exp(tl.minimum(-gate, 80.0)))) * up
        total = tl.reshape(total, (OUT * NT, BM))
    n = first * OUT + tl.arange(0, OUT * NT)
    total = _finished(total, act_divisor, ACT)
    p_y = y + m.to(tl.int64)[None, :] * y_stride + n[:, None]
    tl.store(p_y, total.to(y.dtype.element_ty), mask=(n < N)[:, None] & ok_m[None, :])


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x, y, parts, counters, codes, high, scale, minimum, d, dmin, table,
    slot, tile_expert, tile_row, end,
    M, N, x_stride, y_stride, x_divisor, act_divisor, K: tl.constexpr, TILES: tl.constexpr,
    NT: tl.constexpr, BM: tl.constexpr, KP: tl.constexpr, BITS: tl.constexpr,
    CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    SPAN: tl.constexpr, LOW: tl.constexpr, PRECISE: tl.constexpr, WIDE: tl.constexpr,
    S: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr, LAST: tl.constexpr,
    GROUPED: tl.constexpr, PAIR: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """NT tiles of outputs, of TILES, for one tile of rows; with SPLIT, of one part of K: the last
    program to finish adds the parts of the tile's LAST rows, which are all there are.

    GROUPED "sorted": rows of one expert a tile; "direct": tile i is row i with expert slot[i].
    PAIR: gate and up rows in runs of 8; y [M, N] is silu(gate) * up.
    """
    if GROUPED == "sorted":
        expert = tl.load(tile_expert + tl.program_id(1))
        if expert < 0:
            return
    one_product(
        tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(0),
        x, y, parts, counters, codes, high, scale, minimum, d, dmin, table,
        slot, tile_expert, tile_row, end, M, N, x_stride, y_stride, x_divisor, act_divisor,
        K, TILES, NT, BM, KP, BITS, CODE, OFFSET, GROUP, SCALE, SPAN, LOW, PRECISE, WIDE, S, PART,
        SPLIT, LAST, GROUPED, PAIR, ACT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["a_programs", "a_down", "a_M", "b_down", "b_M"])
def two_products_kernel(
    a_programs, a_across, a_down, b_across, b_down,
    a_x, a_y, a_parts, a_counters, a_codes, a_high, a_scale, a_minimum, a_d, a_dmin, a_table,
    a_slot, a_tile_expert, a_tile_row, a_end, a_M, a_N, a_x_stride, a_y_stride, a_x_divisor,
    a_act_divisor, b_x, b_y, b_parts, b_counters, b_codes, b_high, b_scale, b_minimum, b_d, b_dmin,
    b_table, b_slot, b_tile_expert, b_tile_row, b_end, b_M, b_N, b_x_stride, b_y_stride,
    b_x_divisor, b_act_divisor,
    A_K: tl.constexpr, A_TILES: tl.constexpr, A_NT: tl.constexpr, A_BM: tl.constexpr,
    A_KP: tl.constexpr, A_BITS: tl.constexpr, A_CODE: tl.constexpr, A_OFFSET: tl.constexpr,
    A_GROUP: tl.constexpr, A_SCALE: tl.constexpr, A_SPAN: tl.constexpr, A_LOW: tl.constexpr,
    A_PRECISE: tl.constexpr, A_WIDE: tl.constexpr, A_S: tl.constexpr, A_PART: tl.constexpr,
    A_SPLIT: tl.constexpr, A_LAST: tl.constexpr, A_GROUPED: tl.constexpr, A_PAIR: tl.constexpr,
    A_ACT: tl.constexpr, B_K: tl.constexpr, B_TILES: tl.constexpr, B_NT: tl.constexpr,
    B_BM: tl.constexpr, B_KP: tl.constexpr, B_BITS: tl.constexpr, B_CODE: tl.constexpr,
    B_OFFSET: tl.constexpr, B_GROUP: tl.constexpr, B_SCALE: tl.constexpr, B_SPAN: tl.constexpr,
    B_LOW: tl.constexpr, B_PRECISE: tl.constexpr, B_WIDE: tl.constexpr, B_S: tl.constexpr,
    B_PART: tl.constexpr, B_SPLIT: tl.constexpr, B_LAST: tl.constexpr, B_GROUPED: tl.constexpr,
    B_PAIR: tl.constexpr, B_ACT: tl.constexpr,
):  # fmt: skip
    """Two products beside each other: the first a_programs programs are the first's. Of each,
    `across` tiles of outputs, `down` tiles of rows, then parts; the rest as in product_kernel."""
    i = tl.program_id(0)
    if i < a_programs:
        one_product(
            i % a_across, i // a_across % a_down, i // (a_across * a_down), a_across,
            a_x, a_y, a_parts, a_counters, a_codes, a_high, a_scale, a_minimum, a_d, a_dmin,
            a_table, a_slot, a_tile_expert, a_tile_row, a_end, a_M, a_N, a_x_stride, a_y_stride,
            a_x_divisor, a_act_divisor, A_K, A_TILES, A_NT, A_BM, A_KP, A_BITS, A_CODE, A_OFFSET,
            A_GROUP, A_SCALE, A_SPAN, A_LOW, A_PRECISE, A_WIDE, A_S, A_PART, A_SPLIT, A_LAST,
            A_GROUPED, A_PAIR, A_ACT,
        )  # fmt: skip
    else:
        i -= a_programs
        one_product(
            i % b_across, i // b_across % b_down, i // (b_across * b_down), b_across,
            b_x, b_y, b_parts, b_counters, b_codes, b_high, b_scale, b_minimum, b_d, b_dmin,
            b_table, b_slot, b_tile_expert, b_tile_row, b_end, b_M, b_N, b_x_stride, b_y_stride,
            b_x_divisor, b_act_divisor, B_K, B_TILES, B_NT, B_BM, B_KP, B_BITS, B_CODE, B_OFFSET,
            B_GROUP, B_SCALE, B_SPAN, B_LOW, B_PRECISE, B_WIDE, B_S, B_PART, B_SPLIT, B_LAST,
            B_GROUPED, B_PAIR, B_ACT,
        )  # fmt: skip
