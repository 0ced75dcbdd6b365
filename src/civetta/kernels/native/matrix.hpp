// A weight matrix as it lies in memory, and the table of kernels that one instruction set offers.
//
// Shapes: a product is y[t, n] = sum_k x[t, k] * w[n, k]. Weights are decoded to float32 in panels
// of PANEL rows by at most CHUNK columns; both constants are part of the reduction order.
#pragma once

#include <cstdint>

namespace civetta {

constexpr int64_t PANEL = 8;    // weight rows that one tile multiplies
constexpr int64_t LANES = 16;   // partial sums of one dot product
constexpr int64_t CHUNK = 512;  // columns whose partial sums are folded before the next ones start

enum class Format : int {
    F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, F8_E4M3, NVFP4, TQ2_0, Q2_K,
    Q3_K, MXFP4,
    // Decoded a whole block at once: `dots` does not take these.
    TQ1_0, GGML_NVFP4, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S,
};
constexpr Format FIRST_WHOLE = Format::TQ1_0;

struct Matrix {
    Format format;
    int64_t rows, cols;
    const uint8_t* data;   // row n starts at data + n * row_stride, at any alignment
    int64_t row_stride;    // bytes from one row to the next
    const void* scale;     // F8_E4M3: float32 a 128x128 block; NVFP4: e4m3 bytes; IQ1 to IQ3: int8 points of
                           // the grid; else unused
    int64_t scale_stride;  // elements between rows of `scale`; 0 where they share one
    float scale_2;         // global factor of NVFP4
    int64_t row_offset;    // row of the scaled tensor that row 0 is
};

struct Kernels {
    const char* name;
    int64_t (*block_values)(Format format);
    // out[r * stride + k - k0] = w[n + r, k] as float32 for r < PANEL and k in [k0, k0 + count), k0 a
    // multiple of CHUNK; past the last row that one again. `round`: rounded to bfloat16.
    void (*decode)(const Matrix& w, bool round, int64_t n, int64_t k0, int64_t count, float* out, int64_t stride);
    // c[t * ldc + r] += x[t] . w[n + r], r < PANEL, for one to three rows, all columns; w.cols is a
    // whole number of blocks, w.format before FIRST_WHOLE.
    void (*dots)(const Matrix& w, bool round, int64_t n, const float* const* x, int64_t rows, float* c,
                 int64_t ldc);
    // c[t * ldc + n] += the dot product of x[t][k0 ..] and w[n], n < PANEL, over `count` columns, a
    // multiple of LANES.
    void (*tiles)(const float* const* x, int64_t rows, int64_t k0, const float* const* w,
                  int64_t count, float* c, int64_t ldc);
    void (*round_bf16)(float* values, int64_t count);  // in place, to nearest even
    void (*widen)(const uint16_t* bf16, float* out, int64_t count);
    void (*narrow)(const float* values, uint16_t* bf16, int64_t count);
    void (*swiglu)(const float* gate, const float* up, float* out, int64_t count);
    void (*add_scaled)(const float* values, float factor, float* sum, int64_t count);

    // Rows of float32, any width; see norms.hpp and weigh.hpp.
    float (*dot)(const float* a, const float* b, int64_t count);
    void (*norm)(const float* x, const float* gain, int64_t width, float eps, float* y);
    void (*unit)(const float* x, int64_t width, float eps, float factor, float* y);
    void (*gated_norm)(const float* o, const float* z, const float* gain, int64_t width, float eps, float* y);
    void (*rope)(const float* x, const float* cos, const float* sin, int64_t half, int64_t width, float* y);
    void (*conv)(const float* const* taps, const float* w, int64_t count, int64_t channels, float* y);
    void (*silu_over)(const float* x, float divisor, float* y, int64_t count);     // silu(x / divisor)
    void (*sigmoid_over)(const float* x, float divisor, float* y, int64_t count);  // sigmoid(x / divisor)
    // h = sum over streams of gate * x, divided by their number; gate holds logits.
    void (*mix_streams)(const float* gate, const float* x, int64_t streams, int64_t width, float* h);
    void (*write_stream)(const float* x, const float* y, float inject, float* out, int64_t count);
    void (*multiply_by)(const float* x, float factor, float* y, int64_t count);
    float (*largest)(const float* x, int64_t count);
    // p = exp(x - shift), zero where that is below the smallest normal number; returns the sum.
    float (*exp_sum)(const float* x, float shift, float* p, int64_t count);
    void (*exp_fall)(float top, const float* x, float* p, int64_t count);  // p = exp(top - x)
    // out[r] += sum over n in [n0, n1), ascending, of p[r][n] * v[n]; width a multiple of LANES.
    void (*weigh)(const float* const* p, int64_t rows, int64_t n0, int64_t n1, const float* const* v,
                  int64_t width, float* const* out);
};

// Null where the running CPU lacks the instructions.
const Kernels* avx512_kernels();
const Kernels* avx2_kernels();
const Kernels* generic_kernels();

}  // namespace civetta
