#include "attention.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "pool.hpp"

namespace civetta {
namespace {

constexpr int64_t PARTITION = 512;       // keys of one softmax, ATTENTION_PARTITION in ops.py
constexpr int64_t TILE_ROWS = 16;        // query rows (tokens times heads) that share keys, about
constexpr int64_t FEW_HEADS = 4;         // heads of a task when there are few queries
constexpr int64_t FEW_QUERIES = 8;
constexpr int64_t SCORE_TOKENS = 4;      // queries that are scored together
constexpr int64_t SCORE_BLOCKS = 256;    // blocks of one scoring task
constexpr int64_t SCORE_FLOATS = int64_t{1} << 24;  // scores held at one time
constexpr float NONE = -std::numeric_limits<float>::infinity();

struct Task {
    int64_t first, last, group, head, heads;  // queries [first, last), heads of the group
};

// One thread's room for one task.
class Softmax {
  public:
    Softmax(const Kernels& kernels, const Attention& a, const Task& task);
    // Meets one partition: `count` keys whose positions `where(n)` tells; query i sees seen[i] of them.
    template <class Where>
    void meet(int64_t count, const std::vector<int64_t>& seen, const Where& where);
    void finish();

  private:
    const float* place(const Pages& pages, int64_t position, float* buffer) const;
    void score(int64_t count);

