// The multiply: for one (t, n), lane j of 16 takes columns j, j + 16, ... in order with fused
// multiply-add, then the lanes are folded in one fixed tree. Nothing in that sequence knows how many
// rows x has or which tile height serves them, so a row's bits never depend on its company.
#pragma once

#include "decode.hpp"
#include "matrix.hpp"
#include "simd.hpp"

namespace {

using civetta::LANES;
using civetta::PANEL;

// WIDTH = 16: one accumulator a dot product. Narrower vectors run over the lanes in several passes,
// each over as many weight rows as the register file holds.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int GROUP = 8, DOTS = 8;
#else
constexpr int GROUP = 4, DOTS = 4;
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

// Few x rows: weights are decoded in registers, DOTS rows abreast. A format's values come in column
// order, so each lane meets the same products in the same order as from a decoded panel.
template <class F, bool ROUND, int ROWS>
static void dots_as(const Matrix& w, int64_t n, const float* const* x, float* c, int64_t ldc) {
    constexpr int VECTORS = F::VALUES / F::SUBS / WIDTH, PARTS = LANES / WIDTH;
    constexpr int64_t STEP = civetta::CHUNK / F::VALUES;
    const int64_t blocks = w.cols / F::VALUES;
    const Rows rows(w, n);
    for (int64_t b0 = 0; b0 < blocks; b0 += STEP) {
        const int64_t b1 = b0 + STEP < blocks ? b0 + STEP : blocks;
        prefetch_blocks<F>(w, n + PANEL, b0, b1);
#if !defined(__AVX512F__)
        alignas(64) float lanes[ROWS][PANEL][LANES];
#endif
        for (int g = 0; g < PANEL; g += DOTS) {
            vf acc[ROWS][DOTS][PARTS];
            CIVETTA_UNROLL for (int t = 0; t < ROWS; ++t) {
                CIVETTA_UNROLL for (int r = 0; r < DOTS; ++r) {
                    CIVETTA_UNROLL for (int p = 0; p < PARTS; ++p) acc[t][r][p] = vf{};
                }
            }
            for (int64_t b = b0; b < b1; ++b) {
                F f[DOTS];
                CIVETTA_UNROLL for (int r = 0; r < DOTS; ++r) {
                    f[r].open(rows[g + r], rows[g + r].data + b * F::BYTES, b);
                }
                for (int s = 0; s < F::SUBS; ++s) {
                    const int64_t k = b * F::VALUES + s * VECTORS * WIDTH;
                    CIVETTA_UNROLL for (int i = 0; i < VECTORS; ++i) {
                        vf xv[ROWS];
                        CIVETTA_UNROLL for (int t = 0; t < ROWS; ++t) xv[t] = load(x[t] + k + i * WIDTH);
                        CIVETTA_UNROLL for (int r = 0; r < DOTS; ++r) {
                            vf v = f[r].value(s, i);
                            if (ROUND) v = round_lanes(v);
                            CIVETTA_UNROLL for (int t = 0; t < ROWS; ++t) {
                                acc[t][r][i % PARTS] = fma(xv[t], v, acc[t][r][i % PARTS]);
                            }
                        }
                    }
                }
            }
            CIVETTA_UNROLL for (int t = 0; t < ROWS; ++t) {
#if defined(__AVX512F__)
                vf sums[DOTS];
                CIVETTA_UNROLL for (int r = 0; r < DOTS; ++r) sums[r] = acc[t][r][0];
                store8(c + t * ldc, load8(c + t * ldc) + fold(sums));
#else
                CIVETTA_UNROLL for (int r = 0; r < DOTS; ++r) {
                    CIVETTA_UNROLL for (int p = 0; p < PARTS; ++p) {
                        store(&lanes[t][g + r][p * WIDTH], acc[t][r][p]);
                    }
                }
#endif
            }
        }
#if !defined(__AVX512F__)
        for (int t = 0; t < ROWS; ++t) store8(c + t * ldc, load8(c + t * ldc) + fold(lanes[t]));
#endif
    }
}

template <class F, bool ROUND>
static void dots_of(const Matrix& w, int64_t n, const float* const* x, int64_t rows, float* c, int64_t ldc) {
    if (rows == 1) return dots_as<F, ROUND, 1>(w, n, x, c, ldc);
    if (rows == 2) return dots_as<F, ROUND, 2>(w, n, x, c, ldc);
    dots_as<F, ROUND, 3>(w, n, x, c, ldc);
}

static void dots(const Matrix& w, bool round, int64_t n, const float* const* x, int64_t rows, float* c, int64_t ldc) {
    visit(w.format, [&]<class F>() {
        if constexpr (Whole<F>) {
            __builtin_trap();  // see matrix.hpp
        } else {
            if (round && w.format != civetta::Format::BF16) return dots_of<F, true>(w, n, x, rows, c, ldc);
            dots_of<F, false>(w, n, x, rows, c, ldc);
        }
    });
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
