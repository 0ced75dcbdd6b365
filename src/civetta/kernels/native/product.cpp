#include "product.hpp"

#include <algorithm>
#include <cstring>

#include "pool.hpp"

namespace civetta {
namespace {

constexpr int64_t BLOCK_ROWS = 96;      // x rows whose CHUNK columns share the L2 cache with weights
constexpr int64_t BLOCK_PANELS = 8;     // panels decoded together when x has more rows than that
constexpr int64_t LAUNCH_ROWS = 1024;   // x rows that one decoding of the weights serves at most
constexpr int64_t DIRECT_ROWS = 12;     // up to this many, float32 weights are read in place
constexpr int64_t TASKS_A_THREAD = 6;   // so that a thread that starts late costs little
constexpr int64_t PANEL_STRIDE = CHUNK + LANES;  // floats between panel rows, off one cache set
constexpr int64_t PANEL_FLOATS = PANEL * PANEL_STRIDE;

thread_local Scratch panel_scratch, block_scratch;

bool readable_in_place(const Matrix& w, bool bf16) {
    const bool aligned = (reinterpret_cast<uintptr_t>(w.data) | w.row_stride) % sizeof(float) == 0;
    return w.format == Format::F32 && !bf16 && aligned && w.cols % LANES == 0;
}

// Points `out` at PANEL rows of float32 weights, columns [k0, k0 + count), decoded into `buffer` or,
// when there is none, where they lie. Past the matrix's end they repeat; those products are not used.
void prepare_panel(const Kernels& kernels, const Matrix& w, bool bf16, int64_t n, int64_t k0, int64_t count,
                   float* buffer, const float** out) {
    if (buffer != nullptr) {
        kernels.decode(w, bf16, n, k0, count, buffer, PANEL_STRIDE);
        for (int64_t r = 0; r < PANEL; ++r) {
            out[r] = buffer + r * PANEL_STRIDE;
            std::fill(buffer + r * PANEL_STRIDE + count, buffer + r * PANEL_STRIDE + round_up(count, LANES), 0.f);
        }
    } else {
        for (int64_t r = 0; r < PANEL; ++r) {
            const int64_t row = std::min(n + r, w.rows - 1);
            out[r] = reinterpret_cast<const float*>(w.data + row * w.row_stride) + k0;
        }
    }
}

// Asks for the next panel's rows, columns [k0, k0 + count), before this one's are read in place:
// short stretches of eight rows are too little for the processor to see where they lead.
void prefetch_panel(const Matrix& w, int64_t n, int64_t k0, int64_t count) {
    for (int64_t row = n; row < std::min(n + PANEL, w.rows); ++row) {
        const uint8_t* begin = w.data + row * w.row_stride + k0 * sizeof(float);
        for (int64_t at = 0; at < count * int64_t{sizeof(float)}; at += 64) __builtin_prefetch(begin + at, 0, 2);
    }
}

void multiply_few(const Kernels& kernels, const Matrix& w, bool bf16, const float* const* x,
                  int64_t rows, int64_t n0, int64_t n1, float* c, int64_t ldc) {
    const bool direct = rows <= DIRECT_ROWS && readable_in_place(w, bf16);
    float* buffer = direct ? nullptr : panel_scratch.get(PANEL_FLOATS);
    const float* panel[PANEL];
    for (int64_t n = n0; n < n1; n += PANEL) {
        for (int64_t k0 = 0; k0 < w.cols; k0 += CHUNK) {
            const int64_t count = std::min(CHUNK, w.cols - k0);
            if (direct) prefetch_panel(w, n + PANEL, k0, count);
            prepare_panel(kernels, w, bf16, n, k0, count, buffer, panel);
            kernels.tiles(x, rows, k0, panel, round_up(count, LANES), c + (n - n0), ldc);
        }
    }
}

// More rows than fit the cache: the weights of one chunk are decoded once, then meet the rows a
// block at a time. n1 - n0 is at most BLOCK_PANELS panels.
void multiply_many(const Kernels& kernels, const Matrix& w, bool bf16, const float* const* x,
                   int64_t rows, int64_t n0, int64_t n1, float* c, int64_t ldc) {
    float* buffer = panel_scratch.get(BLOCK_PANELS * PANEL_FLOATS);
    const float* panel[BLOCK_PANELS][PANEL];
    for (int64_t k0 = 0; k0 < w.cols; k0 += CHUNK) {
        const int64_t count = std::min(CHUNK, w.cols - k0);
        for (int64_t t = 0; t < rows; t += BLOCK_ROWS) {
            const int64_t height = std::min(BLOCK_ROWS, rows - t);
            for (int64_t n = n0, p = 0; n < n1; n += PANEL, ++p) {
                if (t == 0) {
                    prepare_panel(kernels, w, bf16, n, k0, count, buffer + p * PANEL_FLOATS, panel[p]);
                }
                kernels.tiles(x + t, height, k0, panel[p], round_up(count, LANES),
                              c + t * ldc + (n - n0), ldc);
            }
        }
    }
}

struct Task {
    int64_t matrix, n0, n1, t0, t1;
};

// Cuts [0, n) x [0, rows) of one matrix so that `threads` have TASKS_A_THREAD pieces each, if the
// matrix allows: first between weight rows, then (each piece decodes for itself) between x rows.
void cut(int64_t matrix, int64_t n, int64_t rows, int64_t threads, std::vector<Task>& tasks) {
    const int64_t panels = round_up(n, PANEL) / PANEL;
    const int64_t wanted = threads * TASKS_A_THREAD;
    const int64_t most = rows > BLOCK_ROWS ? BLOCK_PANELS : 4 * BLOCK_PANELS;
    const int64_t width = std::clamp<int64_t>(panels / wanted, 1, most);
    const int64_t across = (panels + width - 1) / width;
    const int64_t down = std::max<int64_t>(1, wanted / across);
    const int64_t height = std::max(BLOCK_ROWS, round_up((rows + down - 1) / down, 6));
    for (int64_t t = 0; t < rows; t += height) {
        for (int64_t p = 0; p < panels; p += width) {
            tasks.push_back({matrix, p * PANEL, std::min(n, (p + width) * PANEL), t, std::min(rows, t + height)});
        }
    }
}

void write_row(const Kernels& kernels, const float* values, int64_t count, const Tensor& y, int64_t t, int64_t n0) {
    if (y.bf16) {
        kernels.narrow(values, static_cast<uint16_t*>(y.data) + t * y.stride + n0, count);
    } else {
        std::memcpy(static_cast<float*>(y.data) + t * y.stride + n0, values, count * sizeof(float));
    }
}

}  // namespace

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

void Input::take(const Kernels& kernels, const Tensor& x, int64_t first, int64_t rows, int64_t cols) {
    rows_.resize(rows);
    // Rows a multiple of a page apart would compete for the same few cache sets.
    const bool crowded = rows > DIRECT_ROWS && x.stride % 1024 == 0;
    if (!x.bf16 && cols % LANES == 0 && !crowded) {
        for (int64_t t = 0; t < rows; ++t) {
            rows_[t] = static_cast<const float*>(x.data) + (first + t) * x.stride;
        }
        return;
    }
    const int64_t padded = round_up(cols, LANES), stride = padded + LANES;
    float* copies = copies_.get(rows * stride);
    for (int64_t t = 0; t < rows; ++t) rows_[t] = copies + t * stride;
    const auto copy = [&](int64_t block) {
        for (int64_t t = block * 16; t < std::min(rows, block * 16 + 16); ++t) {
            float* row = copies + t * stride;
            const int64_t at = (first + t) * x.stride;
            if (x.bf16) {
                kernels.widen(static_cast<const uint16_t*>(x.data) + at, row, cols);
            } else {
                std::memcpy(row, static_cast<const float*>(x.data) + at, cols * sizeof(float));
            }
            std::fill(row + cols, row + padded, 0.f);
        }
    };
    parallel_for((rows + 15) / 16, rows * cols, copy);
}

void multiply(const Kernels& kernels, const Matrix& w, bool bf16, const float* const* x, int64_t rows,
              int64_t n0, int64_t n1, float* c, int64_t ldc) {
    std::fill(c, c + rows * ldc, 0.f);
    const bool of_vectors = w.format < FIRST_WHOLE && w.cols % kernels.block_values(w.format) == 0;
    if (rows <= 3 && of_vectors && !readable_in_place(w, bf16)) {
        for (int64_t n = n0; n < n1; n += PANEL) kernels.dots(w, bf16, n, x, rows, c + (n - n0), ldc);
        return;
    }
    if (rows <= BLOCK_ROWS) return multiply_few(kernels, w, bf16, x, rows, n0, n1, c, ldc);
    for (int64_t n = n0; n < n1; n += BLOCK_PANELS * PANEL) {
        multiply_many(kernels, w, bf16, x, rows, n, std::min(n1, n + BLOCK_PANELS * PANEL), c + (n - n0), ldc);
    }
}

void matmul(const Kernels& kernels, std::span<const Matrix* const> w, const Tensor& x, int64_t rows,
            std::span<const Tensor> y) {
    static thread_local Input input;
    static thread_local std::vector<Task> tasks;
    for (int64_t first = 0; first < rows; first += LAUNCH_ROWS) {
        const int64_t height = std::min(LAUNCH_ROWS, rows - first);
        input.take(kernels, x, first, height, w[0]->cols);
        tasks.clear();
        int64_t work = 0;
        for (size_t i = 0; i < w.size(); ++i) {
            cut(static_cast<int64_t>(i), w[i]->rows, height, get_threads(), tasks);
            work += w[i]->rows * w[i]->cols * height;
        }
        // Workers have thread_local variables of their own: hand them ours.
        const float* const* x_rows = input.rows();
        const Task* task = tasks.data();
        parallel_for(static_cast<int64_t>(tasks.size()), work, [&, x_rows, task](int64_t i) {
            const auto [matrix, n0, n1, t0, t1] = task[i];
            const int64_t ldc = round_up(n1 - n0, PANEL);
            float* c = block_scratch.get((t1 - t0) * ldc);
            multiply(kernels, *w[matrix], x.bf16, x_rows + t0, t1 - t0, n0, n1, c, ldc);
            for (int64_t t = t0; t < t1; ++t) {
                write_row(kernels, c + (t - t0) * ldc, n1 - n0, y[matrix], first + t, n0);
            }
        });
    }
}

}  // namespace civetta
