// Further ggml formats of vectors: two and three bits a value, ternary digits, MXFP4. As in blocks.hpp.
#pragma once

#include "blocks.hpp"

namespace {

// Vector i of stretch s of 32 values in 2 bits each: four stretches share 32 bytes.
CIVETTA_INLINE vi two_bits(const uint8_t* q, int s, int i) {
    return load_u8(q + 32 * (s / 4) + WIDTH * i) >> 2 * (s % 4) & 3;
}

struct Q2_K {
    static constexpr int VALUES = 256, BYTES = 84, SUBS = 8;  // 16 values a scale and minimum
    const uint8_t* q;
    float scale[16], min[16];
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) {
        q = b + 16;
        const float d = half_to_float(b + 80), dmin = half_to_float(b + 82);
        for (int s = 0; s < 16; s += 8) {
            const uint64_t both = read<uint64_t>(b + s);
            store8(scale + s, unpack_bytes(both & 0x0f0f0f0f0f0f0f0f) * d);
            store8(min + s, unpack_bytes(both >> 4 & 0x0f0f0f0f0f0f0f0f) * dmin);
        }
    }
    CIVETTA_INLINE_MEMBER vf value(int s, int i) const {
        const int at = 2 * s + WIDTH * i / 16;
        return to_float(two_bits(q, s, i)) * scale[at] - min[at];
    }
};

struct Q3_K {
    static constexpr int VALUES = 256, BYTES = 110, SUBS = 8;  // 16 values a scale
    const uint8_t* q;
    float scale[16];
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) {
        q = b;
        const float d = half_to_float(b + 108);
        const uint64_t low = read<uint64_t>(b + 96), tops = read<uint32_t>(b + 104);
        for (int s = 0; s < 2; ++s) {  // 4 bits of a scale, then its upper 2
            const uint64_t high = (tops >> 4 * s & 0x03030303) | (tops >> (4 * s + 2) & 0x03030303) << 32;
            const uint64_t six = (low >> 4 * s & 0x0f0f0f0f0f0f0f0f) | high << 4;
            store8(scale + 8 * s, (unpack_bytes(six) - 32.f) * d);
        }
    }
    CIVETTA_INLINE_MEMBER vf value(int s, int i) const {
        const vi third = load_u8(q + WIDTH * i) >> s & 1;
        return to_float((two_bits(q + 32, s, i) | third << 2) - 4) * scale[2 * s + WIDTH * i / 16];
    }
};

struct TQ2_0 {
    static constexpr int VALUES = 256, BYTES = 66, SUBS = 8;
    const uint8_t* q;
    float d;
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) {
        q = b;
        d = half_to_float(b + 64);
    }
    CIVETTA_INLINE_MEMBER vf value(int s, int i) const { return to_float(two_bits(q, s, i) - 1) * d; }
};

constexpr float E2M1_DOUBLED[16] = {0.f,  1.f,  2.f,  3.f,  4.f,  6.f,  8.f,  12.f,
                                    0.f, -1.f, -2.f, -3.f, -4.f, -6.f, -8.f, -12.f};

struct MXFP4 {
    static constexpr int VALUES = 32, BYTES = 17, SUBS = 1;
    const uint8_t* q;
    float d;
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) {
        q = b + 1;
        // Half of 2^(e - 127), as the numbers are doubled; the two lowest are subnormal.
        const uint32_t e = b[0], bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
        d = read<float>(&bits);
    }
    CIVETTA_INLINE_MEMBER vf value(int, int i) const { return Table(E2M1_DOUBLED, d).at(nibbles(q, i)); }
};

}  // namespace
