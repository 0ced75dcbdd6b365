// One row of a matrix, as the decoders of a format's blocks see it.
#pragma once

#include "matrix.hpp"
#include "simd.hpp"

namespace {

using civetta::Matrix;

// One row of a matrix, with its scales where they lie outside the blocks.
struct Row {
    const uint8_t* data;
    const void* scales;
    float scale_2;

    CIVETTA_INLINE_MEMBER Row() {}
    CIVETTA_INLINE_MEMBER Row(const Matrix& w, int64_t n) : data(w.data + n * w.row_stride), scales(w.scale), scale_2(w.scale_2) {
        if (w.format == civetta::Format::F8_E4M3) {
            scales = static_cast<const float*>(scales) + (w.row_offset + n) / 128 * w.scale_stride;
        } else if (w.format == civetta::Format::NVFP4) {
            scales = static_cast<const uint8_t*>(scales) + n * w.scale_stride;
        }
    }
};

}  // namespace
