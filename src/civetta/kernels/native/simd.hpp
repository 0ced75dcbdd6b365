// Vectors of the instruction set this translation unit is compiled for. Included once per ISA file,
// inside nothing; everything is `static`, so that no wide-vector code is merged into other files.
//
// Lanes run in parallel over the same scalar sequence, so AVX-512, AVX2 and NEON give equal bits.
// The generic build has no fused multiply-add and may differ from them in the last bit.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Arrays of vectors stay in registers only when the loops over them are gone.
#define CIVETTA_UNROLL _Pragma("GCC unroll 8")
#define CIVETTA_INLINE static inline __attribute__((always_inline))

#define CIVETTA_INLINE_MEMBER inline __attribute__((always_inline))

#if defined(__clang__)
#define CIVETTA_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CIVETTA_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, i8v{__VA_ARGS__})
#endif

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float vf __attribute__((vector_size(WIDTH * 4)));
typedef int32_t vi __attribute__((vector_size(WIDTH * 4)));
typedef float f8v __attribute__((vector_size(32)));
typedef int32_t i8v __attribute__((vector_size(32)));

template <class T>
CIVETTA_INLINE T read(const void* p) {
    T v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

CIVETTA_INLINE vf load(const void* p) { return read<vf>(p); }

CIVETTA_INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

CIVETTA_INLINE vi broadcast(int32_t v) { return vi{} + v; }

CIVETTA_INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }

CIVETTA_INLINE f8v load8(const float* p) {
    f8v v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

CIVETTA_INLINE void store8(float* p, f8v v) { std::memcpy(p, &v, sizeof v); }

CIVETTA_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Keeps a value in a register that the compiler would rather load again at every use.
CIVETTA_INLINE void pin(vf& v) {
#if defined(__AVX2__)
    asm("" : "+v"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#else
    (void)v;
#endif
}

// Eight dot products of 16 lanes each -> their sums: lane j with j + 8, then + 4, + 2, + 1.
#if defined(__AVX512F__)

CIVETTA_INLINE f8v fold(const vf (&s)[8]) {
    __m512 a[4], b[2];
    CIVETTA_UNROLL for (int i = 0; i < 4; ++i) {
        a[i] = _mm512_shuffle_f32x4((__m512)s[2 * i], (__m512)s[2 * i + 1], 0x44) +
               _mm512_shuffle_f32x4((__m512)s[2 * i], (__m512)s[2 * i + 1], 0xee);
    }
    CIVETTA_UNROLL for (int i = 0; i < 2; ++i) {  // products 4 i .. 4 i + 3, four lanes each
        b[i] = _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88) +
               _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd);
    }
    // Products 0 0 4 4 | 1 1 5 5 | 2 2 6 6 | 3 3 7 7.
    const __m512 c = _mm512_shuffle_ps(b[0], b[1], 0x44) + _mm512_shuffle_ps(b[0], b[1], 0xee);
    const __m512 sums = c + _mm512_permute_ps(c, 0xb1);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    return (f8v)_mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums));
}

#else

CIVETTA_INLINE f8v fold(const float (&lanes)[8][16]) {
    f8v s[8], a[4], b[2];
    CIVETTA_UNROLL for (int i = 0; i < 8; ++i) s[i] = load8(lanes[i]) + load8(lanes[i] + 8);
    CIVETTA_UNROLL for (int i = 0; i < 4; ++i) {
        a[i] = CIVETTA_SHUFFLE(s[2 * i], s[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11) +
               CIVETTA_SHUFFLE(s[2 * i], s[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    CIVETTA_UNROLL for (int i = 0; i < 2; ++i) {
        b[i] = CIVETTA_SHUFFLE(a[2 * i], a[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
               CIVETTA_SHUFFLE(a[2 * i], a[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    // b[0] holds products 0 0 2 2 | 1 1 3 3, b[1] products 4 4 6 6 | 5 5 7 7.
    const f8v sums = CIVETTA_SHUFFLE(b[0], b[1], 0, 2, 8, 10, 4, 6, 12, 14) +
                     CIVETTA_SHUFFLE(b[0], b[1], 1, 3, 9, 11, 5, 7, 13, 15);
    return CIVETTA_SHUFFLE(sums, sums, 0, 4, 1, 5, 2, 6, 3, 7);
}

#endif

// WIDTH stored integers as 32-bit lanes.
CIVETTA_INLINE vi load_u8(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
    return vi{p[0], p[1], p[2], p[3]};
#endif
}

CIVETTA_INLINE vi load_i8(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
    return (load_u8(p) ^ 128) - 128;
#endif
}

CIVETTA_INLINE vi load_u16(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    return vi{read<uint16_t>(p), read<uint16_t>(p + 2), read<uint16_t>(p + 4), read<uint16_t>(p + 6)};
#endif
}

// WIDTH nibbles of WIDTH / 2 bytes, low one first; bits above the fourth are not cleared.
CIVETTA_INLINE vi load_nibble_pairs(const uint8_t* p) {
#if defined(__AVX512F__)
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return (vi)_mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));
#elif defined(__AVX2__)
    const __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(read<int32_t>(p)));
    return (vi)_mm256_or_si256(bytes, _mm256_slli_epi64(bytes, 28));
#else
    return vi{p[0], p[0] >> 4, p[1], p[1] >> 4};
#endif
}

// Half precision bits in 32-bit lanes. The exponent is shifted into place and a factor sets the
// bias right, which leaves subnormals exact.
CIVETTA_INLINE vf half_lanes(vi h) {
    const vf finite = (vf)((h & 0x7fff) << 13) * 0x1p112f;
    const vi special = ((h & 0x7c00) == 0x7c00) & 0x7f800000;
    return (vf)((vi)finite | special | (h & 0x8000) << 16);
}

CIVETTA_INLINE vf load_half(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    return half_lanes(load_u16(p));
#endif
}

CIVETTA_INLINE float half_to_float(const uint8_t* p) {
#if defined(__AVX2__)
    return _cvtsh_ss(read<uint16_t>(p));
#else
    return half_lanes(broadcast(read<uint16_t>(p)))[0];
#endif
}

// WIDTH bytes of FP8 E4M3 times 2^-8: half precision has that bias. Its NaN (0x7f, 0xff) come out as
// numbers; see holds_nan.
CIVETTA_INLINE vf load_e4m3(const uint8_t* p) {
#if defined(__AVX512F__)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return (vf)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(~0x4000)));
#elif defined(__AVX2__)
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return (vf)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(~0x4000)));
#else
    const vi bytes = load_u8(p);
    return half_lanes((bytes & 0x7f) << 7 | (bytes & 0x80) << 8);
#endif
}

// Whether one of 128 FP8 E4M3 bytes is NaN.
CIVETTA_INLINE bool holds_nan(const uint8_t* p) {
    typedef uint8_t bytes __attribute__((vector_size(WIDTH * 4)));
    bytes found = {};
    CIVETTA_UNROLL for (int i = 0; i < 128; i += WIDTH * 4) found |= (bytes)((read<bytes>(p + i) & 0x7f) == 0x7f);
#if defined(__AVX512F__)
    return _mm512_test_epi64_mask((__m512i)found, (__m512i)found) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)found, (__m256i)found);
#else
    return read<uint64_t>(&found) | read<uint64_t>(reinterpret_cast<const uint8_t*>(&found) + 8);
#endif
}

// Eight bytes, first one lowest, as numbers.
CIVETTA_INLINE f8v unpack_bytes(uint64_t bytes) {
#if defined(__AVX2__)
    return (f8v)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes))));
