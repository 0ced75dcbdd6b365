// Formats that are decoded a whole block at once: codebooks (IQ1 to IQ3), whose indices name points of
// a grid, and two others whose parts are shorter than a vector. `decode` writes VALUES floats.
//
// A grid is int8 [points, 8], or [points, 4] for IQ3, in the order of the indices
// (dequant/grids.py); a matrix carries its address as `scale`.
#pragma once

#include "blocks.hpp"
#include "low_bits.hpp"

namespace {

template <class F>
concept Whole = requires(const Row& row, const uint8_t* b, float* out) { F::decode(row, b, out); };

// Signs of eight values from seven bits: the eighth makes the number of minuses even.
struct EvenSigns {
    uint8_t bits[128];
    constexpr EvenSigns() : bits() {
        for (int code = 0; code < 128; ++code) {
            int ones = 0;
            for (int i = 0; i < 7; ++i) ones += code >> i & 1;
            bits[code] = static_cast<uint8_t>(code | (ones & 1) << 7);
        }
    }
};
constexpr EvenSigns EVEN_SIGNS;

// Eight signed bytes, first one lowest, as numbers.
CIVETTA_INLINE f8v signed_bytes(uint64_t bytes) { return unpack_bytes(bytes ^ 0x8080808080808080) - 128.f; }

// Changes the sign of value j where bit j is set.
CIVETTA_INLINE f8v flip(f8v v, int32_t bits) {
    const i8v each = {1, 2, 4, 8, 16, 32, 64, 128};
    const i8v minus = ((i8v{} + bits) & each) != 0;
    return (f8v)((i8v)v ^ (minus & INT32_MIN));
}

CIVETTA_INLINE f8v point(const Row& row, uint32_t index) {
    return signed_bytes(read<uint64_t>(static_cast<const uint8_t*>(row.scales) + 8 * index));
}

CIVETTA_INLINE f8v two_points(const Row& row, uint32_t first, uint32_t second) {
    const uint8_t* grid = static_cast<const uint8_t*>(row.scales);
    return signed_bytes(read<uint32_t>(grid + 4 * first) | uint64_t{read<uint32_t>(grid + 4 * second)} << 32);
}

// Nibble i, the low one of a byte first.
CIVETTA_INLINE int nibble(const uint8_t* q, int i) { return q[i / 2] >> 4 * (i % 2) & 15; }

struct IQ2_XXS {
    static constexpr int VALUES = 256, BYTES = 66;
    static void decode(const Row& row, const uint8_t* b, float* out) {
        const float d = half_to_float(b);
        for (int g = 0; g < 8; ++g) {
            const uint8_t* q = b + 2 + 8 * g;
            const uint32_t word = read<uint32_t>(q + 4);
            const float step = d * (0.5f + static_cast<float>(word >> 28)) * 0.25f;
            for (int i = 0; i < 4; ++i, out += 8) {
                store8(out, flip(point(row, q[i]), EVEN_SIGNS.bits[word >> 7 * i & 127]) * step);
            }
        }
    }
};

struct IQ2_XS {
    static constexpr int VALUES = 256, BYTES = 74;
    static void decode(const Row& row, const uint8_t* b, float* out) {
        const float d = half_to_float(b);
        for (int i = 0; i < 32; ++i, out += 8) {
            const uint32_t word = read<uint16_t>(b + 2 + 2 * i);
            const float step = d * (0.5f + static_cast<float>(nibble(b + 66, i / 2))) * 0.25f;
            store8(out, flip(point(row, word & 511), EVEN_SIGNS.bits[word >> 9]) * step);
        }
    }
};

struct IQ2_S {
    static constexpr int VALUES = 256, BYTES = 82;
    static void decode(const Row& row, const uint8_t* b, float* out) {
        const float d = half_to_float(b);
        for (int i = 0; i < 32; ++i, out += 8) {
            const uint32_t index = b[2 + i] | (b[66 + i / 4] >> 2 * (i % 4) & 3u) << 8;
            const float step = d * (0.5f + static_cast<float>(nibble(b + 74, i / 2))) * 0.25f;
            store8(out, flip(point(row, index), b[34 + i]) * step);
        }
    }
};

struct IQ3_XXS {
    static constexpr int VALUES = 256, BYTES = 98;
    static void decode(const Row& row, const uint8_t* b, float* out) {
        const float d = half_to_float(b);
        for (int g = 0; g < 8; ++g) {
            const uint8_t* q = b + 2 + 8 * g;
            const uint32_t word = read<uint32_t>(b + 66 + 4 * g);
            const float step = d * (0.5f + static_cast<float>(word >> 28)) * 0.5f;
            for (int i = 0; i < 4; ++i, out += 8) {
                const f8v v = two_points(row, q[2 * i], q[2 * i + 1]);
                store8(out, flip(v, EVEN_SIGNS.bits[word >> 7 * i & 127]) * step);
            }
        }
    }
};

struct IQ3_S {
    static constexpr int VALUES = 256, BYTES = 110;
    static void decode(const Row& row, const uint8_t* b, float* out) {
        const float d = half_to_float(b);
        for (int i = 0; i < 32; ++i, out += 8) {
            const uint32_t ninth = b[66 + i / 4] >> 2 * (i % 4);  // of the first point, then of the second
            const float step = d * static_cast<float>(1 + 2 * nibble(b + 106, i / 4));
            const f8v v = two_points(row, b[2 + 2 * i] | (ninth & 1) << 8, b[3 + 2 * i] | (ninth & 2) << 7);
            store8(out, flip(v, b[74 + i]) * step);
        }
    }
};

constexpr float IQ1_DELTA = 0.125f;

struct IQ1_S {
    static constexpr int VALUES = 256, BYTES = 50;
    static void decode(const Row& row, const uint8_t* b, float* out) {
        const float d = half_to_float(b);
        for (int g = 0; g < 8; ++g) {
            const uint32_t word = read<uint16_t>(b + 34 + 2 * g);
            const float step = d * static_cast<float>(2 * (word >> 12 & 7) + 1);
            const float delta = word >> 15 ? -IQ1_DELTA : IQ1_DELTA;
            for (int i = 0; i < 4; ++i, out += 8) {
                store8(out, (point(row, b[2 + 4 * g + i] | (word >> 3 * i & 7) << 8) + delta) * step);
            }
        }
    }
};

struct IQ1_M {
    static constexpr int VALUES = 256, BYTES = 56;
    static void decode(const Row& row, const uint8_t* b, float* out) {
        uint16_t words[4], d_bits = 0;  // four 3-bit scales each, and on top a quarter of d
        for (int k = 0; k < 4; ++k) {
            words[k] = read<uint16_t>(b + 48 + 2 * k);
            d_bits = static_cast<uint16_t>(d_bits | words[k] >> 12 << 4 * k);
        }
        const float d = half_to_float(reinterpret_cast<const uint8_t*>(&d_bits));
        for (int i = 0; i < 32; ++i, out += 8) {
            const int top = nibble(b + 32, i), scale = i / 2;
            const float step = d * static_cast<float>(2 * (words[scale / 4] >> 3 * (scale % 4) & 7) + 1);
            const float delta = top & 8 ? -IQ1_DELTA : IQ1_DELTA;
            store8(out, (point(row, b[i] | (top & 7u) << 8) + delta) * step);
        }
    }
};

struct TQ1_0 {
    static constexpr int VALUES = 256, BYTES = 54;
    static void decode(const Row&, const uint8_t* b, float* out) {
        const float d = half_to_float(b + 52);
        out = digits(b, 32, 5, d, out);
        out = digits(b + 32, 16, 5, d, out);
        digits(b + 48, 4, 4, d, out);
    }

  private:
    // Ternary digits of `count` bytes, the most significant of every byte first.
    static float* digits(const uint8_t* q, int count, int places, float d, float* out) {
        for (int k = 0, power = 1; k < places; ++k, power *= 3, out += count) {
            for (int j = 0; j < count; ++j) {
                const int rest = q[j] * power & 255;
                out[j] = static_cast<float>((rest * 3 >> 8) - 1) * d;
            }
        }
        return out;
    }
};

// ggml's own: unsigned scales of 16 values each, whose NaN codes mean 0 and 480.
struct GGML_NVFP4 {
    static constexpr int VALUES = 64, BYTES = 36;
    static void decode(const Row&, const uint8_t* b, float* out) {
        for (int g = 0; g < 4; ++g, out += 16) {
            const uint8_t* q = b + 4 + 8 * g;
            const float number = b[g] == 0xff ? 480.f : b[g] == 0x7f ? 0.f : E4M3.value[b[g] & 127];
            for (int j = 0; j < 8; ++j) {
                out[j] = E2M1_DOUBLED[q[j] & 15] * (number * 0.5f);
                out[j + 8] = E2M1_DOUBLED[q[j] >> 4] * (number * 0.5f);
            }
        }
    }
};

}  // namespace
