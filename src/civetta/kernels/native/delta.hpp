// The gated delta-net mixer between its products: short convolution, gates, chunked delta rule, norm.
// Outputs are contiguous; see `Ops` and gdn/reference.py for the formulas.
#pragma once

#include "strided.hpp"

namespace civetta {

// y[t] = silu(sum over k of row t + k * dilation of (history, u) * w[:, k]); history holds
// (taps - 1) * dilation rows before u; at most MAX_TAPS taps; y has u's type.
constexpr int64_t MAX_TAPS = 16;
void short_conv(const Kernels& kernels, const Strided& u, const Strided& history, const float* w, int64_t taps,
                int64_t dilation, int64_t rows, int64_t channels, void* y);

// log_decay = scale * softplus(a + bias), beta = sigmoid(b); contiguous [rows, heads].
void delta_gates(const Kernels& kernels, const float* a, const float* b, const float* scale, const float* bias,
                 int64_t rows, int64_t heads, float* log_decay, float* beta);

struct Delta {
    Strided q, k, v;                // [rows, key_heads or value_heads, width]
    const float *log_decay, *beta;  // [rows, value_heads], rows gate_stride apart
    int64_t gate_stride;
    const float* state;  // contiguous [value_heads, width, width]
    int64_t rows, key_heads, value_heads, width;
    bool tiled;
    int64_t first_new, fold;
    void* out;       // [rows - first_new, value_heads, width], v's type
    float* state_out;  // after row `fold`; unused where that is 0
};

void delta_chunks(const Kernels& kernels, const Delta& d);

// y = gain * o / rms * sigmoid(z); y has z's type.
void delta_norm(const Kernels& kernels, const Strided& o, const Strided& z, const float* gain, int64_t rows,
                int64_t heads, int64_t width, float eps, void* y);

}  // namespace civetta
