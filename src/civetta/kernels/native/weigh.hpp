// What attention and the delta rule share: exponentials of a row and weighted sums of rows. An output
// element adds its terms in ascending order with fused multiply-add, whatever tile it falls into.
#pragma once

#include "norms.hpp"

namespace {

// exp(z) for z <= 0; below -87 it is 0, NaN stays NaN.
CIVETTA_INLINE vf exp_down(vf z) {
    const vf e = exp_bounded(z < -87.f ? vf{} - 87.f : z);
    return z < -87.f ? vf{} : e;
}

static float largest(const float* x, int64_t count) {
    float most = x[0];
    int64_t i = 0;
    if (count >= WIDTH) {
        vf best = load(x);
        for (i = WIDTH; i + WIDTH <= count; i += WIDTH) {
            const vf v = load(x + i);
            best = v > best ? v : best;
        }
        for (int j = 0; j < WIDTH; ++j) most = best[j] > most ? best[j] : most;
    }
    for (; i < count; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

static float exp_sum(const float* x, float shift, float* p, int64_t count) {
    return sum_lanes(count, [=](int64_t i, int64_t lanes, vf& sum) {
        vf e = exp_down(load_some(x + i, lanes) - shift);
        store_some(p + i, e, lanes);
        if (lanes < WIDTH) e = load_some(p + i, lanes);
        sum = sum + e;
    });
}

static void exp_fall(float top, const float* x, float* p, int64_t count) {
    for_lanes(count, [=](int64_t i, int64_t lanes) {
        store_some(p + i, exp_down(top - load_some(x + i, lanes)), lanes);
    });
}

template <int ROWS, int VECTORS>
CIVETTA_INLINE void weigh_tile(const float* const* p, int64_t n0, int64_t n1, const float* const* v, int64_t at,
                               float* const* out) {
    vf sum[ROWS][VECTORS];
    CIVETTA_UNROLL for (int r = 0; r < ROWS; ++r) {
        CIVETTA_UNROLL for (int i = 0; i < VECTORS; ++i) sum[r][i] = load(out[r] + at + i * WIDTH);
    }
    const float* weight[ROWS];
    CIVETTA_UNROLL for (int r = 0; r < ROWS; ++r) weight[r] = p[r];
    for (int64_t n = n0; n < n1; ++n) {
        const float* row = v[n] + at;
        vf x[VECTORS];
        CIVETTA_UNROLL for (int i = 0; i < VECTORS; ++i) x[i] = load(row + i * WIDTH);
        CIVETTA_UNROLL for (int r = 0; r < ROWS; ++r) {
            const vf factor = vf{} + weight[r][n];
            CIVETTA_UNROLL for (int i = 0; i < VECTORS; ++i) sum[r][i] = fma(factor, x[i], sum[r][i]);
        }
    }
    CIVETTA_UNROLL for (int r = 0; r < ROWS; ++r) {
        CIVETTA_UNROLL for (int i = 0; i < VECTORS; ++i) store(out[r] + at + i * WIDTH, sum[r][i]);
    }
}

template <int ROWS>
static void weigh_rows(const float* const* p, int64_t n0, int64_t n1, const float* const* v, int64_t width,
                       float* const* out) {
    int64_t at = 0;
#if defined(__AVX512F__)
    for (; at + 64 <= width; at += 64) weigh_tile<ROWS, 4>(p, n0, n1, v, at, out);
    for (; at + 32 <= width; at += 32) weigh_tile<ROWS, 2>(p, n0, n1, v, at, out);
#endif
    for (; at < width; at += civetta::LANES) weigh_tile<ROWS, SUM_PARTS>(p, n0, n1, v, at, out);
}

static void weigh(const float* const* p, int64_t rows, int64_t n0, int64_t n1, const float* const* v, int64_t width,
                  float* const* out) {
    if (n0 >= n1) return;
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) weigh_rows<4>(p + r, n0, n1, v, width, out + r);
    if (rows - r == 3) {
        weigh_rows<3>(p + r, n0, n1, v, width, out + r);
    } else if (rows - r == 2) {
        weigh_rows<2>(p + r, n0, n1, v, width, out + r);
    } else if (rows - r == 1) {
        weigh_rows<1>(p + r, n0, n1, v, width, out + r);
    }
}

}  // namespace
