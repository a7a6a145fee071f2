// The kernels for AVX2 and F16C.  The target is chosen here and not by the
// build system, after every other header, and holds to the end of the file.
#if defined(__x86_64__)
#include <immintrin.h>

#include "engine/kernels_isa.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#define STRATA_KERNEL_NS kernels_avx2
#define STRATA_KERNEL_WIDTH 32
#define STRATA_KERNEL_F16C 1
#include "engine/kernels_impl.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
