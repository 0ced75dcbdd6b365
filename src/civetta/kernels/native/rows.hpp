// Elementwise work between products: the same operations for every element of a row, since a tail
// shorter than a vector goes through a padded one.
#pragma once

#include "decode.hpp"
#include "matrix.hpp"
#include "simd.hpp"

namespace {

template <class Operation>
CIVETTA_INLINE void for_lanes(int64_t count, const Operation& operation) {
    for (int64_t i = 0; i < count; i += WIDTH) operation(i, count - i < WIDTH ? count - i : WIDTH);
}

CIVETTA_INLINE vf load_some(const float* p, int64_t lanes) {
    if (lanes == WIDTH) return load(p);
    vf v = {};
    std::memcpy(&v, p, lanes * sizeof(float));
    return v;
}

CIVETTA_INLINE void store_some(float* p, vf v, int64_t lanes) { std::memcpy(p, &v, lanes * sizeof(float)); }

static void round_bf16(float* values, int64_t count) {
    for_lanes(count, [=](int64_t i, int64_t lanes) {
        store_some(values + i, round_lanes(load_some(values + i, lanes)), lanes);
    });
}

static void widen(const uint16_t* __restrict bf16, float* __restrict out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = static_cast<uint32_t>(bf16[i]) << 16;
        std::memcpy(out + i, &bits, 4);
    }
}

static void narrow(const float* values, uint16_t* bf16, int64_t count) {
    for_lanes(count, [=](int64_t i, int64_t lanes) {
        typedef uint16_t hv __attribute__((vector_size(WIDTH * 2)));
        const vi bits = (vi)round_lanes(load_some(values + i, lanes)) >> 16;
        const hv halves = __builtin_convertvector(bits, hv);
        std::memcpy(bf16 + i, &halves, lanes * sizeof(uint16_t));
    });
}

static void add_scaled(const float* __restrict values, float factor, float* __restrict sum, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sum[i] += values[i] * factor;
}

// exp(z) for z in [-87, 88], within 1.5 units in the last place: z = n ln 2 + r, Taylor to r^7.
CIVETTA_INLINE vf exp_bounded(vf z) {
    const float magic = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
    const vf n = (z * 0x1.715476p+0f + magic) - magic;
    vf r = fma(n, vf{} - 0x1.62ep-1f, z);
    r = fma(n, vf{} - 0x1.0bfbe8p-15f, r);
    vf sum = vf{} + 1.f / 5040;
    const float terms[] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f};
    for (float term : terms) sum = fma(sum, r, vf{} + term);
    return sum * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}

CIVETTA_INLINE vf silu(vf x) {
    vf z = -x;
    z = z > 88.f ? vf{} + 88.f : z;
    z = z < -87.f ? vf{} - 87.f : z;
    return x == x ? x / (exp_bounded(z) + 1.f) : x;
}

static void swiglu(const float* gate, const float* up, float* out, int64_t count) {
    for_lanes(count, [=](int64_t i, int64_t lanes) {
        store_some(out + i, silu(load_some(gate + i, lanes)) * load_some(up + i, lanes), lanes);
    });
}

}  // namespace
