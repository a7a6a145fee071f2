// The kernels for what every CPU of the architecture has (SSE2, NEON).
#include "engine/kernels_isa.h"

#define STRATA_KERNEL_NS kernels_baseline
#define STRATA_KERNEL_WIDTH 16
#define STRATA_KERNEL_F16C 0
#include "engine/kernels_impl.inc"
