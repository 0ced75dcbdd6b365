// The multiply: for one (t, n), lane j of 16 takes columns j, j + 16, ... in order with fused
// multiply-add, then the lanes are folded in one fixed tree. Nothing in that sequence knows how many
// rows x has or which tile height serves them, so a row's bits never depend on its company.
#pragma once

#include "matrix.hpp"
#include "simd.hpp"

namespace {

using civetta::LANES;
using civetta::PANEL;

// WIDTH = 16: one accumulator a dot product. Narrower vectors run over the lanes in several passes,
// each over as many weight rows as the register file holds.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int GROUP = 8;
#else
constexpr int GROUP = 4;
#endif

template <int ROWS>
CIVETTA_INLINE void accumulate(const float* const* x, const float* const* w, int64_t offset, int64_t count,
                               vf (&acc)[ROWS][GROUP]) {
    const float *xp[ROWS], *wp[GROUP];
    CIVETTA_UNROLL for (int t = 0; t < ROWS; ++t) xp[t] = x[t] + offset;
    CIVETTA_UNROLL for (int n = 0; n < GROUP; ++n) wp[n] = w[n] + offset;
    CIVETTA_UNROLL for (int t = 0; t < ROWS; ++t) {
        CIVETTA_UNROLL for (int n = 0; n < GROUP; ++n) acc[t][n] = vf{};
    }
    for (int64_t k = 0; k < count; k += LANES) {
        vf xv[ROWS];
        CIVETTA_UNROLL for (int t = 0; t < ROWS; ++t) xv[t] = load(xp[t] + k);
        CIVETTA_UNROLL for (int n = 0; n < GROUP; ++n) {
            vf wv = load(wp[n] + k);
            if (ROWS > 1) pin(wv);
            CIVETTA_UNROLL for (int t = 0; t < ROWS; ++t) acc[t][n] = fma(xv[t], wv, acc[t][n]);
        }
    }
}

// c[t * ldc + n] += x[t] . w[n] over `count` columns.
template <int ROWS>
static void tile(const float* const* x, const float* const* w, int64_t count, float* c, int64_t ldc) {
#if defined(__AVX512F__)
    vf acc[ROWS][GROUP];
    accumulate<ROWS>(x, w, 0, count, acc);
    CIVETTA_UNROLL for (int t = 0; t < ROWS; ++t) store8(c + t * ldc, load8(c + t * ldc) + fold(acc[t]));
#else
    alignas(64) float lanes[ROWS][PANEL][LANES];
    for (int p = 0; p < LANES; p += WIDTH) {
        for (int g = 0; g < PANEL; g += GROUP) {
            vf acc[ROWS][GROUP];
            accumulate<ROWS>(x, w + g, p, count, acc);
            CIVETTA_UNROLL for (int t = 0; t < ROWS; ++t) {
                CIVETTA_UNROLL for (int n = 0; n < GROUP; ++n) store(&lanes[t][g + n][p], acc[t][n]);
            }
        }
    }
    for (int t = 0; t < ROWS; ++t) store8(c + t * ldc, load8(c + t * ldc) + fold(lanes[t]));
#endif
}

static void tiles(const float* const* x, int64_t rows, int64_t k0, const float* const* w, int64_t count,
                  float* c, int64_t ldc) {
    for (int64_t t = 0; t < rows;) {
        const int64_t left = rows - t;
        const float* at[3];
        for (int64_t i = 0; i < 3 && i < left; ++i) at[i] = x[t + i] + k0;
        if (left > 4 || left == 3) {
            tile<3>(at, w, count, c + t * ldc, ldc);
            t += 3;
        } else if (left > 1) {
            tile<2>(at, w, count, c + t * ldc, ldc);
            t += 2;
        } else {
            tile<1>(at, w, count, c + t * ldc, ldc);
            t += 1;
        }
    }
}

}  // namespace
