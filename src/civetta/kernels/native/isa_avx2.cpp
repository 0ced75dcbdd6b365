// Compiled with AVX2, FMA and F16C; runs only where the CPU has them.
#include "matrix.hpp"

#if defined(__AVX2__)
#include "table.hpp"

const civetta::Kernels* civetta::avx2_kernels() {
    CIVETTA_KERNELS("avx2");
    const bool able = __builtin_cpu_supports("avx2") &&
                      __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    return able ? &table : nullptr;
}
#else
const civetta::Kernels* civetta::avx2_kernels() { return nullptr; }
#endif
