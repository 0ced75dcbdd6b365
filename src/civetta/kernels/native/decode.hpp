// Stored blocks to float32 vectors. Layouts are ggml's and, for FP8 and NVFP4, model.md A.7 and A.8.
// Each product and sum is rounded as in the plain formula (files are built with -ffp-contract=off),
// so values equal those of the Python reference bit for bit.
//
// A format is a struct with VALUES a block in BYTES bytes, cut into SUBS stretches; `open` reads a
// block's header and `value(s, i)` is vector i of stretch s. Everything else is written once.
#pragma once

#include "matrix.hpp"
#include "simd.hpp"

namespace {

using civetta::Matrix;

// One row of a matrix, with its scales where they lie outside the blocks.
struct Row {
    const uint8_t* data;
    const void* scales;
    float scale_2;

    CIVETTA_INLINE_MEMBER Row(const Matrix& w, int64_t n) : data(w.data + n * w.row_stride), scales(w.scale), scale_2(w.scale_2) {
        if (w.format == civetta::Format::F8_E4M3 && scales != nullptr) {
            scales = static_cast<const float*>(scales) + (w.row_offset + n) / 128 * w.scale_stride;
        } else if (w.format == civetta::Format::NVFP4) {
            scales = static_cast<const uint8_t*>(scales) + n * w.scale_stride;
        }
    }
};

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
    static constexpr int VALUES = 32, BYTES = 32, SUBS = 1;
    const uint8_t* q;
    float scale;
    CIVETTA_INLINE_MEMBER void open(const Row& row, const uint8_t* b, int64_t block) {
        q = b;
        scale = row.scales != nullptr ? static_cast<const float*>(row.scales)[block / 4] : row.scale_2;
    }
    CIVETTA_INLINE_MEMBER vf value(int, int i) const { return e4m3(load_u8(q + WIDTH * i)) * scale; }
};

struct NVFP4 {
    static constexpr int VALUES = 16, BYTES = 8, SUBS = 1;
    const uint8_t* q;
    vf scale;
    float scale_2;
    CIVETTA_INLINE_MEMBER void open(const Row& row, const uint8_t* b, int64_t block) {
        q = b;
        scale = e4m3(broadcast(static_cast<const uint8_t*>(row.scales)[block]));
        scale_2 = row.scale_2;
    }
    CIVETTA_INLINE_MEMBER vf value(int, int i) const {
        static constexpr float e2m1[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                           -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
        return Table(e2m1).at(load_nibble_pairs(q + WIDTH / 2 * i)) * scale * scale_2;
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
        const uint32_t high = read<uint16_t>(b + 2), low = read<uint32_t>(b + 4);
        CIVETTA_UNROLL for (int s = 0; s < 8; ++s) {
            const int six = static_cast<int>((low >> 4 * s & 15) | (high >> 2 * s & 3) << 4);
            scale[s] = d * static_cast<float>(six - 32);
        }
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
        const uint32_t p = read<uint32_t>(b + 4), m = read<uint32_t>(b + 8), rest = read<uint32_t>(b + 12);
        const uint32_t bytes[4] = {p & 0x3f3f3f3f, (rest & 0x0f0f0f0f) | (p >> 2 & 0x30303030),
                                   m & 0x3f3f3f3f, (rest >> 4 & 0x0f0f0f0f) | (m >> 2 & 0x30303030)};
        uint8_t six[16];
        std::memcpy(six, bytes, 16);
        for (int s = 0; s < 8; ++s) scale[s] = d * static_cast<float>(six[s]);
        for (int s = 0; s < 8; ++s) min[s] = dmin * static_cast<float>(six[8 + s]);
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
        for (int s = 0; s < 16; ++s) scale[s] = d * static_cast<float>(read<int8_t>(b + 192 + s));
    }
    CIVETTA_INLINE_MEMBER vf value(int s, int i) const {
        const int quarter = i / HALF, at = WIDTH * (i % HALF);
        const vi low = load_u8(q + 64 * s + 32 * (quarter & 1) + at), high = load_u8(q + 128 + 32 * s + at);
        const vi six = (quarter < 2 ? low & 15 : low >> 4) | ((high >> 2 * quarter & 3) << 4);
        return to_float(six - 32) * scale[8 * s + 2 * quarter + at / 16];
    }
};

template <class Visitor>
CIVETTA_INLINE void visit(civetta::Format format, const Visitor& visitor) {
    using civetta::Format;
    switch (format) {
        case Format::F32: return visitor.template operator()<F32>();
        case Format::F16: return visitor.template operator()<F16>();
        case Format::BF16: return visitor.template operator()<BF16>();
        case Format::Q4_0: return visitor.template operator()<Q4_0>();
        case Format::Q4_1: return visitor.template operator()<Q4_1>();
        case Format::Q5_0: return visitor.template operator()<Q5_0>();
        case Format::Q5_1: return visitor.template operator()<Q5_1>();
        case Format::Q8_0: return visitor.template operator()<Q8_0>();
        case Format::Q4_K: return visitor.template operator()<Q4_K>();
        case Format::Q5_K: return visitor.template operator()<Q5_K>();
        case Format::Q6_K: return visitor.template operator()<Q6_K>();
        case Format::IQ4_NL: return visitor.template operator()<IQ4_NL>();
        case Format::IQ4_XS: return visitor.template operator()<IQ4_XS>();
        case Format::F8_E4M3: return visitor.template operator()<F8_E4M3>();
        case Format::NVFP4: return visitor.template operator()<NVFP4>();
    }
}

template <class F>
CIVETTA_INLINE void decode_block(const Row& row, const uint8_t* b, int64_t block, float* out) {
    constexpr int VECTORS = F::VALUES / F::SUBS / WIDTH;
    F f;
    f.open(row, b, block);
    for (int s = 0; s < F::SUBS; ++s) {
        CIVETTA_UNROLL for (int i = 0; i < VECTORS; ++i) store(out + (s * VECTORS + i) * WIDTH, f.value(s, i));
    }
}

// out[0, count) = w[n, k0 .. k0 + count); k0 is a whole number of blocks.
static void decode(const Matrix& w, int64_t n, int64_t k0, int64_t count, float* out) {
    const Row row(w, n);
    visit(w.format, [&]<class F>() {
        int64_t block = k0 / F::VALUES;
        for (; count >= F::VALUES; count -= F::VALUES, out += F::VALUES, ++block) {
            decode_block<F>(row, row.data + block * F::BYTES, block, out);
        }
        if (count > 0) {  // of a plain type: the end of a row in a block of its own
            uint8_t bytes[F::BYTES] = {};
            float values[F::VALUES];
            std::memcpy(bytes, row.data + block * F::BYTES, count * (F::BYTES / F::VALUES));
            decode_block<F>(row, bytes, block, values);
            std::memcpy(out, values, count * sizeof(float));
        }
    });
}

}  // namespace
