// Owns: the seam between the dispatcher and the builds of kernels_impl.inc.
// Private to xla_ffi/engine.  Invariant: declarations only, so including it
// under another instruction set emits no code.
#pragma once

#include <cstdint>

#include "plan/types.h"

namespace strata {

using Kernel = void (*)(const void* const* srcs, int n, void* dst,
                        int64_t bytes);

// Null for a pair that is not reducible; the same pairs in every build.
namespace kernels_baseline {
Kernel FindKernel(DType dtype, ReduceOp op);
}
#if defined(__x86_64__)
namespace kernels_avx2 {
Kernel FindKernel(DType dtype, ReduceOp op);
}
namespace kernels_avx512 {
Kernel FindKernel(DType dtype, ReduceOp op);
}
#endif

}  // namespace strata