#else
    f8v v;
    for (int i = 0; i < 8; ++i) v[i] = static_cast<float>(bytes >> 8 * i & 255);
    return v;
#endif
}

// Lane j of vector i is 1 << (WIDTH * i + j).
CIVETTA_INLINE vi lane_bits(int i) {
    vi bits;
    for (int j = 0; j < WIDTH; ++j) bits[j] = static_cast<int32_t>(1u << j);
    return bits << (WIDTH * i);
}

// 16 numbers, times a factor; `at` reads the low four bits of each lane.
struct Table {
#if defined(__AVX512F__)
    __m512 entries;
    CIVETTA_INLINE_MEMBER explicit Table(const float* v, float factor = 1.f) : entries(_mm512_loadu_ps(v) * factor) {}
    CIVETTA_INLINE_MEMBER vf at(vi index) const { return (vf)_mm512_permutexvar_ps((__m512i)index, entries); }
#elif defined(__AVX2__)
    __m256 low, high;
    CIVETTA_INLINE_MEMBER explicit Table(const float* v, float factor = 1.f)
        : low(_mm256_loadu_ps(v) * factor), high(_mm256_loadu_ps(v + 8) * factor) {}
    CIVETTA_INLINE_MEMBER vf at(vi index) const {
        const __m256i i = (__m256i)index;
        return (vf)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i),
                                    _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
    }
#else
    const float* entries;
    float factor;
    CIVETTA_INLINE_MEMBER explicit Table(const float* v, float f = 1.f) : entries(v), factor(f) {}
    CIVETTA_INLINE_MEMBER vf at(vi index) const {
        const vi i = index & 15;
        return vf{entries[i[0]], entries[i[1]], entries[i[2]], entries[i[3]]} * factor;
    }
#endif
};

// factor * (q + base) + offset for q of four bits, or five with the fifth where bits & mask is set.
struct Ramp {
#if defined(__AVX512F__)
    __m512 low, high;
    CIVETTA_INLINE_MEMBER Ramp(float factor, int base, float offset) {
        const vi steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        low = (__m512)(to_float(steps + base) * factor + offset);
        high = (__m512)(to_float(steps + base + 16) * factor + offset);
    }
    CIVETTA_INLINE_MEMBER vf at(vi q) const { return (vf)_mm512_permutexvar_ps((__m512i)q, low); }
    CIVETTA_INLINE_MEMBER vf at(vi q, vi bits, vi mask) const {
        const __mmask16 fifth = _mm512_test_epi32_mask((__m512i)bits, (__m512i)mask);
        return (vf)_mm512_mask_permutexvar_ps((__m512)at(q), fifth, (__m512i)q, high);
    }
#else
    float factor, offset;
    int base;
    CIVETTA_INLINE_MEMBER Ramp(float f, int b, float o) : factor(f), offset(o), base(b) {}
    CIVETTA_INLINE_MEMBER vf scaled(vi q) const { return to_float(q + base) * factor + offset; }
    CIVETTA_INLINE_MEMBER vf at(vi q) const { return scaled(q & 15); }
    CIVETTA_INLINE_MEMBER vf at(vi q, vi bits, vi mask) const {
        return scaled((q & 15) | (((bits & mask) != 0) & 16));
    }
#endif
};

// To the nearest bfloat16, ties to even, still float32; NaN stays NaN.
CIVETTA_INLINE vf round_lanes(vf v) {
    const vi bits = (vi)v;
    return v == v ? (vf)((bits + 0x7fff + (bits >> 16 & 1)) & static_cast<int32_t>(0xffff0000)) : v;
}

}  // namespace
