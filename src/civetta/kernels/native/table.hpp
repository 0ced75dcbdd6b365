// The table of kernels that a translation unit's instruction set gives.
#pragma once

#include "norms.hpp"
#include "rows.hpp"
#include "tiles.hpp"
#include "weigh.hpp"

#define CIVETTA_KERNELS(name)                                                                             \
    static const civetta::Kernels table = {                                                               \
        name,       block_values, decode,      dots,         tiles,        round_bf16,  widen,   narrow,  \
        swiglu,     add_scaled,   dot,         norm,         unit,         gated_norm,  rope,    conv,    \
        silu_over,  sigmoid_over, mix_streams, write_stream, multiply_by,  largest,     exp_sum, exp_fall, \
        weigh,                                                                                            \
    }
