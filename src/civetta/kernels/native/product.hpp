// Products of x rows with weight matrices, split into tasks that never share an output.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "matrix.hpp"

namespace civetta {

// Float scratch on a cache line boundary that grows and never shrinks.
class Scratch {
  public:
    float* get(int64_t count) {
        if (count > size_) {
            data_.reset(static_cast<float*>(::operator new[](count * sizeof(float), ALIGN)));
            size_ = count;
        }
        return data_.get();
    }

  private:
    static constexpr std::align_val_t ALIGN{64};
    struct Free {
        void operator()(float* p) const { ::operator delete[](p, ALIGN); }
    };
    std::unique_ptr<float, Free> data_;
    int64_t size_ = 0;
};

struct Tensor {
    void* data;
    int64_t stride;  // elements between rows
    bool bf16;       // else float32
};

// Rows of x as float32 that may be read up to a multiple of LANES columns, zeros past `cols`.
class Input {
  public:
    // Takes rows [first, first + rows) of x: in place where they will do, else as copies.
    void take(const Kernels& kernels, const Tensor& x, int64_t first, int64_t rows, int64_t cols);
    const float* const* rows() const { return rows_.data(); }

  private:
    Scratch copies_;
    std::vector<const float*> rows_;
};

int64_t round_up(int64_t value, int64_t step);

// c[t * ldc + n - n0] = x[t] . w[n] for t < rows and n in [n0, n1), n0 a multiple of PANEL. Columns
// up to the next multiple of PANEL are written too. bf16: the weights are rounded to bfloat16.
void multiply(const Kernels& kernels, const Matrix& w, bool bf16, const float* const* x, int64_t rows,
              int64_t n0, int64_t n1, float* c, int64_t ldc);

// y[i] = x w[i]^T for matrices of x's width.
void matmul(const Kernels& kernels, std::span<const Matrix* const> w, const Tensor& x, int64_t rows,
            std::span<const Tensor> y);

struct Experts {
    std::vector<Matrix> gate, up, down;  // [F, D], [F, D], [D, F] an expert
};

// y[t] = sum over slots m, in order, of weights[t, m] * down(silu(gate h) * up h) of expert
// ids[t, m]; ids and weights are contiguous [rows, slots], y is float32 with rows of D columns.
// With bfloat16 h, gate and up and their product are rounded to bfloat16 as separate ops would.
void experts(const Kernels& kernels, const Experts& w, const Tensor& h, const int64_t* ids,
             const float* weights, int64_t rows, int64_t slots, const Tensor& y);

}  // namespace civetta
