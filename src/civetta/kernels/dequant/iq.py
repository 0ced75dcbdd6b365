"""Decoders of the ggml IQ types: 4-bit codebooks, grids with signs, and the 1-bit grids.

Legend as in blocks.py: uint8 [N, B] to float32 [N, V], 256 values a block (IQ4_NL: 32). Grid types
store indices into a table of points (grids.py); a scale covers 16 or 32 values.
"""

from __future__ import annotations

import functools

import torch

from civetta.kernels.dequant import grids
from civetta.kernels.dequant.blocks import fields_of_each, grouped, half, nibbles, signed, spread

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ1_DELTA = 0.125


@functools.cache
def _points(grid: grids.Grid, device: torch.device) -> torch.Tensor:
    """A grid as float32 [points, coordinates] on a device; constant, so made once."""
    return torch.from_numpy(grid.points()).to(device=device, dtype=torch.float32)


def _look_up(grid: grids.Grid, indices: torch.Tensor) -> torch.Tensor:
    """Points of int32 indices [N, i]: float32 [N, i * coordinates]."""
    return _points(grid, indices.device)[indices].flatten(1)


def _words(data: torch.Tensor, size: int) -> torch.Tensor:
    """Little-endian unsigned integers of 2 or 4 bytes: [N, n] to int64 [N, n / size]."""
    parts = grouped(data, size).long()
    places = torch.arange(0, 8 * size, 8, device=data.device)
    return (parts << places).sum(dim=2)


def _signs(bits: torch.Tensor) -> torch.Tensor:
    """Sign bits, eight values a byte: [N, n] to float32 [N, 8n] of 1 and -1."""
    return 1 - 2 * fields_of_each(bits, 1, 8).flatten(1).float()


def _seven_bit_signs(codes: torch.Tensor) -> torch.Tensor:
    """Signs of 8 values from 7 bits [N, n]: the eighth makes the number of minuses even."""
    parity = fields_of_each(codes, 1, 7).sum(dim=-1) & 1
    return _signs(codes | (parity << 7))


def iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    """Half d, 16 bytes of nibbles into 16 levels."""
    return half(blocks, 0) * _iq4_levels(nibbles(blocks[:, 2:], 16))


def iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """Half d, 2 bytes of upper and 4 of lower scale bits, 128 bytes of nibbles into 16 levels."""
    low = fields_of_each(blocks[:, 4:8], 4, 2).flatten(1)
    high = fields_of_each(blocks[:, 2:4], 2, 4).flatten(1)
    steps = half(blocks, 0) * (signed(low | (high << 4)) - 32).float()
    return spread(steps, _iq4_levels(nibbles(blocks[:, 8:], 16)))


def _iq4_levels(codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(IQ4_LEVELS, dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    """Half d; a group of 32: 4 index bytes, then a word of 4 seven-bit signs and a 4-bit scale."""
    groups = grouped(blocks[:, 2:], 8)
    indices = groups[:, :, :4].flatten(1).int()
    words = _words(groups[:, :, 4:].flatten(1), 4)
    steps = half(blocks, 0) * (0.5 + (words >> 28).float()) * 0.25
    signs = _seven_bit_signs(fields_of_each(words, 7, 4).flatten(1))
    return spread(steps, _look_up(grids.IQ2_XXS, indices) * signs)


def iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    """Half d, 32 words (9-bit index, seven-bit signs), 8 bytes of 4-bit scales."""
    words = _words(blocks[:, 2:66], 2)
    steps = _quarter_steps(blocks, blocks[:, 66:74])
    signs = _seven_bit_signs(words >> 9)
    return spread(steps, _look_up(grids.IQ2_XS, words & 511) * signs)


def iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    """Half d, 32 index bytes, 32 sign bytes, 8 bytes of upper index bits, 8 of 4-bit scales."""
    high = fields_of_each(blocks[:, 66:74], 2, 4).flatten(1)
    indices = blocks[:, 2:34].int() | (high.int() << 8)
    steps = _quarter_steps(blocks, blocks[:, 74:82])
    return spread(steps, _look_up(grids.IQ2_S, indices) * _signs(blocks[:, 34:66]))


def _quarter_steps(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """d * (1/2 + s) / 4 for 16 scales in 8 bytes: float32 [N, 16]."""
    return half(blocks, 0) * (0.5 + fields_of_each(scales, 4, 2).flatten(1).float()) * 0.25


def iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    """Half d, 64 index bytes, 8 words of 4 seven-bit signs and a 4-bit scale."""
    words = _words(blocks[:, 66:98], 4)
    steps = half(blocks, 0) * (0.5 + (words >> 28).float()) * 0.5
    signs = _seven_bit_signs(fields_of_each(words, 7, 4).flatten(1))
    return spread(steps, _look_up(grids.IQ3_XXS, blocks[:, 2:66].int()) * signs)


def iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    """Half d, 64 index bytes, 8 bytes of ninth bits, 32 sign bytes, 4 bytes of 4-bit scales."""
    high = fields_of_each(blocks[:, 66:74], 1, 8).flatten(1)
    indices = blocks[:, 2:66].int() | (high.int() << 8)
    scales = fields_of_each(blocks[:, 106:110], 4, 2).flatten(1)
    steps = half(blocks, 0) * (1 + 2 * scales).float()
    return spread(steps, _look_up(grids.IQ3_S, indices) * _signs(blocks[:, 74:106]))


def iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    """Half d, 32 index bytes, 8 words (4 upper index triples, a 3-bit scale, the delta's sign)."""
    words = _words(blocks[:, 34:50], 2)
    steps = half(blocks, 0) * (2 * ((words >> 12) & 7) + 1).float()
    delta = _IQ1_DELTA * (1 - 2 * (words >> 15)).float()
    indices = blocks[:, 2:34].long() | (fields_of_each(words, 3, 4).flatten(1) << 8)
    return spread(steps, _look_up(grids.IQ1_S, indices) + delta.repeat_interleave(32, dim=1))


def iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    """32 index bytes, 16 bytes of nibbles (upper index triple, delta's sign), 4 scale words.

    A scale word has four 3-bit scales; its top nibble is a quarter of the half-precision d.
    """
    words = _words(blocks[:, 48:56], 2)
    places = torch.arange(0, 16, 4, device=blocks.device)
    d_bits = ((words >> 12) << places).sum(dim=1, keepdim=True)
    d = d_bits.to(torch.int16).view(torch.float16).float()
    steps = d * (2 * fields_of_each(words, 3, 4).flatten(1) + 1).float()
    tops = fields_of_each(blocks[:, 32:48], 4, 2).flatten(1).int()
    delta = _IQ1_DELTA * (1 - 2 * (tops >> 3)).float()
    indices = blocks[:, :32].int() | ((tops & 7) << 8)
    return spread(steps, _look_up(grids.IQ1_S, indices) + delta.repeat_interleave(8, dim=1))
