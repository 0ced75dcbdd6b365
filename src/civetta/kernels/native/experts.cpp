#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pool.hpp"
#include "product.hpp"

namespace civetta {
namespace {

constexpr int64_t SCRATCH_FLOATS = int64_t{1} << 25;  // 128 MiB of hidden and output rows at a time
constexpr int64_t TASK_PANELS = 8;

thread_local Scratch gate_scratch, up_scratch, down_scratch;

// Slots (token * slots + m) of the tokens at hand, grouped by expert in ascending order.
struct Grouping {
    std::vector<int64_t> slot;     // by expert, then by slot
    std::vector<int64_t> expert;   // experts that have rows
    std::vector<int64_t> start;    // first of an expert's slots, one entry more at the end
    std::vector<int64_t> counts;

    void build(const int64_t* ids, int64_t total, int64_t experts) {
        counts.assign(experts + 1, 0);
        for (int64_t i = 0; i < total; ++i) {
            if (ids[i] < 0 || ids[i] >= experts) {
                throw std::out_of_range("expert " + std::to_string(ids[i]) + " of " + std::to_string(experts) +
                                        " was routed to");
            }
            ++counts[ids[i] + 1];
        }
        expert.clear();
        start.clear();
        for (int64_t e = 0; e < experts; ++e) {
            if (counts[e + 1] > 0) {
                expert.push_back(e);
                start.push_back(counts[e]);
            }
            counts[e + 1] += counts[e];
        }
        start.push_back(total);
        slot.resize(total);
        for (int64_t i = 0; i < total; ++i) slot[counts[ids[i]]++] = i;
    }
};

struct Task {
    int64_t group, n0, n1;
};

void cut(const Grouping& groups, int64_t n, std::vector<Task>& tasks) {
    tasks.clear();
    for (size_t g = 0; g < groups.expert.size(); ++g) {
        for (int64_t n0 = 0; n0 < n; n0 += TASK_PANELS * PANEL) {
            tasks.push_back({static_cast<int64_t>(g), n0, std::min(n, n0 + TASK_PANELS * PANEL)});
        }
    }
}

}  // namespace

void experts(const Kernels& kernels, const Experts& w, const Tensor& h, const int64_t* ids,
             const float* weights, int64_t rows, int64_t slots, const Tensor& y) {
    static thread_local Input input;
    static thread_local Grouping grouping;
    static thread_local std::vector<Task> tasks;
    static thread_local std::vector<const float*> pointers;
    static thread_local Scratch hidden_scratch, output_scratch;
    const int64_t D = w.down[0].rows, F = w.gate[0].rows;
    const int64_t F_padded = round_up(F, LANES);
    const int64_t most = std::max<int64_t>(1, SCRATCH_FLOATS / (slots * (D + F_padded)));
    for (int64_t first = 0; first < rows; first += most) {
        const int64_t height = std::min(most, rows - first), total = height * slots;
        input.take(kernels, h, first, height, w.gate[0].cols);
        grouping.build(ids + first * slots, total, static_cast<int64_t>(w.gate.size()));
        float* hidden = hidden_scratch.get(total * F_padded);  // row i: slot grouping.slot[i]
        float* output = output_scratch.get(total * D);         // row s: slot s
        pointers.resize(2 * total);
        for (int64_t i = 0; i < total; ++i) {
            pointers[i] = input.rows()[grouping.slot[i] / slots];
            pointers[total + i] = hidden + i * F_padded;
        }
        const Grouping& groups = grouping;
        const float* const* x = pointers.data();

        cut(groups, F, tasks);
        const Task* task = tasks.data();
        parallel_for(static_cast<int64_t>(tasks.size()), 2 * total * F * w.gate[0].cols, [&, x, task](int64_t i) {
            const auto [g, n0, n1] = task[i];
            const int64_t begin = groups.start[g], count = groups.start[g + 1] - begin;
            const int64_t e = groups.expert[g], ldc = round_up(n1 - n0, PANEL);
            float *gate = gate_scratch.get(count * ldc), *up = up_scratch.get(count * ldc);
            multiply(kernels, w.gate[e], h.bf16, x + begin, count, n0, n1, gate, ldc);
            multiply(kernels, w.up[e], h.bf16, x + begin, count, n0, n1, up, ldc);
            if (h.bf16) {
                kernels.round_bf16(gate, count * ldc);
                kernels.round_bf16(up, count * ldc);
            }
            for (int64_t t = 0; t < count; ++t) {
                float* row = hidden + (begin + t) * F_padded;
                kernels.swiglu(gate + t * ldc, up + t * ldc, row + n0, n1 - n0);
                if (h.bf16) kernels.round_bf16(row + n0, n1 - n0);
                if (n1 == F) std::fill(row + F, row + F_padded, 0.f);
            }
        });

        cut(groups, D, tasks);
        task = tasks.data();
        parallel_for(static_cast<int64_t>(tasks.size()), total * D * F, [&, x, task](int64_t i) {
            const auto [g, n0, n1] = task[i];
            const int64_t begin = groups.start[g], count = groups.start[g + 1] - begin;
            const int64_t ldc = round_up(n1 - n0, PANEL);
            float* c = down_scratch.get(count * ldc);
            multiply(kernels, w.down[groups.expert[g]], h.bf16, x + total + begin, count, n0, n1, c, ldc);
            for (int64_t t = 0; t < count; ++t) {
                std::memcpy(output + groups.slot[begin + t] * D + n0, c + t * ldc, (n1 - n0) * sizeof(float));
            }
        });

        const auto sum = [&](int64_t block) {
            for (int64_t t = block * 16; t < std::min(height, block * 16 + 16); ++t) {
                float* row = static_cast<float*>(y.data) + (first + t) * y.stride;
                std::fill(row, row + D, 0.f);
                for (int64_t s = t * slots; s < (t + 1) * slots; ++s) {
                    kernels.add_scaled(output + s * D, weights[first * slots + s], row, D);
                }
            }
        };
        parallel_for((height + 15) / 16, total * D, sum);
    }
}

}  // namespace civetta
