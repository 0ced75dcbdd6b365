#include "image_attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "pool.hpp"

namespace civetta {
namespace {

constexpr int64_t PARTITION = 512;           // keys of one softmax
constexpr int64_t KEY_STRIDE = PARTITION + LANES;  // a power of two would crowd one cache set
constexpr int64_t TASK_QUERIES = 256;        // queries that share a repacked partition
constexpr int64_t TILE_QUERIES = 16;         // queries whose scores are held at one time

thread_local Scratch query_room, key_room, turn_room, value_room, score_room, sum_room;

// One head's queries [first, last): keys come in partitions, turned so that a score is a weighted sum of
// columns, which keeps all lanes busy at narrow heads.
class Head {
  public:
    Head(const Kernels& kernels, const ImageAttention& a, int64_t head, int64_t first, int64_t last);
    void meet(int64_t start, int64_t count);
    void finish() const;

  private:
    void turn_keys(int64_t start, int64_t count);
    void meet_tile(int64_t from, int64_t to, int64_t count);

    const Kernels& kernels_;
    const ImageAttention& a_;
    const int64_t head_, first_, rows_, padded_;
    float *q_, *keys_, *values_, *scores_, *sums_;
    std::vector<const float*> query_, column_, value_;
    std::vector<float*> sum_;
    std::vector<float> best_, weight_;
};

Head::Head(const Kernels& kernels, const ImageAttention& a, int64_t head, int64_t first, int64_t last)
    : kernels_(kernels), a_(a), head_(head), first_(first), rows_(last - first), padded_(round_up(a.width, LANES)),
      q_(query_room.get(rows_ * padded_)), keys_(key_room.get(a.width * KEY_STRIDE)),
      values_(value_room.get(PARTITION * padded_)), scores_(score_room.get(TILE_QUERIES * PARTITION)),
      sums_(sum_room.get(rows_ * padded_)), best_(rows_, -std::numeric_limits<float>::infinity()), weight_(rows_, 0.f) {
    const float scale = 1.f / std::sqrt(static_cast<float>(a.width));
    std::fill(sums_, sums_ + rows_ * padded_, 0.f);
    for (int64_t i = 0; i < rows_; ++i) {
        read_row(kernels, a.q, first + i, head, a.width, q_ + i * padded_, padded_);
        kernels.multiply_by(q_ + i * padded_, scale, q_ + i * padded_, padded_);
        query_.push_back(q_ + i * padded_);
        sum_.push_back(sums_ + i * padded_);
    }
    for (int64_t j = 0; j < a.width; ++j) column_.push_back(keys_ + j * KEY_STRIDE);
    for (int64_t n = 0; n < PARTITION; ++n) value_.push_back(values_ + n * padded_);
}

void Head::turn_keys(int64_t start, int64_t count) {
    float* rows = turn_room.get(LANES * a_.width);
    for (int64_t n = 0; n < count; n += LANES) {
        const int64_t lanes = std::min(LANES, count - n);
        std::fill(rows + lanes * a_.width, rows + LANES * a_.width, 0.f);
        for (int64_t i = 0; i < lanes; ++i) {
            read_row(kernels_, a_.k, start + n + i, head_, a_.width, rows + i * a_.width, a_.width);
        }
        for (int64_t j = 0; j < a_.width; ++j) {
            for (int64_t i = 0; i < LANES; ++i) keys_[j * KEY_STRIDE + n + i] = rows[i * a_.width + j];
        }
    }
}

void Head::meet(int64_t start, int64_t count) {
    turn_keys(start, count);
    for (int64_t n = 0; n < count; ++n) {
        read_row(kernels_, a_.v, start + n, head_, a_.width, values_ + n * padded_, padded_);
    }
    for (int64_t i = 0; i < rows_; i += TILE_QUERIES) meet_tile(i, std::min(rows_, i + TILE_QUERIES), count);
}

void Head::meet_tile(int64_t from, int64_t to, int64_t count) {
    const float* p[TILE_QUERIES];
    float* scores[TILE_QUERIES];
    const int64_t wide = round_up(count, LANES);
    for (int64_t i = 0; i < to - from; ++i) {
        p[i] = scores[i] = scores_ + i * PARTITION;
        std::fill(scores[i], scores[i] + wide, 0.f);
    }
    kernels_.weigh(query_.data() + from, to - from, 0, a_.width, column_.data(), wide, scores);
    for (int64_t i = from; i < to; ++i) {
        float* s = scores[i - from];
        const float old = best_[i], best = std::max(old, kernels_.largest(s, count));
        const float fade = std::exp(old - best);
        weight_[i] = weight_[i] * fade + kernels_.exp_sum(s, best, s, count);
        kernels_.multiply_by(sum_[i], fade, sum_[i], padded_);
        best_[i] = best;
    }
    kernels_.weigh(p, to - from, 0, count, value_.data(), padded_, sum_.data() + from);
}

void Head::finish() const {
    for (int64_t i = 0; i < rows_; ++i) {
        for (int64_t j = 0; j < a_.width; ++j) sum_[i][j] /= weight_[i];
        write_values(kernels_, sum_[i], a_.width, a_.out, ((first_ + i) * a_.heads + head_) * a_.width, a_.q.bf16);
    }
}

}  // namespace

void attend_image(const Kernels& kernels, const ImageAttention& a) {
    const int64_t down = (a.rows + TASK_QUERIES - 1) / TASK_QUERIES;
    const int64_t work = 2 * a.rows * a.keys * a.heads * a.width;
    parallel_for(a.heads * down, work, [&](int64_t i) {
        const int64_t first = i % down * TASK_QUERIES;
        Head head(kernels, a, i / down, first, std::min(a.rows, first + TASK_QUERIES));
        for (int64_t start = 0; start < a.keys; start += PARTITION) {
            head.meet(start, std::min(PARTITION, a.keys - start));
        }
        head.finish();
    });
}

}  // namespace civetta
