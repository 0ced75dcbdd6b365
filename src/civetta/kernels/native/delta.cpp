#include "delta.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.hpp"

namespace civetta {
namespace {

constexpr int64_t ROWS = 64;         // of a chunk, GDN_CHUNK in ops.py
constexpr int64_t TASK_ROWS = 16;
constexpr int64_t SOLVE_ROWS = 4;    // rows that take the sum over earlier blocks together
constexpr float UNIT_EPS = 1e-6f;

thread_local Scratch first_scratch, second_scratch, third_scratch;

std::vector<const float*> point(const float* base, int64_t count, int64_t stride) {
    std::vector<const float*> rows(count);
    for (int64_t i = 0; i < count; ++i) rows[i] = base + i * stride;
    return rows;
}

// One thread's room for one head: rows are `padded` wide, pair matrices ROWS wide.
class Head {
  public:
    void run(const Kernels& kernels, const Delta& d, int64_t head);

  private:
    void size(const Kernels& kernels, const Delta& d, int64_t head);
    void read_chunk(int64_t start, int64_t count);
    void solve(int64_t count);
    void answer(int64_t start, int64_t first, int64_t count);
    void advance(int64_t count, float* to);
    void multiply_keys(const float* left, int64_t first, int64_t count);
    void weigh_earlier(int64_t first, int64_t count, bool self, float* out);

