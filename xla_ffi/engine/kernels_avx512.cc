// The kernels for AVX-512.  The target is chosen here and not by the build
// system, after every other header, and holds to the end of the file.
#if defined(__x86_64__)
#include <immintrin.h>

#include "engine/kernels_isa.h"

#if defined(__clang__)
#pragma clang attribute push(                                           \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#endif

#define STRATA_KERNEL_NS kernels_avx512
#define STRATA_KERNEL_WIDTH 64
#define STRATA_KERNEL_F16C 1
#include "engine/kernels_impl.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
