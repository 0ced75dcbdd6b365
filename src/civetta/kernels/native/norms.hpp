// Norms, rotary positions, gates and the short convolution, one row at a time. A sum over a row goes
// through 16 partial sums (lane j takes elements j, j + 16, ...) folded in one tree, whatever the
// vector width; the rest is elementwise. So a row's bits depend on the row alone.
#pragma once

#include <cmath>

#include "rows.hpp"

namespace {

constexpr int SUM_PARTS = static_cast<int>(civetta::LANES) / WIDTH;

// 16 partial sums of one row.
struct Sums {
    vf part[SUM_PARTS];
    CIVETTA_INLINE_MEMBER Sums() {
        CIVETTA_UNROLL for (int p = 0; p < SUM_PARTS; ++p) part[p] = vf{};
    }
    // Lane j with j + 8, then + 4, + 2, + 1.
    CIVETTA_INLINE_MEMBER float fold_all() const {
        float lanes[civetta::LANES];
        CIVETTA_UNROLL for (int p = 0; p < SUM_PARTS; ++p) store(lanes + p * WIDTH, part[p]);
        for (int step = civetta::LANES / 2; step > 0; step /= 2) {
            for (int j = 0; j < step; ++j) lanes[j] += lanes[j + step];
        }
        return lanes[0];
    }
};

// Calls term(i, lanes, part) for every vector of a row, parts in turn.
template <class Term>
CIVETTA_INLINE float sum_lanes(int64_t count, const Term& term) {
    Sums sums;
    int64_t i = 0;
    for (; i + civetta::LANES <= count; i += civetta::LANES) {
        CIVETTA_UNROLL for (int p = 0; p < SUM_PARTS; ++p) term(i + p * WIDTH, WIDTH, sums.part[p]);
    }
    for (int p = 0; i < count; i += WIDTH, ++p) term(i, count - i < WIDTH ? count - i : WIDTH, sums.part[p]);
    return sums.fold_all();
}

static float dot(const float* a, const float* b, int64_t count) {
    return sum_lanes(count, [=](int64_t i, int64_t lanes, vf& sum) {
        sum = fma(load_some(a + i, lanes), load_some(b + i, lanes), sum);
    });
}

CIVETTA_INLINE float rms_scale(const float* x, int64_t width, float eps) {
    return 1.f / std::sqrt(dot(x, x, width) / static_cast<float>(width) + eps);
}

static void norm(const float* __restrict x, const float* __restrict gain, int64_t width, float eps,
                 float* __restrict y) {
    const float scale = rms_scale(x, width, eps);
    for (int64_t i = 0; i < width; ++i) y[i] = x[i] * scale * gain[i];
}

// x over its length, times a factor.
static void unit(const float* __restrict x, int64_t width, float eps, float factor, float* __restrict y) {
    const float scale = 1.f / std::sqrt(dot(x, x, width) + eps);
    for (int64_t i = 0; i < width; ++i) y[i] = x[i] * scale * factor;
}

CIVETTA_INLINE vf sigmoid(vf x) {
    vf z = -x;
    z = z > 88.f ? vf{} + 88.f : z;
    z = z < -87.f ? vf{} - 87.f : z;
    return x == x ? 1.f / (exp_bounded(z) + 1.f) : x;
}

static void gated_norm(const float* o, const float* z, const float* gain, int64_t width, float eps, float* y) {
    const float scale = rms_scale(o, width, eps);
    for_lanes(width, [=](int64_t i, int64_t lanes) {
        const vf normed = load_some(o + i, lanes) * scale * load_some(gain + i, lanes);
        store_some(y + i, normed * sigmoid(load_some(z + i, lanes)), lanes);
    });
}

static void rope(const float* __restrict x, const float* __restrict cos, const float* __restrict sin, int64_t half,
                 int64_t width, float* __restrict y) {
    for (int64_t i = 0; i < half; ++i) {
        y[i] = x[i] * cos[i] - x[half + i] * sin[i];
        y[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
    }
    for (int64_t i = 2 * half; i < width; ++i) y[i] = x[i];
}

static void silu_over(const float* x, float divisor, float* y, int64_t count) {
    for_lanes(count, [=](int64_t i, int64_t lanes) {
        store_some(y + i, silu(load_some(x + i, lanes) / divisor), lanes);
    });
}

static void sigmoid_over(const float* x, float divisor, float* y, int64_t count) {
    for_lanes(count, [=](int64_t i, int64_t lanes) {
        store_some(y + i, sigmoid(load_some(x + i, lanes) / divisor), lanes);
    });
}

template <int COUNT>
CIVETTA_INLINE void conv_taps(const float* const* taps, const float* __restrict w, int64_t count, int64_t channels,
                              float* __restrict y) {
    const int64_t n = COUNT > 0 ? COUNT : count;
    const float* __restrict first = taps[0];
    for (int64_t c = 0; c < channels; ++c) y[c] = first[c] * w[c * n];
    for (int64_t k = 1; k < n; ++k) {
        const float* __restrict x = taps[k];
        for (int64_t c = 0; c < channels; ++c) y[c] = y[c] + x[c] * w[c * n + k];
    }
}

// silu of the sum of taps[k][c] * w[c * count + k], oldest tap first.
static void conv(const float* const* taps, const float* w, int64_t count, int64_t channels, float* y) {
    constexpr int64_t BLOCK = 1024;  // channels whose sums stay in the first cache
    for (int64_t c = 0; c < channels; c += BLOCK) {
        const int64_t width = channels - c < BLOCK ? channels - c : BLOCK;
        const float* at[16] = {};
        for (int64_t k = 0; k < count && k < 16; ++k) at[k] = taps[k] + c;
        if (count == 4) {
            conv_taps<4>(at, w + c * 4, 4, width, y + c);
        } else {
            conv_taps<0>(at, w + c * count, count, width, y + c);
        }
        silu_over(y + c, 1.f, y + c, width);
    }
}

static void mix_streams(const float* gate, const float* x, int64_t streams, int64_t width, float* h) {
    for_lanes(width, [=](int64_t i, int64_t lanes) {
        vf total = {};
        for (int64_t s = 0; s < streams; ++s) {
            const int64_t at = s * width + i;
            const vf gated = sigmoid(load_some(gate + at, lanes)) * load_some(x + at, lanes);
            total = s == 0 ? gated : total + gated;
        }
        store_some(h + i, total / static_cast<float>(streams), lanes);
    });
}

static void write_stream(const float* __restrict x, const float* __restrict y, float inject, float* __restrict out,
                         int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = x[i] + inject * y[i];
}

static void multiply_by(const float* x, float factor, float* y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) y[i] = x[i] * factor;
}

}  // namespace
