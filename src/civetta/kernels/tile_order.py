"""The order in which a weight's planes lie in memory: as a matrix unit's registers want them.

NVIDIA's wide matrix instruction (wgmma) takes its left operand from registers: of a tile of 64 outputs
and 16 inputs, thread (warp w, group g, quarter q) of 128 holds outputs 16 w + 8 h + g and inputs
8 c + 2 q + b. A tile of 64 x 64 therefore is cut as

    output = 16 w + 8 h + g          input = 16 j + 8 c + 2 q + b
    w, j: 4, g: 8, q: 4, h, c, b: 2

and a "place" is (w, g, q), 128 of them. What a thread needs lies in 16 bytes, the places side by side:
a kernel loads whole lines and decodes in registers, without a detour through shared memory. Other
hardware reads the same planes and lets the compiler move the numbers.

    codes of 4 bits (low nibbles of 5 and 6 too): words [tile, place, j], nibbles (c, h, b)
    codes of 8 bits: words [half tile of 32 inputs, place, (j, c)], bytes (h, b)
    numbers of 16 bits: [16 inputs, place, (c, h, b)]; of 32 bits: [8 inputs, place, (h, b)]
    spare bits: 5-bit codes words [tile, place], a bit j of each nibble (c, h, b); 6-bit codes words
        [half tile, place], two bits j0 of each nibble
    steps: words [columns of a word, (w, g)], halves (h); bytes (j1, h) or (j0, h); float32 [h, (w, g)]

Rows and columns are filled up to multiples of 64. Legend: R rows, K columns, T = R / 64, U = K / 64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE = 64
"""Outputs, and inputs, of one tile."""


def filled(plane: Tensor, rows: int, cols: int) -> Tensor:
    """Zeros added up to [rows, cols]."""
    if plane.dtype.is_floating_point and plane.element_size() == 1:
        return filled(plane.view(torch.uint8), rows, cols).view(plane.dtype)
    return pad(plane, (0, cols - plane.shape[1], 0, rows - plane.shape[0]))


def _cut(x_RK: Tensor) -> Tensor:
    """[T, w, h, g, U, j, c, q, b]."""
    rows, cols = x_RK.shape
    return x_RK.view(rows // TILE, 4, 2, 8, cols // TILE, 4, 2, 4, 2)


def _words(x: Tensor, *shape: int) -> Tensor:
    return x.contiguous().flatten().view(torch.int32).view(*shape)


def nibbles(codes_RK: Tensor) -> Tensor:
    """uint8 codes below 16: int32 [T, U, 512]."""
    x = _cut(codes_RK).permute(0, 4, 1, 3, 7, 5, 6, 2, 8)
    pairs = x[..., 0] | (x[..., 1] << 4)
    return _words(pairs, x.shape[0], x.shape[1], 512)


def bytes_(codes_RK: Tensor) -> Tensor:
    """uint8 codes: int32 [T, 2 U, 512]."""
    x = _cut(codes_RK)
    x = x.view(*x.shape[:5], 2, 2, *x.shape[6:]).permute(0, 4, 5, 1, 3, 8, 6, 7, 2, 9)
    return _words(x, x.shape[0], -1, 512)


def numbers(x_RK: Tensor) -> Tensor:
    """16-bit numbers [T, 4 U, 1024] or float32 [T, 8 U, 512]."""
    x = _cut(x_RK)
    if x_RK.element_size() == 2:
        return x.permute(0, 4, 5, 1, 3, 7, 6, 2, 8).reshape(x.shape[0], -1, 1024)
    return x.permute(0, 4, 5, 6, 1, 3, 7, 2, 8).reshape(x.shape[0], -1, 512)


def spare_bits(spare_RK: Tensor, width: int) -> Tensor:
    """Bits above the nibbles, `width` (1, 2) each: int32 [T, width * U, 128]."""
    x = _cut(spare_RK).permute(0, 4, 1, 3, 7, 5, 6, 2, 8).flatten(6)
    x = x.reshape(*x.shape[:5], width, 4 // width, 4, 2)
    nibble = torch.arange(0, 8, 4, dtype=torch.uint8, device=x.device)
    inside = torch.arange(0, 4, width, dtype=torch.uint8, device=x.device)
    packed = (x << (nibble + inside[:, None, None])).sum((6, 8), dtype=torch.uint8)
    words = packed.permute(0, 1, 5, 2, 3, 4, 6)
    return _words(words, words.shape[0], -1, 128)


def steps(plane_RG: Tensor, groups_a_tile: int) -> Tensor:
    """A value a row and group of columns: int32 [T, words, 32], or float32 [T, G, 64].

    Halves: a word a group. Bytes: `groups_a_tile` 2 or 4, two groups a word.
    """
    rows, groups = plane_RG.shape
    x = plane_RG.contiguous().view(rows // TILE, 4, 2, 8, groups)
    if plane_RG.element_size() == 4:
        return x.permute(0, 4, 2, 1, 3).reshape(rows // TILE, groups, 64)
    if plane_RG.element_size() == 2:
        x = x.permute(0, 4, 1, 3, 2)
        return _words(x, rows // TILE, groups, 32)
    assert groups_a_tile in {2, 4}
    x = x.view(*x.shape[:4], groups // 2, 2).permute(0, 4, 1, 3, 5, 2)
    return _words(x, rows // TILE, groups // 2, 32)


def paired(plane_RG: Tensor) -> Tensor:
    """Gate rows, then up rows, woven in runs of 8, so that a thread holds both of one output."""
    gate, up = plane_RG.chunk(2)
    missing = -gate.shape[0] % 8
    gate, up = (filled(x, x.shape[0] + missing, x.shape[1]) for x in (gate, up))
    runs = (gate.shape[0] // 8, 8, plane_RG.shape[1])
    return torch.stack([gate.reshape(runs), up.reshape(runs)], dim=1).flatten(0, 2)
