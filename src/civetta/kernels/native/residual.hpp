// Row-local work around the products: norms, rotary positions, the residual streams, gates, router.
// Outputs are contiguous; see `Ops` for what each computes.
#pragma once

#include "strided.hpp"

namespace civetta {

// y[t, h] = x[t, h] / rms * gain[h * gain_stride ...]; y has x's type.
void rms_norm(const Kernels& kernels, const Strided& x, int64_t rows, int64_t heads, int64_t width,
              const float* gain, int64_t gain_stride, float eps, void* y);

// cos and sin are contiguous [rows, half].
void rope(const Kernels& kernels, const Strided& x, int64_t rows, int64_t heads, int64_t width, const float* cos,
          const float* sin, int64_t half, void* y);

struct Hyper {
    const float* gain;  // [streams, width]
    const Matrix *down, *up, *inject;  // inject may be null
    int64_t streams, width;
    float eps;
};

// x: contiguous float32 [rows, streams, width]; h in float32 or bfloat16; inject [rows, streams].
void hyper_read(const Kernels& kernels, const Hyper& w, const float* x, int64_t rows, void* h, bool h_bf16,
                float* inject);

// out = x + inject * y, all streams; out may not be x.
void hyper_write(const Kernels& kernels, const float* x, const Strided& y, const float* inject, int64_t rows,
                 int64_t streams, int64_t width, float* out);

void swiglu(const Kernels& kernels, const Strided& gate, const Strided& up, int64_t rows, int64_t width, void* y);

struct NgramGate {
    const float *x, *gain_query, *gain_key;  // x: contiguous [rows, streams, width]; gains [streams, width]
    Strided key, value;                      // [rows, streams, width] and [rows, width]
    int64_t rows, streams, width;
    float eps;
};

void ngram_gate(const Kernels& kernels, const NgramGate& g, float* out);

// The `slots` most probable of `count`, by falling probability, ties to the lower id, and their
// probabilities scaled to sum 1. logits: contiguous [rows, count].
void route(const Kernels& kernels, const float* logits, int64_t rows, int64_t count, int64_t slots, int64_t* ids,
           float* weights);

// Mean of `ratio` raw rows, rounded to their type, normed, rounded, turned; raw [blocks, ratio, width].
void index_pool(const Kernels& kernels, const Strided& raw, int64_t blocks, int64_t ratio, int64_t width,
                const float* gain, float eps, const float* cos, const float* sin, int64_t half, void* y);

}  // namespace civetta
