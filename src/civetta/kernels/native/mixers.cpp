// Python's view of norms, gates, the delta rule and attention: addresses and strides as integers, like
// bindings.cpp; the caller keeps the memory alive and has checked shapes and dtypes.
#include "mixers.hpp"

#include "attention.hpp"
#include "delta.hpp"
#include "image_attention.hpp"
#include "residual.hpp"

namespace nb = nanobind;

namespace civetta {
namespace {

GetKernels get_active = nullptr;

template <typename T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

const float* floats(uintptr_t address) { return pointer<const float>(address); }

Strided strided(uintptr_t data, int64_t row_stride, int64_t head_stride, bool bf16) {
    return {pointer<const void>(data), row_stride, head_stride, bf16};
}

// The view of one activation: address, row stride, head stride, whether bfloat16.
struct View {
    Strided x;
};

void call_rms_norm(uintptr_t x, int64_t row_stride, int64_t head_stride, bool bf16, int64_t rows, int64_t heads,
                   int64_t width, uintptr_t gain, int64_t gain_stride, float eps, uintptr_t y) {
    const nb::gil_scoped_release released;
    rms_norm(*get_active(), strided(x, row_stride, head_stride, bf16), rows, heads, width, floats(gain), gain_stride,
             eps, pointer<void>(y));
}

void call_rope(uintptr_t x, int64_t row_stride, int64_t head_stride, bool bf16, int64_t rows, int64_t heads,
               int64_t width, uintptr_t cos, uintptr_t sin, int64_t half, uintptr_t y) {
    const nb::gil_scoped_release released;
    rope(*get_active(), strided(x, row_stride, head_stride, bf16), rows, heads, width, floats(cos), floats(sin), half,
         pointer<void>(y));
}

void call_hyper_read(const Matrix& down, const Matrix& up, const Matrix& inject, bool injects, uintptr_t gain, int64_t streams,
                     int64_t width, float eps, uintptr_t x, int64_t rows, uintptr_t h, bool h_bf16,
                     uintptr_t strengths) {
    const nb::gil_scoped_release released;
    hyper_read(*get_active(), {floats(gain), &down, &up, injects ? &inject : nullptr, streams, width, eps}, floats(x), rows,
               pointer<void>(h), h_bf16, pointer<float>(strengths));
}

void call_hyper_write(uintptr_t x, uintptr_t y, int64_t y_stride, bool y_bf16, uintptr_t inject, int64_t rows,
                      int64_t streams, int64_t width, uintptr_t out) {
    const nb::gil_scoped_release released;
    hyper_write(*get_active(), floats(x), strided(y, y_stride, 0, y_bf16), floats(inject), rows, streams, width,
                pointer<float>(out));
}

void call_swiglu(uintptr_t gate, int64_t gate_stride, uintptr_t up, int64_t up_stride, bool bf16, int64_t rows,
                 int64_t width, uintptr_t y) {
    const nb::gil_scoped_release released;
    swiglu(*get_active(), strided(gate, gate_stride, 0, bf16), strided(up, up_stride, 0, bf16), rows, width,
           pointer<void>(y));
}

void call_ngram_gate(uintptr_t x, uintptr_t key, int64_t key_stride, int64_t key_stream_stride, bool key_bf16,
                     uintptr_t value, int64_t value_stride, bool value_bf16, uintptr_t gain_query, uintptr_t gain_key,
                     int64_t rows, int64_t streams, int64_t width, float eps, uintptr_t out) {
    const nb::gil_scoped_release released;
    ngram_gate(*get_active(),
               {floats(x), floats(gain_query), floats(gain_key),
                strided(key, key_stride, key_stream_stride, key_bf16), strided(value, value_stride, 0, value_bf16),
                rows, streams, width, eps},
               pointer<float>(out));
}

void call_route(uintptr_t logits, int64_t rows, int64_t count, int64_t slots, uintptr_t ids, uintptr_t weights) {
    if (slots > count) throw nb::value_error("more slots than experts");
    const nb::gil_scoped_release released;
    route(*get_active(), floats(logits), rows, count, slots, pointer<int64_t>(ids), pointer<float>(weights));
}

void call_index_pool(uintptr_t raw, int64_t block_stride, int64_t row_stride, bool bf16, int64_t blocks,
                     int64_t ratio, int64_t width, uintptr_t gain, float eps, uintptr_t cos, uintptr_t sin,
                     int64_t half, uintptr_t y) {
    const nb::gil_scoped_release released;
    index_pool(*get_active(), strided(raw, block_stride, row_stride, bf16), blocks, ratio, width, floats(gain), eps,
               floats(cos), floats(sin), half, pointer<void>(y));
}

void call_short_conv(uintptr_t u, int64_t u_stride, bool u_bf16, uintptr_t history, int64_t history_stride,
                     bool history_bf16, uintptr_t w, int64_t taps, int64_t dilation, int64_t rows, int64_t channels,
                     uintptr_t y) {
    if (taps > MAX_TAPS) throw nb::value_error("a convolution has at most 16 taps");
    const nb::gil_scoped_release released;
    short_conv(*get_active(), strided(u, u_stride, 0, u_bf16), strided(history, history_stride, 0, history_bf16),
               floats(w), taps, dilation, rows, channels, pointer<void>(y));
}

void call_delta_gates(uintptr_t a, uintptr_t b, uintptr_t scale, uintptr_t bias, int64_t rows, int64_t heads,
                      uintptr_t log_decay, uintptr_t beta) {
    const nb::gil_scoped_release released;
    delta_gates(*get_active(), floats(a), floats(b), floats(scale), floats(bias), rows, heads,
                pointer<float>(log_decay), pointer<float>(beta));
}

void call_delta_chunks(const View& q, const View& k, const View& v, uintptr_t log_decay, uintptr_t beta,
                       int64_t gate_stride, uintptr_t state, int64_t rows, int64_t key_heads, int64_t value_heads,
                       int64_t width, bool tiled, int64_t first_new, int64_t fold, uintptr_t out,
                       uintptr_t state_out) {
    const nb::gil_scoped_release released;
    delta_chunks(*get_active(), {q.x, k.x, v.x, floats(log_decay), floats(beta), gate_stride, floats(state), rows,
                                 key_heads, value_heads, width, tiled, first_new, fold, pointer<void>(out),
                                 pointer<float>(state_out)});
}

void call_delta_norm(const View& o, const View& z, uintptr_t gain, int64_t rows, int64_t heads, int64_t width,
                     float eps, uintptr_t y) {
    const nb::gil_scoped_release released;
    delta_norm(*get_active(), o.x, z.x, floats(gain), rows, heads, width, eps, pointer<void>(y));
}

struct Cache {
    Pages k, v;
    bool bf16;
    int64_t page_tokens, groups, width;
};

Attention attention(const View& q, const Cache& cache, uintptr_t table, int64_t rows, int64_t heads, uintptr_t out) {
    return {q.x,    cache.k,      cache.v,      cache.bf16,           pointer<const int64_t>(table), cache.page_tokens,
            rows,   cache.groups, heads / cache.groups, cache.width, pointer<void>(out)};
}

void call_attend_dense(const View& q, const Cache& cache, uintptr_t table, int64_t rows, int64_t heads, int64_t first,
                       uintptr_t out) {
    const nb::gil_scoped_release released;
    attend_dense(*get_active(), attention(q, cache, table, rows, heads, out), first);
}

void call_attend_sparse(const View& q, const Cache& cache, uintptr_t table, int64_t rows, int64_t heads,
                        uintptr_t tokens, int64_t length, uintptr_t out) {
    const nb::gil_scoped_release released;
    attend_sparse(*get_active(), attention(q, cache, table, rows, heads, out), pointer<const int64_t>(tokens),
                  length);
}

void call_attend_image(const View& q, const View& k, const View& v, int64_t rows, int64_t keys, int64_t heads,
                       int64_t width, uintptr_t out) {
    const nb::gil_scoped_release released;
    attend_image(*get_active(), {q.x, k.x, v.x, rows, keys, heads, width, pointer<void>(out)});
}

void call_choose_blocks(const View& q, uintptr_t keys, bool keys_bf16, int64_t page_stride, int64_t page_blocks,
                        uintptr_t table, uintptr_t blocks, int64_t rows, int64_t heads, int64_t width, int64_t keep,
                        uintptr_t out) {
    const nb::gil_scoped_release released;
    choose_blocks(*get_active(),
                  {q.x, pointer<const void>(keys), keys_bf16, page_stride, pointer<const int64_t>(table),
                   pointer<const int64_t>(blocks), page_blocks, rows, heads, width, keep, pointer<int64_t>(out)});
}

}  // namespace

void bind_mixers(nb::module_& m, GetKernels active) {
    get_active = active;
    nb::class_<View>(m, "View").def("__init__", [](View* self, uintptr_t data, int64_t row_stride,
                                                   int64_t head_stride, bool bf16) {
        new (self) View{strided(data, row_stride, head_stride, bf16)};
    });
    nb::class_<Cache>(m, "Cache").def(
        "__init__", [](Cache* self, uintptr_t k, uintptr_t v, bool bf16, int64_t page_stride, int64_t place_stride,
                       int64_t group_stride, int64_t page_tokens, int64_t groups, int64_t width) {
            const Pages keys{pointer<const void>(k), page_stride, place_stride, group_stride};
            const Pages values{pointer<const void>(v), page_stride, place_stride, group_stride};
            new (self) Cache{keys, values, bf16, page_tokens, groups, width};
        });
    m.def("rms_norm", &call_rms_norm);
    m.def("rope", &call_rope);
    m.def("hyper_read", &call_hyper_read);
    m.def("hyper_write", &call_hyper_write);
    m.def("swiglu", &call_swiglu);
    m.def("ngram_gate", &call_ngram_gate);
    m.def("route", &call_route);
    m.def("index_pool", &call_index_pool);
    m.def("short_conv", &call_short_conv);
    m.def("delta_gates", &call_delta_gates);
    m.def("delta_chunks", &call_delta_chunks);
    m.def("delta_norm", &call_delta_norm);
    m.def("attend_dense", &call_attend_dense);
    m.def("attend_sparse", &call_attend_sparse);
    m.def("attend_image", &call_attend_image);
    m.def("choose_blocks", &call_choose_blocks);
}

}  // namespace civetta
