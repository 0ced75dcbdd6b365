// Python's view: addresses and strides as integers, no tensor types. The caller keeps the memory
// alive and has checked shapes and dtypes; see civetta/kernels/cpu.py and _native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "mixers.hpp"
#include "pool.hpp"
#include "product.hpp"

namespace nb = nanobind;
using namespace civetta;

namespace {

constexpr const char* FORMAT_NAMES[] = {"F32",  "F16",  "BF16", "Q4_0",   "Q4_1",   "Q5_0",    "Q5_1", "Q8_0",
                                        "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "F8_E4M3", "NVFP4", "TQ2_0",
                                        "Q2_K", "Q3_K", "MXFP4", "TQ1_0", "GGML_NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS",
                                        "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"};

const Kernels* active = nullptr;

const Kernels* find_kernels(const std::string& name) {
    for (const Kernels* k : {avx512_kernels(), avx2_kernels(), generic_kernels()}) {
        if (k != nullptr && (name.empty() || name == k->name)) return k;
    }
    return nullptr;
}

void use_instructions(const std::string& name) {
    const Kernels* found = find_kernels(name);
    if (found == nullptr) throw nb::value_error(("no " + name + " on this CPU").c_str());
    active = found;
}

Format find_format(const std::string& name) {
    int at = 0;
    for (const char* known : FORMAT_NAMES) {
        if (name == known) return static_cast<Format>(at);
        ++at;
    }
    throw nb::value_error(("no native kernel reads " + name).c_str());
}

template <typename T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

Matrix make_matrix(const std::string& format, int64_t rows, int64_t cols, uintptr_t data,
                   int64_t row_stride, uintptr_t scale, int64_t scale_stride, float scale_2, int64_t row_offset) {
    return {find_format(format), rows, cols, pointer<const uint8_t>(data), row_stride,
            pointer<const void>(scale), scale_stride, scale_2, row_offset};
}

void call_matmul(const Matrix& w, uintptr_t x, int64_t x_stride, bool x_bf16, int64_t rows, uintptr_t y,
                 int64_t y_stride, bool y_bf16) {
    const nb::gil_scoped_release released;
    const Matrix* const matrices[] = {&w};
    const Tensor outputs[] = {{pointer<void>(y), y_stride, y_bf16}};
    matmul(*active, matrices, {pointer<void>(x), x_stride, x_bf16}, rows, outputs);
}

void call_experts(const Experts& w, uintptr_t h, int64_t h_stride, bool h_bf16, uintptr_t ids, uintptr_t weights,
                  int64_t rows, int64_t slots, uintptr_t y) {
    const nb::gil_scoped_release released;
    experts(*active, w, {pointer<void>(h), h_stride, h_bf16}, pointer<const int64_t>(ids),
            pointer<const float>(weights), rows, slots, {pointer<void>(y), w.down[0].rows, false});
}

Experts make_experts(const std::vector<const Matrix*>& gate, const std::vector<const Matrix*>& up,
                     const std::vector<const Matrix*>& down) {
    if (gate.empty() || gate.size() != up.size() || gate.size() != down.size()) {
        throw nb::value_error("as many gates as ups and downs, and at least one");
    }
    Experts w;
    for (size_t e = 0; e < gate.size(); ++e) {
        const Matrix &g = *gate[e], &u = *up[e], &d = *down[e];
        if (g.rows != gate[0]->rows || g.cols != gate[0]->cols || u.rows != g.rows || u.cols != g.cols ||
            d.rows != down[0]->rows || d.cols != g.rows) {
            throw nb::value_error("experts of one layer have one shape");
        }
        w.gate.push_back(g);
        w.up.push_back(u);
        w.down.push_back(d);
    }
    return w;
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // weights that live until the process ends are no leak
    use_instructions("");
    nb::class_<Matrix>(m, "Matrix")
        .def("__init__",
             [](Matrix* self, const std::string& format, int64_t rows, int64_t cols, uintptr_t data,
                int64_t row_stride, uintptr_t scale, int64_t scale_stride, float scale_2,
                int64_t row_offset) {
                 new (self) Matrix(make_matrix(format, rows, cols, data, row_stride, scale, scale_stride,
                                               scale_2, row_offset));
             })
        .def_ro("rows", &Matrix::rows)
        .def_ro("cols", &Matrix::cols);
    nb::class_<Experts>(m, "Experts")
        .def("__init__",
             [](Experts* self, const std::vector<const Matrix*>& gate, const std::vector<const Matrix*>& up,
                const std::vector<const Matrix*>& down) { new (self) Experts(make_experts(gate, up, down)); });
    m.def("matmul", &call_matmul);
    m.def("experts", &call_experts);
    bind_mixers(m, [] { return active; });
    m.def("set_threads", &set_threads);
    m.def("get_threads", &get_threads);
    m.def("shut_down", &shut_down, nb::call_guard<nb::gil_scoped_release>());
    m.def("use_instructions", &use_instructions);
    m.def("instructions", [] { return std::string(active->name); });
    nb::list formats;
    for (const char* name : FORMAT_NAMES) formats.append(name);
    m.attr("FORMATS") = nb::tuple(formats);
    // Threads end before the interpreter does, whatever happens to the module object.
    nb::module_::import_("atexit").attr("register")(m.attr("shut_down"));
}
