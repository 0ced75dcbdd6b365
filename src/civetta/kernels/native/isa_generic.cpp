// Compiled for the platform's baseline: SSE2 on x86-64, NEON on aarch64.
#include "rows.hpp"
#include "tiles.hpp"

const civetta::Kernels* civetta::generic_kernels() {
#if defined(__aarch64__)
    CIVETTA_KERNELS("neon");
#else
    CIVETTA_KERNELS("generic");
#endif
    return &table;
}
