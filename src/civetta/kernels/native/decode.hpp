// Stored blocks to float32 rows. Each product and sum is rounded as in the plain formula (files are
// built with -ffp-contract=off), so values equal those of the Python reference bit for bit.
//
// Formats are structs: of vectors (blocks.hpp, low_bits.hpp), or decoded a whole block at once
// (codebooks.hpp). Everything else is written once.
#pragma once

#include "blocks.hpp"
#include "codebooks.hpp"
#include "low_bits.hpp"

namespace {

template <class Visitor>
CIVETTA_INLINE void visit(civetta::Format format, const Visitor& visitor) {
    using civetta::Format;
    switch (format) {
        case Format::F32: return visitor.template operator()<F32>();
        case Format::F16: return visitor.template operator()<F16>();
        case Format::BF16: return visitor.template operator()<BF16>();
        case Format::Q4_0: return visitor.template operator()<Q4_0>();
        case Format::Q4_1: return visitor.template operator()<Q4_1>();
        case Format::Q5_0: return visitor.template operator()<Q5_0>();
        case Format::Q5_1: return visitor.template operator()<Q5_1>();
        case Format::Q8_0: return visitor.template operator()<Q8_0>();
        case Format::Q4_K: return visitor.template operator()<Q4_K>();
        case Format::Q5_K: return visitor.template operator()<Q5_K>();
        case Format::Q6_K: return visitor.template operator()<Q6_K>();
        case Format::IQ4_NL: return visitor.template operator()<IQ4_NL>();
        case Format::IQ4_XS: return visitor.template operator()<IQ4_XS>();
        case Format::F8_E4M3: return visitor.template operator()<F8_E4M3>();
        case Format::NVFP4: return visitor.template operator()<NVFP4>();
        case Format::TQ2_0: return visitor.template operator()<TQ2_0>();
        case Format::Q2_K: return visitor.template operator()<Q2_K>();
        case Format::Q3_K: return visitor.template operator()<Q3_K>();
        case Format::MXFP4: return visitor.template operator()<MXFP4>();
        case Format::TQ1_0: return visitor.template operator()<TQ1_0>();
        case Format::GGML_NVFP4: return visitor.template operator()<GGML_NVFP4>();
        case Format::IQ1_S: return visitor.template operator()<IQ1_S>();
        case Format::IQ1_M: return visitor.template operator()<IQ1_M>();
        case Format::IQ2_XXS: return visitor.template operator()<IQ2_XXS>();
        case Format::IQ2_XS: return visitor.template operator()<IQ2_XS>();
        case Format::IQ2_S: return visitor.template operator()<IQ2_S>();
        case Format::IQ3_XXS: return visitor.template operator()<IQ3_XXS>();
        case Format::IQ3_S: return visitor.template operator()<IQ3_S>();
    }
}

static int64_t block_values(civetta::Format format) {
    int64_t values = 0;
    visit(format, [&]<class F>() { values = F::VALUES; });
    return values;
}

// The rows of a panel; past the matrix's end the last one again.
struct Rows {
    Row row[civetta::PANEL];
    explicit Rows(const Matrix& w, int64_t n) {
        for (int64_t r = 0; r < civetta::PANEL; ++r) row[r] = Row(w, n + r < w.rows ? n + r : w.rows - 1);
    }
    const Row& operator[](int64_t r) const { return row[r]; }
};

// Asks for blocks [b0, b1) of the next panel's rows: short stretches of eight rows are too little for
// the processor to see where they lead.
template <class F>
CIVETTA_INLINE void prefetch_blocks(const Matrix& w, int64_t n, int64_t b0, int64_t b1) {
    for (int64_t row = n; row < n + civetta::PANEL && row < w.rows; ++row) {
        const uint8_t* bytes = w.data + row * w.row_stride;
        for (int64_t at = b0 * F::BYTES; at < b1 * F::BYTES; at += 64) __builtin_prefetch(bytes + at, 0, 2);
    }
}

template <class F, bool ROUND>
CIVETTA_INLINE void decode_block(const Row& row, const uint8_t* b, int64_t block, float* out) {
    if constexpr (Whole<F>) {
        F::decode(row, b, out);
        for (int k = 0; ROUND && k < F::VALUES; k += WIDTH) store(out + k, round_lanes(load(out + k)));
    } else {
        constexpr int VECTORS = F::VALUES / F::SUBS / WIDTH;
        F f;
        f.open(row, b, block);
        for (int s = 0; s < F::SUBS; ++s) {
            CIVETTA_UNROLL for (int i = 0; i < VECTORS; ++i) {
                const vf v = f.value(s, i);
                store(out + (s * VECTORS + i) * WIDTH, ROUND ? round_lanes(v) : v);
            }
        }
    }
}

template <class F, bool ROUND>
static void decode_as(const Matrix& w, int64_t n, int64_t k0, int64_t count, float* out, int64_t stride) {
    const Rows rows(w, n);
    const int64_t b0 = k0 / F::VALUES, b1 = b0 + count / F::VALUES, rest = count % F::VALUES;
    prefetch_blocks<F>(w, n + civetta::PANEL, b0, b1);
    for (int64_t b = b0; b < b1; ++b, out += F::VALUES) {
        for (int64_t r = 0; r < civetta::PANEL; ++r) {
            decode_block<F, ROUND>(rows[r], rows[r].data + b * F::BYTES, b, out + r * stride);
        }
    }
    for (int64_t r = 0; r < civetta::PANEL && rest > 0; ++r) {  // a row's end, in a block of its own
        uint8_t bytes[F::BYTES] = {};
        float values[F::VALUES];
        std::memcpy(bytes, rows[r].data + b1 * F::BYTES, rest * F::BYTES / F::VALUES);
        decode_block<F, ROUND>(rows[r], bytes, b1, values);
        std::memcpy(out + r * stride, values, rest * sizeof(float));
    }
}

static void decode(const Matrix& w, bool round, int64_t n, int64_t k0, int64_t count, float* out, int64_t stride) {
    visit(w.format, [&]<class F>() {
        if (round && w.format != civetta::Format::BF16) return decode_as<F, true>(w, n, k0, count, out, stride);
        decode_as<F, false>(w, n, k0, count, out, stride);
    });
}

}  // namespace