    const Kernels* kernels_;
    const Delta* d_;
    int64_t head_, key_head_, padded_;
    Scratch keys_scratch_, queries_scratch_, solved_scratch_, coefs_scratch_, pair_scratch_, turned_scratch_;
    Scratch state_scratch_, out_scratch_;
    float *keys_, *queries_, *solved_, *coefs_, *pair_, *turned_, *out_;
    std::vector<const float*> key_rows_, solved_rows_, state_rows_, coef_rows_, pair_rows_;
    float decay_[ROWS], since_[ROWS], beta_[ROWS];
};

void Head::size(const Kernels& kernels, const Delta& d, int64_t head) {
    kernels_ = &kernels;
    d_ = &d;
    head_ = head;
    key_head_ = d.tiled ? head % d.key_heads : head / (d.value_heads / d.key_heads);
    padded_ = round_up(d.width, LANES);
    const int64_t coef_stride = std::max(padded_, ROWS);
    keys_ = keys_scratch_.get(ROWS * padded_);
    queries_ = queries_scratch_.get(ROWS * padded_);
    solved_ = solved_scratch_.get(ROWS * padded_);
    out_ = out_scratch_.get(ROWS * padded_);
    coefs_ = coefs_scratch_.get(ROWS * coef_stride);
    pair_ = pair_scratch_.get(ROWS * ROWS);
    turned_ = turned_scratch_.get(d.width * ROWS);
    key_rows_ = point(keys_, ROWS, padded_);
    solved_rows_ = point(solved_, ROWS, padded_);
    coef_rows_ = point(coefs_, ROWS, coef_stride);
    pair_rows_ = point(pair_, ROWS, ROWS);
}

// Unit keys, decay since the chunk's start and beta * v; rows of `solved` start as beta * v.
void Head::read_chunk(int64_t start, int64_t count) {
    const Delta& d = *d_;
    float* raw = first_scratch.get(padded_);
    float decay = 0.f;
    for (int64_t t = 0; t < count; ++t) {
        const float* key = see_row(*kernels_, d.k, start + t, key_head_, d.width, raw);
        kernels_->unit(key, d.width, UNIT_EPS, 1.f, keys_ + t * padded_);
        std::fill(keys_ + t * padded_ + d.width, keys_ + (t + 1) * padded_, 0.f);
        const int64_t at = (start + t) * d.gate_stride + head_;
        decay += d.log_decay[at];
        decay_[t] = decay;
        since_[t] = std::exp(decay);
        beta_[t] = d.beta[at];
        float* value = solved_ + t * padded_;
        read_row(*kernels_, d.v, start + t, head_, d.width, value, padded_);
        kernels_->multiply_by(value, beta_[t], value, padded_);
    }
}

// pair[t, s] = left[t] . key[s] * exp(decay[t] - decay[s]) for first <= t < count and s <= t.
void Head::multiply_keys(const float* left, int64_t first, int64_t count) {
    const std::vector<const float*> rows = point(left, count, padded_);
    std::fill(pair_ + first * ROWS, pair_ + count * ROWS, 0.f);
    for (int64_t s = 0; s < count; s += PANEL) {
        const float* panel[PANEL];
        for (int64_t i = 0; i < PANEL; ++i) panel[i] = key_rows_[std::min(s + i, count - 1)];
        const int64_t begin = std::max(s, first);
        kernels_->tiles(rows.data() + begin, count - begin, 0, panel, padded_, pair_ + begin * ROWS + s, ROWS);
    }
    float fall[ROWS];
    for (int64_t t = first; t < count; ++t) {
        kernels_->exp_fall(decay_[t], decay_, fall, t + 1);
        for (int64_t s = 0; s <= t; ++s) pair_[t * ROWS + s] *= fall[s];
    }
}

// out[t] += sum over s < t (s <= t with `self`) of pair[t, s] * solved[s], s ascending.
void Head::weigh_earlier(int64_t first, int64_t count, bool self, float* out) {
    for (int64_t block = first; block < count; block += SOLVE_ROWS) {
        const int64_t stop = std::min(block + SOLVE_ROWS, count);
        float* rows[SOLVE_ROWS];
        for (int64_t t = block; t < stop; ++t) rows[t - block] = out + t * padded_;
        kernels_->weigh(pair_rows_.data() + block, stop - block, 0, block, solved_rows_.data(), padded_, rows);
        for (int64_t t = block; t < stop; ++t) {
            kernels_->weigh(pair_rows_.data() + t, 1, block, self ? t + 1 : t, solved_rows_.data(), padded_,
                            rows + (t - block));
        }
    }
}

// solved = (I + L)^-1 (beta v - beta exp(decay) k S), L[t, s] = beta[t] k[t] . k[s] exp(decay[t] - decay[s]).
void Head::solve(int64_t count) {
    const Delta& d = *d_;
    std::vector<float*> rows(count);
    for (int64_t t = 0; t < count; ++t) {
        rows[t] = solved_ + t * padded_;
        kernels_->multiply_by(keys_ + t * padded_, -(beta_[t] * since_[t]), const_cast<float*>(coef_rows_[t]), d.width);
    }
    kernels_->weigh(coef_rows_.data(), count, 0, d.width, state_rows_.data(), padded_, rows.data());
    multiply_keys(keys_, 0, count);
    for (int64_t t = 0; t < count; ++t) {
        kernels_->multiply_by(pair_ + t * ROWS, -beta_[t], pair_ + t * ROWS, t);
    }
    weigh_earlier(0, count, false, solved_);
}

// Outputs of rows first .. count - 1 of the chunk.
void Head::answer(int64_t start, int64_t first, int64_t count) {
    const Delta& d = *d_;
    float* raw = first_scratch.get(padded_);
    const float scale = 1.f / std::sqrt(static_cast<float>(d.width));
    std::vector<float*> rows(count);
    for (int64_t t = first; t < count; ++t) {
        const float* query = see_row(*kernels_, d.q, start + t, key_head_, d.width, raw);
        float* unit = queries_ + t * padded_;
        kernels_->unit(query, d.width, UNIT_EPS, scale, unit);
        std::fill(unit + d.width, unit + padded_, 0.f);
        kernels_->multiply_by(unit, since_[t], const_cast<float*>(coef_rows_[t]), d.width);
        rows[t] = out_ + t * padded_;
        std::fill(rows[t], rows[t] + padded_, 0.f);
    }
    kernels_->weigh(coef_rows_.data() + first, count - first, 0, d.width, state_rows_.data(), padded_,
                    rows.data() + first);
    multiply_keys(queries_, first, count);
    // Blocks of rows begin where `first` says; the order of each row's sum does not follow them.
    weigh_earlier(first, count, true, out_);
    for (int64_t t = first; t < count; ++t) {
        const int64_t at = ((start + t - d.first_new) * d.value_heads + head_) * d.width;
        write_values(*kernels_, rows[t], d.width, d.out, at, d.v.bf16);
    }
}

// The state after a whole chunk, written to `to` ([width] rows, `padded` wide), which may be where it is.
void Head::advance(int64_t count, float* to) {
    const Delta& d = *d_;
    float fall[ROWS];
    kernels_->exp_fall(decay_[count - 1], decay_, fall, count);
    for (int64_t t = 0; t < count; ++t) {
        for (int64_t j = 0; j < d.width; ++j) turned_[j * ROWS + t] = keys_[t * padded_ + j] * fall[t];
    }
    const std::vector<const float*> weights = point(turned_, d.width, ROWS);
    std::vector<float*> rows(d.width);
    for (int64_t j = 0; j < d.width; ++j) {
        rows[j] = to + j * padded_;
        kernels_->multiply_by(state_rows_[j], since_[count - 1], rows[j], padded_);
    }
    kernels_->weigh(weights.data(), d.width, 0, count, solved_rows_.data(), padded_, rows.data());
    state_rows_ = point(to, d.width, padded_);
}

void Head::run(const Kernels& kernels, const Delta& d, int64_t head) {
    size(kernels, d, head);
    const int64_t values = d.width * d.width;
    float* own = state_scratch_.get(d.width * padded_);
    for (int64_t j = 0; j < d.width; ++j) {
        std::memcpy(own + j * padded_, d.state + head * values + j * d.width, d.width * sizeof(float));
        std::fill(own + j * padded_ + d.width, own + (j + 1) * padded_, 0.f);
    }
    state_rows_ = point(own, d.width, padded_);
    for (int64_t start = 0; start < d.rows; start += ROWS) {
        const int64_t count = std::min(ROWS, d.rows - start), stop = start + count;
        read_chunk(start, count);
        solve(count);
        if (stop > d.first_new) answer(start, std::max<int64_t>(d.first_new - start, 0), count);
        if (stop < d.rows || stop == d.fold) advance(count, own);
        if (stop != d.fold) continue;
        for (int64_t j = 0; j < d.width; ++j) {
            std::memcpy(d.state_out + head * values + j * d.width, own + j * padded_, d.width * sizeof(float));
        }
    }
}

}  // namespace

void delta_chunks(const Kernels& kernels, const Delta& d) {
    const int64_t chunk = std::min(d.rows, ROWS);
    const int64_t work = d.value_heads * d.rows * d.width * (2 * d.width + 2 * chunk);
    parallel_for(d.value_heads, work, [&](int64_t head) {
        static thread_local Head room;
        room.run(kernels, d, head);
    });
}

void short_conv(const Kernels& kernels, const Strided& u, const Strided& history, const float* w, int64_t taps,
                int64_t dilation, int64_t rows, int64_t channels, void* y) {
    const int64_t before = (taps - 1) * dilation;
    parallel_for((rows + TASK_ROWS - 1) / TASK_ROWS, rows * channels * (taps + 8), [&](int64_t task) {
        const int64_t first = task * TASK_ROWS, last = std::min(rows, first + TASK_ROWS);
        const int64_t needed = last - first + before;
        float* room = first_scratch.get(u.bf16 || history.bf16 ? needed * channels : 0);
        float* out = second_scratch.get(channels);
        std::vector<const float*> source(needed);
        for (int64_t i = 0; i < needed; ++i) {
            const int64_t row = first + i;
            const Strided& from = row < before ? history : u;
            source[i] = see_row(kernels, from, row < before ? row : row - before, 0, channels, room + i * channels);
        }
        for (int64_t t = first; t < last; ++t) {
            const float* tap[MAX_TAPS];
            for (int64_t k = 0; k < taps; ++k) tap[k] = source[t - first + k * dilation];
            kernels.conv(tap, w, taps, channels, out);
            write_values(kernels, out, channels, y, t * channels, u.bf16);
        }
    });
}

void delta_gates(const Kernels& kernels, const float* a, const float* b, const float* scale, const float* bias,
                 int64_t rows, int64_t heads, float* log_decay, float* beta) {
    parallel_for((rows + TASK_ROWS - 1) / TASK_ROWS, rows * heads * 40, [&](int64_t task) {
        for (int64_t t = task * TASK_ROWS; t < std::min(rows, (task + 1) * TASK_ROWS); ++t) {
            const int64_t at = t * heads;
            for (int64_t h = 0; h < heads; ++h) {
                const float x = a[at + h] + bias[h];
                // max(x, 0) that keeps NaN.
                log_decay[at + h] = scale[h] * ((x < 0.f ? 0.f : x) + std::log1p(std::exp(-std::fabs(x))));
            }
            kernels.sigmoid_over(b + at, 1.f, beta + at, heads);
        }
    });
}

void delta_norm(const Kernels& kernels, const Strided& o, const Strided& z, const float* gain, int64_t rows,
                int64_t heads, int64_t width, float eps, void* y) {
    parallel_for((rows + TASK_ROWS - 1) / TASK_ROWS, rows * heads * width * 12, [&](int64_t task) {
        float *one = first_scratch.get(width), *two = second_scratch.get(width), *out = third_scratch.get(width);
        for (int64_t t = task * TASK_ROWS; t < std::min(rows, (task + 1) * TASK_ROWS); ++t) {
            for (int64_t h = 0; h < heads; ++h) {
                kernels.gated_norm(see_row(kernels, o, t, h, width, one), see_row(kernels, z, t, h, width, two), gain,
                                   width, eps, out);
                write_values(kernels, out, width, y, (t * heads + h) * width, z.bf16);
            }
        }
    });
}

}  // namespace civetta
