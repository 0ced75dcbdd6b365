"""Decoding in pairs of float16 (NVIDIA): two numbers an instruction, for rows of float16.

A code lies in the mantissa of a float16 (1024 + code, or 1024 + 16 code for a byte's high nibble),
both numbers of a pair in one word. Q8_0: code and step have 8 and 11 bits, so the one rounding is that
of their product, as in float32. Q4_K: code times scale is whole and below 1024, so exact; the low is
rounded to float16 before the one fma, which rounds again.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def twice(word, H: tl.constexpr):
    """Half H of words in both halves."""
    if H == 0:
        y = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x1010;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        y = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x3232;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _joined(a, b, S: tl.constexpr, P: tl.constexpr):
    return tl.reshape(tl.join(a, b), (S, P, 2, 1))


@triton.jit
def k_steps(scale, minimum, less, S: tl.constexpr, P: tl.constexpr, H: tl.constexpr):
    """Of outputs h = H, for words of bytes (j1, h) and -dmin twice: factors (scale, scale / 16) and
    terms (-1024 scale, -64 scale) that turn 1024 + code into scale * code, and lows: [S, P, 2, 1]."""
    FIRST: tl.constexpr = "0x4040" if H == 0 else "0x4141"
    SECOND: tl.constexpr = "0x4242" if H == 0 else "0x4343"
    a0, a1, b0, b1, l0, l1 = tl.inline_asm_elementwise(
        "{ .reg .b32 t, u, v, w, m, one, sub, big;"
        " mov.b32 m, 0x64646464; mov.b32 big, 0xe400e400;"
        " mov.b32 one, 0x2c003c00; mov.b32 sub, 0xd400e400;"
        " prmt.b32 t, $6, m, " + FIRST + "; prmt.b32 u, $6, m, " + SECOND + ";"
        " prmt.b32 v, $7, m, " + FIRST + "; prmt.b32 w, $7, m, " + SECOND + ";"
        " fma.rn.f16x2 t, t, one, sub; fma.rn.f16x2 u, u, one, sub;"
        " add.f16x2 v, v, big; add.f16x2 w, w, big;"
        " mul.f16x2 v, v, $8; mul.f16x2 w, w, $8;"
        " mul.f16x2 $2, t, big; mul.f16x2 $3, u, big;"
        " mov.b32 $0, t; mov.b32 $1, u; mov.b32 $4, v; mov.b32 $5, w; }",
        "=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
        [scale, minimum, less],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    return _joined(a0, a1, S, P), _joined(b0, b1, S, P), _joined(l0, l1, S, P)


@triton.jit
def nibble_pairs(word, a0, b0, a1, b1, d0, d1, l0, l1):
    """Words of nibbles (c, h, b) to numbers (b) of (c, h) = 00, 01, 10, 11: float16 [.., 2] each."""
    w = tl.join(word, word)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t, u, v, w, m; mov.b32 m, 0x64646464;"
        " prmt.b32 t, $4, m, 0x4040; prmt.b32 u, $4, m, 0x4141;"
        " prmt.b32 v, $4, m, 0x4242; prmt.b32 w, $4, m, 0x4343;"
        " and.b32 t, t, 0xfff0ff0f; and.b32 u, u, 0xfff0ff0f;"
        " and.b32 v, v, 0xfff0ff0f; and.b32 w, w, 0xfff0ff0f;"
        " fma.rn.f16x2 t, t, $6, $8; fma.rn.f16x2 u, u, $10, $12;"
        " fma.rn.f16x2 v, v, $6, $8; fma.rn.f16x2 w, w, $10, $12;"
        " fma.rn.f16x2 $0, t, $14, $18; fma.rn.f16x2 $1, u, $16, $20;"
        " fma.rn.f16x2 $2, v, $14, $18; fma.rn.f16x2 $3, w, $16, $20; }",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [w, a0[:, :, :, :, None], b0[:, :, :, :, None], a1[:, :, :, :, None],
         b1[:, :, :, :, None], d0[:, :, :, :, None], d1[:, :, :, :, None],
         l0[:, :, :, :, None], l1[:, :, :, :, None]],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )  # fmt: skip


@triton.jit
def byte_pairs(word, d0, d1):
    """Words of bytes (h, b), 128 above their numbers, times their step: float16 [.., b] of h = 0, 1."""
    w = tl.join(word, word)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t, u, m, less; mov.b32 m, 0x64646464; mov.b32 less, 0xe480e480;"
        " prmt.b32 t, $2, m, 0x4140; prmt.b32 u, $2, m, 0x4342;"
        " add.f16x2 t, t, less; add.f16x2 u, u, less;"
        " mul.f16x2 $0, t, $4; mul.f16x2 $1, u, $6; }",
        "=&r,=&r,r,r,r,r,r,r",
        [w, d0[:, :, :, :, None, None], d1[:, :, :, :, None, None]],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def raised_codes(word, spare_even, spare_odd):
    """Words of 8 nibbles, and their fifth bits at bit 4 of each byte, of even and of odd nibbles: the
    bits of the float32 128 + code, eight int32."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 e, o, t, u, m; mov.b32 m, 0x43000000;"
        " shr.u32 t, $8, 4; and.b32 e, $9, 0x10101010; and.b32 o, $10, 0x10101010;"
        " lop3.b32 e, $8, 0x0f0f0f0f, e, 0xea; lop3.b32 o, t, 0x0f0f0f0f, o, 0xea;"
        " prmt.b32 $0, e, m, 0x7044; prmt.b32 $1, o, m, 0x7044;"
        " prmt.b32 $2, e, m, 0x7144; prmt.b32 $3, o, m, 0x7144;"
        " prmt.b32 $4, e, m, 0x7244; prmt.b32 $5, o, m, 0x7244;"
        " prmt.b32 $6, e, m, 0x7344; prmt.b32 $7, o, m, 0x7344; }",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
        [word, spare_even, spare_odd],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )  # fmt: skip
