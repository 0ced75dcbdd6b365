// Formats whose values come out of a block's bits a vector at a time. Layouts are ggml's and, for FP8
// and NVFP4, model.md A.7 and A.8.
//
// A format is a struct with VALUES a block in BYTES bytes, cut into SUBS stretches; `open` reads a
// block's header and `value(s, i)` is vector i of stretch s.
#pragma once

#include "row.hpp"

namespace {

struct F32 {
    static constexpr int VALUES = 32, BYTES = 128, SUBS = 1;
    const uint8_t* q;
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) { q = b; }
    CIVETTA_INLINE_MEMBER vf value(int, int i) const { return load(q + 4 * WIDTH * i); }
};

struct F16 {
    static constexpr int VALUES = 32, BYTES = 64, SUBS = 1;
    const uint8_t* q;
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) { q = b; }
    CIVETTA_INLINE_MEMBER vf value(int, int i) const { return load_half(q + 2 * WIDTH * i); }
};

struct BF16 {
    static constexpr int VALUES = 32, BYTES = 64, SUBS = 1;
    const uint8_t* q;
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) { q = b; }
    CIVETTA_INLINE_MEMBER vf value(int, int i) const { return (vf)(load_u16(q + 2 * WIDTH * i) << 16); }
};

struct F8_E4M3 {
    static constexpr int VALUES = 128, BYTES = 128, SUBS = 4;
    const uint8_t* q;
    float scale;  // times 2^8, see load_e4m3: exact, as float32 scales are far from its limits
    CIVETTA_INLINE_MEMBER void open(const Row& row, const uint8_t* b, int64_t block) {
        q = b;
        scale = 0x1p8f * static_cast<const float*>(row.scales)[block];
        if (holds_nan(b)) scale = __builtin_nanf("");  // any product with this row is NaN
    }
    CIVETTA_INLINE_MEMBER vf value(int s, int i) const { return load_e4m3(q + 32 * s + WIDTH * i) * scale; }
};

// Every FP8 E4M3 byte as a number, for scales.
struct E4M3Table {
    float value[256];
    constexpr E4M3Table() : value() {
        for (int byte = 0; byte < 256; ++byte) {
            const int exponent = byte >> 3 & 15, mantissa = byte & 7;
            float v = static_cast<float>(exponent ? 8 + mantissa : mantissa) * 0x1p-9f;
            for (int e = 1; e < exponent; ++e) v *= 2.f;
            if ((byte & 0x7f) == 0x7f) v = __builtin_nanf("");
            value[byte] = byte & 0x80 ? -v : v;
        }
    }
};
constexpr E4M3Table E4M3;

struct NVFP4 {
    static constexpr int VALUES = 16, BYTES = 8, SUBS = 1;
    const uint8_t* q;
    float scale, scale_2;
    CIVETTA_INLINE_MEMBER void open(const Row& row, const uint8_t* b, int64_t block) {
        q = b;
        scale = E4M3.value[static_cast<const uint8_t*>(row.scales)[block]];
        scale_2 = row.scale_2;
    }
    CIVETTA_INLINE_MEMBER vf value(int, int i) const {
        static constexpr float e2m1[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                           -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
        return Table(e2m1, scale).at(load_nibble_pairs(q + WIDTH / 2 * i)) * scale_2;
    }
};

struct Q8_0 {
    static constexpr int VALUES = 32, BYTES = 34, SUBS = 1;
    const uint8_t* q;
    float d;
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) {
        q = b + 2;
        d = half_to_float(b);
    }
    CIVETTA_INLINE_MEMBER vf value(int, int i) const { return to_float(load_i8(q + WIDTH * i)) * d; }
};

// Nibbles of 16 bytes, low halves first: vector i of a stretch of 32.
CIVETTA_INLINE vi nibbles(const uint8_t* q, int i) {
    constexpr int half = 16 / WIDTH;
    return i < half ? load_u8(q + WIDTH * i) : load_u8(q + WIDTH * (i - half)) >> 4;
}

struct Q4_0 {
    static constexpr int VALUES = 32, BYTES = 18, SUBS = 1;
    const uint8_t* q;
    float d;
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) {
        q = b + 2;
        d = half_to_float(b);
    }
    CIVETTA_INLINE_MEMBER vf value(int, int i) const { return Ramp(d, -8, 0.f).at(nibbles(q, i)); }
};

struct Q4_1 {
    static constexpr int VALUES = 32, BYTES = 20, SUBS = 1;
    const uint8_t* q;
    float d, m;
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) {
        q = b + 4;
        d = half_to_float(b);
        m = half_to_float(b + 2);
    }
    CIVETTA_INLINE_MEMBER vf value(int, int i) const { return Ramp(d, 0, m).at(nibbles(q, i)); }
};

struct Q5_0 {
    static constexpr int VALUES = 32, BYTES = 22, SUBS = 1;
    const uint8_t* q;
    int32_t high;
    float d;
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) {
        q = b + 6;
        high = read<int32_t>(b + 2);
        d = half_to_float(b);
    }
    CIVETTA_INLINE_MEMBER vf value(int, int i) const {
        return Ramp(d, -16, 0.f).at(nibbles(q, i), broadcast(high), lane_bits(i));
    }
};

