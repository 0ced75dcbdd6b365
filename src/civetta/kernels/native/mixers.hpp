// The part of the module that binds everything but the products.
#pragma once

#include <nanobind/nanobind.h>

#include "matrix.hpp"

namespace civetta {

using GetKernels = const Kernels* (*)();

// `active` tells the kernels in use; it is asked at every call.
void bind_mixers(nanobind::module_& m, GetKernels active);

}  // namespace civetta
