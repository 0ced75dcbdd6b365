// Compiled with AVX-512 F, BW, DQ and VL; runs only where the CPU has them.
#include "matrix.hpp"

#if defined(__AVX512F__)
#include "table.hpp"

const civetta::Kernels* civetta::avx512_kernels() {
    CIVETTA_KERNELS("avx512");
    const bool able = __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
    return able ? &table : nullptr;
}
#else
const civetta::Kernels* civetta::avx512_kernels() { return nullptr; }
#endif
