#include "residual.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.hpp"

namespace civetta {
namespace {

constexpr int64_t TASK_ROWS = 8;      // rows of one task
constexpr int64_t READ_ROWS = 512;    // rows whose streams are held normed at one time

thread_local Scratch first_scratch, second_scratch, third_scratch;

// Calls row(t) for every row, TASK_ROWS a task; `work` is what one row costs.
template <class Row>
void for_rows(int64_t rows, int64_t work, const Row& row) {
    parallel_for((rows + TASK_ROWS - 1) / TASK_ROWS, rows * work, [&](int64_t task) {
        for (int64_t t = task * TASK_ROWS; t < std::min(rows, (task + 1) * TASK_ROWS); ++t) row(t);
    });
}

// The four buffers of one block of `hyper_read`; only the calling thread grows them.
struct ReadBuffers {
    Scratch normed, rounded, mix, logits, inject;
};

}  // namespace

void rms_norm(const Kernels& kernels, const Strided& x, int64_t rows, int64_t heads, int64_t width,
              const float* gain, int64_t gain_stride, float eps, void* y) {
    for_rows(rows, 4 * heads * width, [&](int64_t t) {
        float *in = first_scratch.get(width), *out = second_scratch.get(width);
        for (int64_t h = 0; h < heads; ++h) {
            kernels.norm(see_row(kernels, x, t, h, width, in), gain + h * gain_stride, width, eps, out);
            write_values(kernels, out, width, y, (t * heads + h) * width, x.bf16);
        }
    });
}

void rope(const Kernels& kernels, const Strided& x, int64_t rows, int64_t heads, int64_t width, const float* cos,
          const float* sin, int64_t half, void* y) {
    for_rows(rows, 4 * heads * width, [&](int64_t t) {
        float *in = first_scratch.get(width), *out = second_scratch.get(width);
        for (int64_t h = 0; h < heads; ++h) {
            kernels.rope(see_row(kernels, x, t, h, width, in), cos + t * half, sin + t * half, half, width, out);
            write_values(kernels, out, width, y, (t * heads + h) * width, x.bf16);
        }
    });
}

void hyper_read(const Kernels& kernels, const Hyper& w, const float* x, int64_t rows, void* h, bool h_bf16,
                float* inject) {
    static thread_local ReadBuffers buffers;
    const int64_t wide = w.streams * w.width, rank = w.down->rows;
    const int64_t stride = wide + LANES;  // off one cache set
    const float streams = static_cast<float>(w.streams);
    for (int64_t first = 0; first < rows; first += READ_ROWS) {
        const int64_t height = std::min(READ_ROWS, rows - first);
        float* normed = buffers.normed.get(height * stride);
        float* logits = buffers.logits.get(height * stride);
        float* mix = buffers.mix.get(height * rank);
        float* strength = buffers.inject.get(height * w.streams);
        auto* rounded = reinterpret_cast<uint16_t*>(h_bf16 ? buffers.rounded.get(height * stride) : nullptr);
        for_rows(height, 4 * wide, [&](int64_t t) {
            for (int64_t s = 0; s < w.streams; ++s) {
                kernels.norm(x + (first + t) * wide + s * w.width, w.gain + s * w.width, w.width, w.eps,
                             normed + t * stride + s * w.width);
            }
            if (h_bf16) kernels.narrow(normed + t * stride, rounded + t * stride, wide);
        });
        const Tensor flat{normed, stride, false}, narrow{rounded, stride, true};
        const Matrix* const matrices[] = {w.down, w.inject};
        const Tensor outputs[] = {{mix, rank, false}, {strength, w.streams, false}};
        if (h_bf16) {
            matmul(kernels, {matrices, 1}, narrow, height, {outputs, 1});
            if (w.inject != nullptr) matmul(kernels, {matrices + 1, 1}, flat, height, {outputs + 1, 1});
        } else {
            const size_t count = w.inject != nullptr ? 2 : 1;
            matmul(kernels, {matrices, count}, flat, height, {outputs, count});
        }
        kernels.silu_over(mix, streams, mix, height * rank);
        if (h_bf16) kernels.narrow(mix, reinterpret_cast<uint16_t*>(mix), height * rank);
        const Matrix* const up[] = {w.up};
        const Tensor out[] = {{logits, stride, false}};
        matmul(kernels, up, {mix, rank, h_bf16}, height, out);
        for_rows(height, 8 * wide, [&](int64_t t) {
            float *gate = logits + t * stride, *row = normed + t * stride;
            // In place of the first stream's logits: an element is read before it is written.
            kernels.mix_streams(gate, row, w.streams, w.width, gate);
            write_values(kernels, gate, w.width, h, (first + t) * w.width, h_bf16);
        });
        if (w.inject == nullptr) continue;
        float* strengths = inject + first * w.streams;
        kernels.sigmoid_over(strength, streams, strengths, height * w.streams);
        kernels.multiply_by(strengths, 2.f, strengths, height * w.streams);
    }
}

void hyper_write(const Kernels& kernels, const float* x, const Strided& y, const float* inject, int64_t rows,
                 int64_t streams, int64_t width, float* out) {
    for_rows(rows, streams * width, [&](int64_t t) {
        const float* row = see_row(kernels, y, t, 0, width, first_scratch.get(width));
        for (int64_t s = 0; s < streams; ++s) {
            const int64_t at = (t * streams + s) * width;
            kernels.write_stream(x + at, row, inject[t * streams + s], out + at, width);
        }
    });
}

void swiglu(const Kernels& kernels, const Strided& gate, const Strided& up, int64_t rows, int64_t width, void* y) {
    for_rows(rows, 8 * width, [&](int64_t t) {
        const float* g = see_row(kernels, gate, t, 0, width, first_scratch.get(width));
        const float* u = see_row(kernels, up, t, 0, width, second_scratch.get(width));
        float* out = third_scratch.get(width);
        kernels.swiglu(g, u, out, width);
        write_values(kernels, out, width, y, t * width, gate.bf16);
    });
}

void ngram_gate(const Kernels& kernels, const NgramGate& g, float* out) {
    for_rows(g.rows, 8 * g.streams * g.width, [&](int64_t t) {
        float *query = first_scratch.get(g.width), *key = second_scratch.get(g.width);
        float* value = third_scratch.get(g.width);
        read_row(kernels, g.value, t, 0, g.width, value, g.width);
        for (int64_t s = 0; s < g.streams; ++s) {
            const int64_t at = (t * g.streams + s) * g.width;
            const float* raw = see_row(kernels, g.key, t, s, g.width, out + at);
            kernels.norm(g.x + at, g.gain_query + s * g.width, g.width, g.eps, query);
            kernels.norm(raw, g.gain_key + s * g.width, g.width, g.eps, key);
            const float score = kernels.dot(key, query, g.width) / std::sqrt(static_cast<float>(g.width));
            const float size = std::fabs(score);
            const float sign = score > 0 ? 1.f : score < 0 ? -1.f : score;
            float root = std::sqrt(size < 1e-6f ? 1e-6f : size) * sign;
            kernels.sigmoid_over(&root, 1.f, &root, 1);
            kernels.multiply_by(value, root, out + at, g.width);
        }
    });
}

void route(const Kernels& kernels, const float* logits, int64_t rows, int64_t count, int64_t slots, int64_t* ids,
           float* weights) {
    for_rows(rows, (8 + slots) * count, [&](int64_t t) {
        const float* x = logits + t * count;
        float* p = first_scratch.get(count);
        kernels.exp_sum(x, kernels.largest(x, count), p, count);
        float total = 0.f;
        for (int64_t m = 0; m < slots; ++m) {
            int64_t best = -1;
            for (int64_t e = 0; e < count; ++e) {
                // A taken one is -1; NaN loses to everything, but something is always chosen.
                if (p[e] != -1.f && (best < 0 || p[e] > p[best])) best = e;
            }
            ids[t * slots + m] = best;
            weights[t * slots + m] = p[best];
            total += p[best];
            p[best] = -1.f;
        }
        for (int64_t m = 0; m < slots; ++m) weights[t * slots + m] /= total;
    });
}

void index_pool(const Kernels& kernels, const Strided& raw, int64_t blocks, int64_t ratio, int64_t width,
                const float* gain, float eps, const float* cos, const float* sin, int64_t half, void* y) {
    for_rows(blocks, (8 + ratio) * width, [&](int64_t b) {
        float *mean = first_scratch.get(width), *row = second_scratch.get(width);
        read_row(kernels, raw, b, 0, width, mean, width);
        for (int64_t i = 1; i < ratio; ++i) {
            const float* next = see_row(kernels, raw, b, i, width, row);
            for (int64_t a = 0; a < width; ++a) mean[a] += next[a];
        }
        for (int64_t a = 0; a < width; ++a) mean[a] /= static_cast<float>(ratio);
        if (raw.bf16) kernels.round_bf16(mean, width);
        kernels.norm(mean, gain, width, eps, row);
        if (raw.bf16) kernels.round_bf16(row, width);
        kernels.rope(row, cos + b * half, sin + b * half, half, width, mean);
        write_values(kernels, mean, width, y, b * width, raw.bf16);
    });
}

}  // namespace civetta