    const Kernels& kernels_;
    const Attention& a_;
    const Task task_;
    const int64_t rows_, padded_;
    const bool copied_;
    std::vector<const float*> q_, k_, v_, p_;
    std::vector<float*> value_;
    std::vector<float> best_, weight_;
};

thread_local Scratch query_scratch, key_scratch, value_scratch, score_scratch, sum_scratch;

Softmax::Softmax(const Kernels& kernels, const Attention& a, const Task& task)
    : kernels_(kernels), a_(a), task_(task), rows_((task.last - task.first) * task.heads),
      padded_(round_up(a.width, LANES)), copied_(a.bf16 || a.width != padded_) {
    float* q = query_scratch.get(rows_ * padded_);
    float* sums = sum_scratch.get(rows_ * padded_);
    float* scores = score_scratch.get(rows_ * PARTITION);
    const float scale = 1.f / std::sqrt(static_cast<float>(a.width));
    for (int64_t i = 0; i < rows_; ++i) {
        const int64_t head = task.group * a.share + task.head + i % task.heads;
        read_row(kernels, a.q, task.first + i / task.heads, head, a.width, q + i * padded_, padded_);
        kernels.multiply_by(q + i * padded_, scale, q + i * padded_, padded_);
        q_.push_back(q + i * padded_);
        p_.push_back(scores + i * PARTITION);
        value_.push_back(sums + i * padded_);
        std::fill(value_[i], value_[i] + padded_, 0.f);
    }
    best_.assign(rows_, NONE);
    weight_.assign(rows_, 0.f);
}

const float* Softmax::place(const Pages& pages, int64_t position, float* buffer) const {
    const int64_t page = a_.table[position / a_.page_tokens], place = position % a_.page_tokens;
    const int64_t at = page * pages.page_stride + place * pages.place_stride + task_.group * pages.group_stride;
    if (!copied_) return static_cast<const float*>(pages.data) + at;
    read_row(kernels_, {pages.data, 1, 0, a_.bf16}, at, 0, a_.width, buffer, padded_);
    return buffer;
}

void Softmax::score(int64_t count) {
    for (int64_t i = 0; i < rows_; ++i) {
        std::fill(const_cast<float*>(p_[i]), const_cast<float*>(p_[i]) + round_up(count, PANEL), 0.f);
    }
    for (int64_t n = 0; n < count; n += PANEL) {
        const float* panel[PANEL];
        for (int64_t i = 0; i < PANEL; ++i) panel[i] = k_[std::min(n + i, count - 1)];
        kernels_.tiles(q_.data(), rows_, 0, panel, padded_, const_cast<float*>(p_[0]) + n, PARTITION);
    }
}

template <class Where>
void Softmax::meet(int64_t count, const std::vector<int64_t>& seen, const Where& where) {
    float* keys = copied_ ? key_scratch.get(PARTITION * padded_) : nullptr;
    float* values = copied_ ? value_scratch.get(PARTITION * padded_) : nullptr;
    k_.resize(count);
    v_.resize(count);
    for (int64_t n = 0; n < count; ++n) {
        const int64_t position = where(n);
        k_[n] = place(a_.k, position, keys + n * padded_);
        v_[n] = place(a_.v, position, values + n * padded_);
    }
    score(count);
    int64_t common = count;
    for (int64_t i = 0; i < rows_; ++i) {
        const int64_t n = seen[i / task_.heads];
        common = std::min(common, n);
        if (n == 0) continue;
        auto* p = const_cast<float*>(p_[i]);
        const float old = best_[i], most = kernels_.largest(p, n), best = most > old ? most : old;
        const float shift = best == NONE ? 0.f : best;  // any finite shift keeps the zeros
        const float fade = old == NONE ? 0.f : std::exp(old - shift);
        weight_[i] = weight_[i] * fade + kernels_.exp_sum(p, shift, p, n);
        kernels_.multiply_by(value_[i], fade, value_[i], padded_);
        best_[i] = best;
    }
    kernels_.weigh(p_.data(), rows_, 0, common, v_.data(), padded_, value_.data());
    for (int64_t i = 0; i < rows_; ++i) {
        kernels_.weigh(p_.data() + i, 1, common, seen[i / task_.heads], v_.data(), padded_, value_.data() + i);
    }
}

void Softmax::finish() {
    for (int64_t i = 0; i < rows_; ++i) {
        for (int64_t j = 0; j < a_.width; ++j) value_[i][j] /= weight_[i];
        const int64_t head = task_.group * a_.share + task_.head + i % task_.heads;
        const int64_t at = ((task_.first + i / task_.heads) * a_.groups * a_.share + head) * a_.width;
        write_values(kernels_, value_[i], a_.width, a_.out, at, a_.q.bf16);
    }
}

// Groups outermost, so that neighbours in time read the same keys.
std::vector<Task> cut(const Attention& a, int64_t tokens) {
    const int64_t heads = a.rows < FEW_QUERIES ? std::min(a.share, FEW_HEADS) : a.share;
    std::vector<Task> tasks;
    for (int64_t g = 0; g < a.groups; ++g) {
        for (int64_t t = 0; t < a.rows; t += tokens) {
            for (int64_t h = 0; h < a.share; h += heads) {
                tasks.push_back({t, std::min(a.rows, t + tokens), g, h, std::min(heads, a.share - h)});
            }
        }
    }
    return tasks;
}

void run(const Attention& a, const std::vector<Task>& tasks, int64_t keys, const auto& attend) {
    const int64_t work = 2 * a.rows * a.groups * a.share * keys * a.width;
    parallel_for(static_cast<int64_t>(tasks.size()), work, [&](int64_t i) { attend(tasks[i]); });
}

}  // namespace

void attend_dense(const Kernels& kernels, const Attention& a, int64_t first) {
    const std::vector<Task> tasks = cut(a, std::max<int64_t>(1, TILE_ROWS / a.share));
    run(a, tasks, first + a.rows, [&](const Task& task) {
        Softmax softmax(kernels, a, task);
        std::vector<int64_t> seen(task.last - task.first);
        for (int64_t start = 0; start < first + task.last; start += PARTITION) {
            const int64_t count = std::min(PARTITION, first + task.last - start);
            for (int64_t t = task.first; t < task.last; ++t) {
                seen[t - task.first] = std::clamp<int64_t>(first + t + 1 - start, 0, count);
            }
            softmax.meet(count, seen, [=](int64_t n) { return start + n; });
        }
        softmax.finish();
    });
}

void attend_sparse(const Kernels& kernels, const Attention& a, const int64_t* tokens, int64_t length) {
    run(a, cut(a, 1), length, [&](const Task& task) {
        const int64_t* list = tokens + task.first * length;
        const int64_t total = std::find(list, list + length, -1) - list;
        Softmax softmax(kernels, a, task);
        std::vector<int64_t> seen(1);
        for (int64_t start = 0; start < total; start += PARTITION) {
            const int64_t count = seen[0] = std::min(PARTITION, total - start);
            softmax.meet(count, seen, [=](int64_t n) { return list[start + n]; });
        }
        softmax.finish();
    });
}

namespace {

// scores[t, b] for queries [t0, t1) and blocks [b0, b1): sum over heads, in order, of relu(q . key).
void score_blocks(const Kernels& kernels, const Choice& c, int64_t t0, int64_t t1, int64_t b0, int64_t b1,
                  float* scores, int64_t stride) {
    const int64_t rows = (t1 - t0) * c.heads, padded = round_up(c.width, LANES);
    const bool copied = c.bf16 || c.width != padded;
    float* q = query_scratch.get(rows * padded);
    float* dots = score_scratch.get(rows * PANEL);
    std::vector<const float*> q_rows(rows);
    for (int64_t i = 0; i < rows; ++i) {
        read_row(kernels, c.q, t0 + i / c.heads, i % c.heads, c.width, q + i * padded, padded);
        q_rows[i] = q + i * padded;
    }
    const float scale = 1.f / std::sqrt(static_cast<float>(c.width));
    float* buffer = copied ? key_scratch.get(PANEL * padded) : nullptr;
    for (int64_t b = b0; b < b1; b += PANEL) {
        const float* panel[PANEL];
        for (int64_t i = 0; i < PANEL; ++i) {
            const int64_t block = std::min(b + i, b1 - 1);
            const int64_t at = c.table[block / c.page_blocks] * c.page_stride + block % c.page_blocks * c.width;
            panel[i] = static_cast<const float*>(c.keys) + at;
            if (!copied) continue;
            read_row(kernels, {c.keys, 1, 0, c.bf16}, at, 0, c.width, buffer + i * padded, padded);
            panel[i] = buffer + i * padded;
        }
        std::fill(dots, dots + rows * PANEL, 0.f);
        kernels.tiles(q_rows.data(), rows, 0, panel, padded, dots, PANEL);
        for (int64_t t = t0; t < t1; ++t) {
            for (int64_t i = 0; i < std::min(PANEL, b1 - b); ++i) {
                float total = 0.f;
                for (int64_t h = 0; h < c.heads; ++h) {
                    const float d = dots[((t - t0) * c.heads + h) * PANEL + i];
                    total += d < 0.f ? 0.f : d;
                }
                scores[t * stride + b + i] = total * scale;
            }
        }
    }
}

// Scores are at least 0, so their bits order as they do; NaN comes first.
void keep_best(const float* scores, int64_t blocks, int64_t keep, int64_t* out) {
    static thread_local std::vector<uint32_t> keys, order;
    keys.resize(blocks);
    for (int64_t b = 0; b < blocks; ++b) keys[b] = std::bit_cast<uint32_t>(scores[b]) & 0x7fffffff;
    order = keys;
    std::nth_element(order.begin(), order.begin() + (keep - 1), order.end(), std::greater<uint32_t>());
    const uint32_t last = order[keep - 1];
    int64_t room = keep - std::count_if(keys.begin(), keys.end(), [=](uint32_t key) { return key > last; });
    for (int64_t b = 0; b < blocks; ++b) {
        if (keys[b] > last || (keys[b] == last && room-- > 0)) *out++ = b;
    }
}

}  // namespace

void choose_blocks(const Kernels& kernels, const Choice& c) {
    static thread_local Scratch room;
    const int64_t most = *std::max_element(c.blocks, c.blocks + c.rows);
    const int64_t at_once = std::max<int64_t>(SCORE_TOKENS, SCORE_FLOATS / most);
    float* const held = room.get(std::min(at_once, c.rows) * most);
    for (int64_t first = 0; first < c.rows; first += at_once) {
        const int64_t rows = std::min(at_once, c.rows - first);
        float* const scores = held - first * most;
        const int64_t down = (rows + SCORE_TOKENS - 1) / SCORE_TOKENS;
        const int64_t across = (most + SCORE_BLOCKS - 1) / SCORE_BLOCKS;
        parallel_for(down * across, rows * c.heads * most * c.width, [&](int64_t i) {
            const int64_t t0 = first + i / across * SCORE_TOKENS, t1 = std::min(first + rows, t0 + SCORE_TOKENS);
            const int64_t b0 = i % across * SCORE_BLOCKS;
            const int64_t seen = *std::max_element(c.blocks + t0, c.blocks + t1);
            score_blocks(kernels, c, t0, t1, b0, std::min(seen, b0 + SCORE_BLOCKS), scores, most);
        });
        parallel_for(rows, rows * most * 8, [&](int64_t i) {
            const int64_t t = first + i;
            keep_best(scores + t * most, c.blocks[t], c.keep, c.out + t * c.keep);
        });
    }
}

}  // namespace civetta
