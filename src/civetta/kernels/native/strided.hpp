// Rows of activations as the kernels take them: float32 side by side, whatever they are stored as.
#pragma once

#include <cstdint>
#include <cstring>

#include "matrix.hpp"
#include "product.hpp"

namespace civetta {

// x[t, h, :]: values of a row lie side by side; strides count elements.
struct Strided {
    const void* data;
    int64_t row_stride, head_stride;
    bool bf16;

    const void* at(int64_t t, int64_t h) const {
        const int64_t offset = t * row_stride + h * head_stride;
        return static_cast<const uint8_t*>(data) + offset * (bf16 ? 2 : 4);
    }
};

// Copies `width` values as float32 and fills up to `padded` with zeros.
inline void read_row(const Kernels& kernels, const Strided& x, int64_t t, int64_t h, int64_t width, float* out,
                     int64_t padded) {
    if (x.bf16) {
        kernels.widen(static_cast<const uint16_t*>(x.at(t, h)), out, width);
    } else {
        std::memcpy(out, x.at(t, h), width * sizeof(float));
    }
    for (int64_t i = width; i < padded; ++i) out[i] = 0.f;
}

// The row where it lies when it is float32, else widened into `buffer`.
inline const float* see_row(const Kernels& kernels, const Strided& x, int64_t t, int64_t h, int64_t width,
                            float* buffer) {
    if (!x.bf16) return static_cast<const float*>(x.at(t, h));
    kernels.widen(static_cast<const uint16_t*>(x.at(t, h)), buffer, width);
    return buffer;
}

// Writes `width` values at element `offset` of a contiguous tensor.
inline void write_values(const Kernels& kernels, const float* values, int64_t width, void* out, int64_t offset,
                         bool bf16) {
    if (bf16) {
        kernels.narrow(values, static_cast<uint16_t*>(out) + offset, width);
    } else {
        std::memcpy(static_cast<float*>(out) + offset, values, width * sizeof(float));
    }
}

}  // namespace civetta
