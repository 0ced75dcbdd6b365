// Attention of one image: every query sees every key. A query's result depends on its own row and on the keys
// alone: softmax runs over partitions of 512 keys, merged in order; see `Ops.attend_image`.
#pragma once

#include "strided.hpp"

namespace civetta {

struct ImageAttention {
    Strided q, k, v;  // [rows, heads, width], [keys, heads, width] twice
    int64_t rows, keys, heads, width;
    void* out;  // [rows, heads, width], contiguous, q's type
};

void attend_image(const Kernels& kernels, const ImageAttention& a);

}  // namespace civetta
