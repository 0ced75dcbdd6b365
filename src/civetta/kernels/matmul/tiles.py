"""A tile of packed weights as float32 values, on the device: what tile_order.py laid out.

Legend: NT row tiles of 64 outputs, S column tiles of 64 inputs, P = 128 NT places, KP columns that the
planes hold. Loads are flat, so that a thread reads its own 16 bytes; the scales meet the codes while
these are still words, and only `arranged` names outputs and inputs. On NVIDIA's wide matrix
instructions the result is a register operand as it stands: no shared memory, no shuffle.

Codes turn into floats by being placed in a float's mantissa: 2^23 + code is exact, and so is the
subtraction after it. All rounding is in the one multiplication with the step, or one fma with the low.
"""

from __future__ import annotations

import triton
import triton.language as tl

from civetta.kernels.matmul.halves import byte_pairs, k_steps, nibble_pairs, raised_codes, twice


@triton.jit
def _units(p, tile, k, left, S: tl.constexpr, NT: tl.constexpr, COLS: tl.constexpr,
           ELEMS: tl.constexpr, KP: tl.constexpr):  # fmt: skip
    """Plane [.., KP / COLS, 128 * ELEMS] at column k: [S * 64 / COLS, P, ELEMS]."""
    SIZE: tl.constexpr = 128 * ELEMS
    N: tl.constexpr = S * 64 // COLS
    U: tl.constexpr = KP // COLS
    i = tl.arange(0, N * NT * SIZE)
    t = (i // SIZE) % NT
    u = k // COLS + i // (SIZE * NT)
    at = p + tile * (U * SIZE) + t * (U * SIZE) + u * SIZE + i % SIZE
    if NT > 1:
        b = tl.load(at, mask=(u < U) & (t < left), other=0)
    elif KP % (64 * S) != 0:
        b = tl.load(at, mask=u < U, other=0)
    else:
        b = tl.load(at)
    return tl.reshape(b, (N, NT * 128, ELEMS))


@triton.jit
def _steps(p, tile, k, left, S: tl.constexpr, NT: tl.constexpr, W: tl.constexpr,
           KP: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr):  # fmt: skip
    """Words of W columns each (0: all), 32 of WIDTH from FIRST on: [S or 1, P, 2 or 1, 1].

    The third dimension counts halves of a tile when W is 32.
    """
    U: tl.constexpr = 1 if W == 0 else (KP + W - 1) // W
    ONE: tl.constexpr = W == 0 or W >= 64 * S
    N: tl.constexpr = 1 if ONE else S * 64 // W
    i = tl.arange(0, N * NT * 128)
    t = (i // 128) % NT
    u = i // (128 * NT)
    if W > 0:
        u += k // W
    at = p + tile * (U * WIDTH) + t * (U * WIDTH) + u * WIDTH + FIRST + (i % 128) // 4
    if NT > 1:
        b = tl.load(at, mask=(u < U) & (t < left), other=0)
    elif KP % (64 * S) != 0:
        b = tl.load(at, mask=u < U, other=0)
    else:
        b = tl.load(at)
    if W == 32:
        b = tl.permute(tl.reshape(b, (S, 2, NT * 128)), (0, 2, 1))
        return tl.reshape(b, (S, NT * 128, 2, 1))
    elif W == 64 or ONE:
        return tl.reshape(b, (N, NT * 128, 1, 1))
    else:
        b = tl.broadcast_to(tl.reshape(b, (N, 1, NT * 128)), (N, S // N, NT * 128))
        return tl.reshape(b, (S, NT * 128, 1, 1))


@triton.jit
def _half(x):
    """The float16 in a word's low half."""
    return x.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _placed(bits, AT: tl.constexpr, LESS: tl.constexpr):
    """The number whose bits begin at bit AT (at most 16) of words that are 0 elsewhere, minus LESS."""
    BASE: tl.constexpr = 0x4B000000 - (AT << 23)
    WHOLE: tl.constexpr = float(1 << (23 - AT))
    return (bits | BASE).to(tl.float32, bitcast=True) - (WHOLE + LESS)


@triton.jit
def _e4m3(x):
    """The E4M3 number in the low byte of words, by integers and one exact product: any of the 256.

    Exponent and mantissa lie where a float32 has its own, 120 powers of two too low; so a subnormal
    byte is a subnormal float32, which the product makes a normal one.
    """
    b = ((x & 127) << 20) | ((x & 128) << 24)
    value = b.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((x & 127) == 127, float("nan"), value)


@triton.jit
def _byte(x, I: tl.constexpr, KIND: tl.constexpr):
    """Byte I of words as a number: "uint8", "int8", "excess" (128 above it), "fp8", or "fp8 bits"
    for a card that does not convert these itself."""
    if KIND == "fp8":
        return ((x >> (8 * I)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND == "fp8 bits":
        return _e4m3(x >> (8 * I))
    else:
        AT: tl.constexpr = 8 * (I % 2)
        b = x
        if I >= 2:
            b = x >> 16
        b = b & (255 << AT)
        if KIND == "int8":
            b = b ^ (128 << AT)
        return _placed(b, AT, 0.0 if KIND == "uint8" else 128.0)


@triton.jit
def _scales(p, tile, k, left, H: tl.constexpr, S: tl.constexpr, NT: tl.constexpr,
            GROUP: tl.constexpr, KIND: tl.constexpr, KP: tl.constexpr):  # fmt: skip
    """Bytes of outputs h = H: [S, P, 2, 1 or 2]."""
    x = _steps(p, tile, k, left, S, NT, 2 * GROUP, KP, 32, 0)
    b = tl.join(_byte(x, H, KIND), _byte(x, 2 + H, KIND))
    if GROUP == 32:
        return tl.reshape(b, (S, NT * 128, 2, 1))
    else:
        return tl.reshape(b, (S, NT * 128, 2, 2))


@triton.jit
def _spans(p, tile, k, left, H: tl.constexpr, S: tl.constexpr, NT: tl.constexpr,
           SPAN: tl.constexpr, KP: tl.constexpr):  # fmt: skip
    """d or dmin of outputs h = H, float32."""
    if p.dtype.element_ty == tl.float32:
        return _steps(p, tile, k, left, S, NT, SPAN, KP, 64, 32 * H)
    else:
        return _half(_steps(p, tile, k, left, S, NT, SPAN, KP, 32, 0) >> (16 * H))


@triton.jit
def _scaled(
    v, scale, minimum, d, dmin, tile, k, left, H: tl.constexpr, S: tl.constexpr,
    NT: tl.constexpr, KP: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    SPAN: tl.constexpr, LOW: tl.constexpr, ABOVE: tl.constexpr,
):  # fmt: skip
    """Codes [S, P, 2, L, c, b] of outputs h = H, ABOVE too large, times their step, plus their low.

    The low of codes that are too large is smaller, rounded to float32: for operands of 16 bits.
    """
    step = _spans(d, tile, k, left, H, S, NT, SPAN, KP)
    E4M3: tl.constexpr = (SCALE == "fp8") | (SCALE == "fp8 bits")
    if E4M3:
        b = _scales(scale, tile, k, left, H, S, NT, GROUP, SCALE, KP)
        return (v * b[:, :, :, :, None, None]) * step[:, :, :, :, None, None]
    else:
        if SCALE != "none":
            step = step * _scales(scale, tile, k, left, H, S, NT, GROUP, SCALE, KP)
        step = step[:, :, :, :, None, None]
        if LOW == "none":
            return v * step
        else:
            if LOW == "half":
                low = _spans(minimum, tile, k, left, H, S, NT, GROUP, KP)
            else:
                low = _spans(dmin, tile, k, left, H, S, NT, SPAN, KP)
                low = -low * _scales(minimum, tile, k, left, H, S, NT, GROUP, "uint8", KP)
            if ABOVE != 0:
                less = step * -ABOVE
                low = tl.reshape(less, less.shape[:4]) + low
            low = low[:, :, :, :, None, None]
            return tl.fma(v, tl.broadcast_to(step, v.shape), tl.broadcast_to(low, v.shape))


@triton.jit
def _code(x, low, high, table, I: tl.constexpr, CODE: tl.constexpr, OFFSET: tl.constexpr,
          BITS: tl.constexpr):  # fmt: skip
    """Number I of words of 8 nibbles.

    Spare bits lie beside the nibbles' next neighbours: those of code I at bit 4 I + 4 of `low`, or at
    bit 4 I - 8 of `high`, which belongs to words shifted by 12.
    """
    if CODE == "levels":
        return tl.load(table + ((x >> (4 * I)) & 15))
    else:
        AT: tl.constexpr = 4 * I if I < 5 else 4 * I - 12
        b = x if I < 5 else x >> 12
        b = b & (15 << AT)
        if BITS > 4:
            SPARE: tl.constexpr = ((1 << (BITS - 4)) - 1) << (AT + 4)
            b = b | ((low if I < 5 else high) & SPARE)
        return _placed(b, AT, float(OFFSET))


@triton.jit
def _four(x, low, high, table, H: tl.constexpr, CODE: tl.constexpr, OFFSET: tl.constexpr,
          BITS: tl.constexpr):  # fmt: skip
    """Numbers of outputs h = H in words of 8 codes: [.., c, b]."""
    c0 = tl.join(
        _code(x, low, high, table, 2 * H, CODE, OFFSET, BITS),
        _code(x, low, high, table, 4 + 2 * H, CODE, OFFSET, BITS),
    )
    c1 = tl.join(
        _code(x, low, high, table, 2 * H + 1, CODE, OFFSET, BITS),
        _code(x, low, high, table, 5 + 2 * H, CODE, OFFSET, BITS),
    )
    return tl.join(c0, c1)


@triton.jit
def _arranged(v, S: tl.constexpr, NT: tl.constexpr):
    """Numbers in the order (S, t, w, g, q, j, c, h, b): [64 NT, 64 S]."""
    v = tl.reshape(v, (S, NT, 4, 8, 4, 4, 2, 2, 2))
    v = tl.permute(v, (1, 2, 7, 3, 0, 5, 6, 4, 8))
    return tl.reshape(v, (NT * 64, S * 64))


@triton.jit
def _woven(v00, v01, v10, v11, S: tl.constexpr, NT: tl.constexpr):
    """Numbers (b) of (c, h) = 00, 01, 10, 11, [S, P, j1, j0, b] each: [64 NT, 64 S]."""
    v = tl.join(tl.join(v00, v01), tl.join(v10, v11))  # (.., b, h, c)
    return _arranged(tl.permute(v, (0, 1, 2, 3, 6, 5, 4)), S, NT)


@triton.jit
def _byte_tile(codes, d, tile, k, left, S: tl.constexpr, NT: tl.constexpr, KP: tl.constexpr,
               SPAN: tl.constexpr):  # fmt: skip
    """Q8_0 in pairs of float16."""
    P: tl.constexpr = NT * 128
    b = tl.reshape(_units(codes, tile, k, left, S, NT, 32, 4, KP), (S, 2, P, 4))
    b = tl.reshape(tl.permute(b, (0, 2, 1, 3)), (S, P, 2, 2, 2))
    step = _steps(d, tile, k, left, S, NT, SPAN, KP, 32, 0)
    v0, v1 = byte_pairs(b, twice(step, 0), twice(step, 1))  # [S, P, j1, j0, c, b]
    v = tl.permute(tl.join(v0, v1), (0, 1, 2, 3, 4, 6, 5))
    return _arranged(v, S, NT)


@triton.jit
def _nibble_tile(codes, scale, minimum, d, dmin, tile, k, left, S: tl.constexpr,
                 NT: tl.constexpr, KP: tl.constexpr, GROUP: tl.constexpr,
                 SPAN: tl.constexpr):  # fmt: skip
    """Q4_K in pairs of float16."""
    P: tl.constexpr = NT * 128
    b = tl.reshape(_units(codes, tile, k, left, S, NT, 64, 4, KP), (S, P, 2, 2))
    step = _steps(d, tile, k, left, S, NT, SPAN, KP, 32, 0)
    less = _steps(dmin, tile, k, left, S, NT, SPAN, KP, 32, 0) ^ -2147450880
    scales = _steps(scale, tile, k, left, S, NT, 2 * GROUP, KP, 32, 0)
    minima = _steps(minimum, tile, k, left, S, NT, 2 * GROUP, KP, 32, 0)
    a0, b0, l0 = k_steps(scales, minima, twice(less, 0), S, P, 0)
    a1, b1, l1 = k_steps(scales, minima, twice(less, 1), S, P, 1)
    v00, v01, v10, v11 = nibble_pairs(b, a0, b0, a1, b1, twice(step, 0), twice(step, 1), l0, l1)
    return _woven(v00, v01, v10, v11, S, NT)


@triton.jit
def weight_tile(
    codes, high, scale, minimum, d, dmin, table, tile, k, left, S: tl.constexpr,
    NT: tl.constexpr, KP: tl.constexpr, BITS: tl.constexpr, CODE: tl.constexpr,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, SPAN: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    """Row tiles from `tile` (int64) on, `left` of them there, at column k: [64 NT, 64 S].

    float32, or as stored when the codes are plain numbers.
    """
    P: tl.constexpr = NT * 128
    if BITS == 0:
        if codes.dtype.element_ty == tl.float32:
            b = _units(codes, tile, k, left, S, NT, 8, 4, KP)
            b = tl.permute(tl.reshape(b, (S, 4, 2, P, 4)), (0, 3, 1, 2, 4))
        else:
            b = _units(codes, tile, k, left, S, NT, 16, 8, KP)
            b = tl.permute(tl.reshape(b, (S, 4, P, 8)), (0, 2, 1, 3))
        return _arranged(b, S, NT)
    elif CODE == "int8 pairs":
        return _byte_tile(codes, d, tile, k, left, S, NT, KP, SPAN)
    elif CODE == "linear pairs":
        return _nibble_tile(codes, scale, minimum, d, dmin, tile, k, left, S, NT, KP, GROUP, SPAN)
    else:
        ABOVE: tl.constexpr = 128.0 if CODE == "linear raised" else 0.0
        if BITS == 8:
            b = _units(codes, tile, k, left, S, NT, 32, 4, KP)
            b = tl.permute(tl.reshape(b, (S, 2, P, 4)), (0, 2, 1, 3))
            KIND: tl.constexpr = "excess" if CODE == "int8" else CODE
            v0 = tl.join(_byte(b, 0, KIND), _byte(b, 1, KIND))
            v1 = tl.join(_byte(b, 2, KIND), _byte(b, 3, KIND))
            v0 = tl.reshape(v0, (S, P, 2, 2, 2, 2))
            v1 = tl.reshape(v1, (S, P, 2, 2, 2, 2))
        elif CODE == "linear raised":
            b = tl.reshape(_units(codes, tile, k, left, S, NT, 64, 4, KP), (S, P, 2, 2))
            s = tl.reshape(_units(high, tile, k, left, S, NT, 64, 1, KP), (S, P))
            even = tl.join(tl.join(s << 4, s << 2), tl.join(s << 3, s << 1))
            odd = tl.join(tl.join(s, s >> 2), tl.join(s >> 1, s >> 3))
            n0, n1, n2, n3, n4, n5, n6, n7 = raised_codes(b, even, odd)
            v0 = tl.join(tl.join(n0, n4), tl.join(n1, n5)).to(tl.float32, bitcast=True)
            v1 = tl.join(tl.join(n2, n6), tl.join(n3, n7)).to(tl.float32, bitcast=True)
        else:
            b = tl.reshape(_units(codes, tile, k, left, S, NT, 64, 4, KP), (S, P, 2, 2))
            low = b
            above = b
            if BITS == 5:
                s = tl.reshape(_units(high, tile, k, left, S, NT, 64, 1, KP), (S, P))
                low = tl.join(tl.join(s << 4, s << 2), tl.join(s << 3, s << 1))
                above = tl.join(tl.join(s >> 8, s >> 10), tl.join(s >> 9, s >> 11))
            elif BITS == 6:
                s = tl.reshape(_units(high, tile, k, left, S, NT, 32, 1, KP), (S, 2, P))
                s = tl.permute(s, (0, 2, 1))
                low = tl.join(s << 4, s << 2)
                above = tl.join(s >> 8, s >> 10)
            v0 = _four(b, low, above, table, 0, CODE, OFFSET, BITS)
            v1 = _four(b, low, above, table, 1, CODE, OFFSET, BITS)
        v0 = _scaled(v0, scale, minimum, d, dmin, tile, k, left, 0, S, NT, KP, GROUP, SCALE, SPAN,
                     LOW, ABOVE)  # fmt: skip
        v1 = _scaled(v1, scale, minimum, d, dmin, tile, k, left, 1, S, NT, KP, GROUP, SCALE, SPAN,
                     LOW, ABOVE)  # fmt: skip
        # [S, P, j1, j0, c, b, h] to [.., c, h, b]
        return _arranged(tl.permute(tl.join(v0, v1), (0, 1, 2, 3, 4, 6, 5)), S, NT)