struct Q5_1 {
    static constexpr int VALUES = 32, BYTES = 24, SUBS = 1;
    const uint8_t* q;
    int32_t high;
    float d, m;
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) {
        q = b + 8;
        high = read<int32_t>(b + 4);
        d = half_to_float(b);
        m = half_to_float(b + 2);
    }
    CIVETTA_INLINE_MEMBER vf value(int, int i) const {
        return Ramp(d, 0, m).at(nibbles(q, i), broadcast(high), lane_bits(i));
    }
};

constexpr float IQ4_VALUES[16] = {-127.f, -104.f, -83.f, -65.f, -49.f, -35.f, -22.f, -10.f,
                                  1.f,    13.f,   25.f,  38.f,  53.f,  69.f,  89.f,  113.f};

struct IQ4_NL {
    static constexpr int VALUES = 32, BYTES = 18, SUBS = 1;
    const uint8_t* q;
    float d;
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) {
        q = b + 2;
        d = half_to_float(b);
    }
    CIVETTA_INLINE_MEMBER vf value(int, int i) const { return Table(IQ4_VALUES, d).at(nibbles(q, i)); }
};

struct IQ4_XS {
    static constexpr int VALUES = 256, BYTES = 136, SUBS = 8;
    const uint8_t* q;
    float scale[8];
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) {
        q = b + 8;
        const float d = half_to_float(b);
        uint64_t low = read<uint32_t>(b + 4), high = read<uint16_t>(b + 2);  // 4 and 2 bits a scale
        low = (low | low << 16) & 0x0000ffff0000ffff;
        low = (low | low << 8) & 0x00ff00ff00ff00ff;
        low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f;
        high = (high | high << 24) & 0x000000ff000000ff;
        high = (high | high << 12) & 0x000f000f000f000f;
        high = (high | high << 6) & 0x0303030303030303;
        store8(scale, (unpack_bytes(low | high << 4) - 32.f) * d);
    }
    CIVETTA_INLINE_MEMBER vf value(int s, int i) const {
        return Table(IQ4_VALUES, scale[s]).at(nibbles(q + 16 * s, i));
    }
};

// Eight 6-bit scales and minima of Q4_K and Q5_K, times the block's two factors.
struct Scales {
    float scale[8], min[8];
    CIVETTA_INLINE_MEMBER void open(const uint8_t* b) {
        const float d = half_to_float(b), dmin = half_to_float(b + 2);
        const uint64_t p = read<uint32_t>(b + 4), m = read<uint32_t>(b + 8), rest = read<uint32_t>(b + 12);
        const uint64_t s = (p & 0x3f3f3f3f) | ((rest & 0x0f0f0f0f) | (p >> 2 & 0x30303030)) << 32;
        const uint64_t t = (m & 0x3f3f3f3f) | ((rest >> 4 & 0x0f0f0f0f) | (m >> 2 & 0x30303030)) << 32;
        store8(scale, unpack_bytes(s) * d);
        store8(min, unpack_bytes(t) * dmin);
    }
};

// Stretches of 64: the low nibbles of 32 bytes, then the high ones, each half with its scale.
constexpr int HALF = 32 / WIDTH;

struct Q4_K {
    static constexpr int VALUES = 256, BYTES = 144, SUBS = 4;
    Scales scales;
    const uint8_t* q;
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) {
        q = b + 16;
        scales.open(b);
    }
    CIVETTA_INLINE_MEMBER vf value(int s, int i) const {
        const int high = i >= HALF;
        const vi bytes = load_u8(q + 32 * s + WIDTH * (i - high * HALF));
        return Ramp(scales.scale[2 * s + high], 0, -scales.min[2 * s + high]).at(high ? bytes >> 4 : bytes);
    }
};

struct Q5_K {
    static constexpr int VALUES = 256, BYTES = 176, SUBS = 4;
    Scales scales;
    const uint8_t* q;
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) {
        q = b + 16;
        scales.open(b);
    }
    CIVETTA_INLINE_MEMBER vf value(int s, int i) const {
        const int high = i >= HALF, at = WIDTH * (i - high * HALF);
        const vi bytes = load_u8(q + 32 + 32 * s + at), fifth = load_u8(q + at);
        return Ramp(scales.scale[2 * s + high], 0, -scales.min[2 * s + high])
            .at(high ? bytes >> 4 : bytes, fifth, broadcast(1 << (2 * s + high)));
    }
};

struct Q6_K {
    static constexpr int VALUES = 256, BYTES = 210, SUBS = 2;  // stretches of 128, 16 values a scale
    float scale[16];
    const uint8_t* q;
    CIVETTA_INLINE_MEMBER void open(const Row&, const uint8_t* b, int64_t) {
        q = b;
        const float d = half_to_float(b + 208);
        // Signed bytes: flip the sign bit, then take 128 away.
        for (int s = 0; s < 16; s += 8) {
            const uint64_t shifted = read<uint64_t>(b + 192 + s) ^ 0x8080808080808080;
            store8(scale + s, (unpack_bytes(shifted) - 128.f) * d);
        }
    }
    CIVETTA_INLINE_MEMBER vf value(int s, int i) const {
        const int quarter = i / HALF, at = WIDTH * (i % HALF);
        const vi low = load_u8(q + 64 * s + 32 * (quarter & 1) + at), high = load_u8(q + 128 + 32 * s + at);
        const vi six = (quarter < 2 ? low & 15 : low >> 4) | ((high >> 2 * quarter & 3) << 4);
        return to_float(six - 32) * scale[8 * s + 2 * quarter + at / 16];
    }
};

}  // namespace
