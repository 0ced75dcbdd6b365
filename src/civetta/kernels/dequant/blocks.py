"""Decoders of the ggml block types that hold numbers themselves (IQ codebooks: iq.py).

Legend: N blocks, B bytes a block, V values a block. Every decoder takes uint8 [N, B] and returns
float32 [N, V]; each product is rounded in the order of the ggml reference, so that results agree
with it in every bit. Layouts are those of ggml's block structures (model.md C.5).
"""

from __future__ import annotations

import torch

# e2m1 doubled, so that they are integers; ggml halves the block scale instead
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block: float32 [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def fields(data: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Bit fields of `width` bits, lowest first: integers [..., n] to [..., count, n]."""
    shifts = torch.arange(0, width * count, width, dtype=data.dtype, device=data.device)
    return (data.unsqueeze(-2) >> shifts.unsqueeze(-1)) & ((1 << width) - 1)


def fields_of_each(data: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Bit fields kept beside each other: integers [..., n] to [..., n, count]."""
    shifts = torch.arange(0, width * count, width, dtype=data.dtype, device=data.device)
    return (data.unsqueeze(-1) >> shifts) & ((1 << width) - 1)


def grouped(data: torch.Tensor, size: int) -> torch.Tensor:
    """Rows cut into groups of `size`: [N, g * size] to [N, g, size]."""
    return data.reshape(data.shape[0], -1, size)


def nibbles(data: torch.Tensor, group: int) -> torch.Tensor:
    """Low nibbles of `group` bytes, then their high nibbles, group after group: [N, 2n]."""
    return fields(grouped(data, group), 4, 2).flatten(1)


def signed(data: torch.Tensor) -> torch.Tensor:
    """Bytes as int8."""
    return data.contiguous().view(torch.int8)


def spread(scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Each scale of a block times its group of values: [N, g] and [N, V] to [N, V]."""
    groups = scales.shape[1]
    return (scales.unsqueeze(2) * grouped(values, values.shape[1] // groups)).flatten(1)


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """Half d, 16 bytes of nibbles: d * (q - 8)."""
    return half(blocks, 0) * (nibbles(blocks[:, 2:], 16).float() - 8)


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Half d, half m, nibbles: d * q + m."""
    return half(blocks, 0) * nibbles(blocks[:, 4:], 16).float() + half(blocks, 2)


def _five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Fifth bits of 32 values (4 bytes, value j in bit j) over 16 bytes of nibbles: [N, 32]."""
    return (nibbles(low, 16) | (fields_of_each(high, 1, 8).flatten(1) << 4)).float()


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """Half d, 4 bytes of fifth bits, nibbles: d * (q - 16)."""
    return half(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]) - 16)


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """Half d, half m, 4 bytes of fifth bits, nibbles: d * q + m."""
    return half(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + half(blocks, 2)


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Half d, 32 int8: d * q."""
    return half(blocks, 0) * signed(blocks[:, 2:]).float()


def q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 bytes (scale | minimum << 4), 64 bytes of 2-bit values, half d, half dmin."""
    steps = half(blocks, 80) * (blocks[:, :16] & 15).float()
    minima = half(blocks, 82) * (blocks[:, :16] >> 4).float()
    values = fields(grouped(blocks[:, 16:80], 32), 2, 4).flatten(1).float()
    return spread(steps, values) - minima.repeat_interleave(16, dim=1)


def q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """32 bytes of third bits, 64 bytes of 2-bit values, 12 bytes of 6-bit scales, half d."""
    low = fields(blocks[:, 96:104].unsqueeze(1), 4, 2).flatten(1)
    high = fields(blocks[:, 104:108].unsqueeze(1), 2, 4).flatten(1)
    steps = half(blocks, 108) * (signed(low | (high << 4)) - 32).float()
    twos = fields(grouped(blocks[:, 32:96], 32), 2, 4).flatten(1)
    thirds = fields(blocks[:, :32].unsqueeze(1), 1, 8).flatten(1)
    return spread(steps, (signed(twos | (thirds << 2)) - 4).float())


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8 scales and 8 minima of 6 bits from 12 bytes: two float32 [N, 8]."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([a & 63, (c & 15) | ((a >> 6) << 4)], dim=1)
    minima = torch.cat([b & 63, (c >> 4) | ((b >> 6) << 4)], dim=1)
    return scales.float(), minima.float()


def q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Half d, half dmin, 12 bytes of scales and minima, 128 bytes of nibbles."""
    scales, minima = _k_scales(blocks[:, 4:16])
    values = nibbles(blocks[:, 16:], 32).float()
    shift = (half(blocks, 2) * minima).repeat_interleave(32, dim=1)
    return spread(half(blocks, 0) * scales, values) - shift


def q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """Half d, half dmin, 12 bytes of scales and minima, 32 bytes of fifth bits, nibbles."""
    scales, minima = _k_scales(blocks[:, 4:16])
    fifths = fields(blocks[:, 16:48].unsqueeze(1), 1, 8).flatten(1)
    values = (nibbles(blocks[:, 48:], 32) | (fifths << 4)).float()
    shift = (half(blocks, 2) * minima).repeat_interleave(32, dim=1)
    return spread(half(blocks, 0) * scales, values) - shift


def q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """128 bytes of nibbles, 64 of the upper 2 bits, 16 int8 scales s, half d: d*s*(q-32)."""
    low = nibbles(blocks[:, :128], 64)
    high = fields(grouped(blocks[:, 128:192], 32), 2, 4).flatten(1)
    steps = half(blocks, 208) * signed(blocks[:, 192:208]).float()
    return spread(steps, (signed(low | (high << 4)) - 32).float())


def tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    """48 bytes of 5 and 4 bytes of 4 ternary digits as base-3 fractions, half d: d * (q - 1)."""
    digits = torch.cat(
        [
            _thirds(blocks[:, 0:32], 5),
            _thirds(blocks[:, 32:48], 5),
            _thirds(blocks[:, 48:52], 4),
        ],
        dim=1,
    )
    return half(blocks, 52) * (digits.float() - 1)


def _thirds(data: torch.Tensor, count: int) -> torch.Tensor:
    """Ternary digits, most significant first: bytes [N, n] to [N, count * n], digit by digit."""
    powers = torch.tensor([3**k for k in range(count)], dtype=torch.int16, device=data.device)
    rests = (data.to(torch.int16).unsqueeze(1) * powers.unsqueeze(1)) & 255
    return ((rests * 3) >> 8).flatten(1)


def tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    """64 bytes of 2-bit digits, half d: d * (q - 1)."""
    digits = fields(grouped(blocks[:, :64], 32), 2, 4).flatten(1)
    return half(blocks, 64) * (digits.float() - 1)


def mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """One e8m0 exponent, 16 bytes of e2m1 nibbles."""
    exponent = blocks[:, :1].to(torch.int32)
    # 2^(e-128) as float bits; the two lowest exponents are subnormal
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.view(torch.float32) * _e2m1_doubled(nibbles(blocks[:, 1:], 16))


def ggml_nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    """4 unsigned e4m3 scales of 16 values each, then 8 bytes of e2m1 nibbles for each of them."""
    code = blocks[:, :4]
    bits = (code & 127).view(torch.float8_e4m3fn).float()
    # where e4m3 has its NaN ggml reads 480 if the sign bit is set and 0 if not
    bits = torch.where(code == 0xFF, 480.0, bits.nan_to_num(nan=0.0))
    return spread(bits * 0.5, _e2m1_doubled(nibbles(blocks[:, 4:], 8)))


def _e2m1_doubled(codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(_E2M1_DOUBLED, dtype=torch.float32, device=codes.device)
    return table[codes.int()]
