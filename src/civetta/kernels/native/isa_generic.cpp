// Compiled for the platform's baseline: SSE2 on x86-64, NEON on aarch64.
#include "table.hpp"

const civetta::Kernels* civetta::generic_kernels() {
#if defined(__aarch64__)
    CIVETTA_KERNELS("neon");
#else
    CIVETTA_KERNELS("generic");
#endif
    return &table;
}
