// Owns: the loops that touch operand bytes: N-way reduction, copy, zero fill.
// Invariant: a result is a function of the operands' bits alone.  Every
// instruction set, count, block edge and alignment gives the same bits:
//   dst[i] = (((srcs[0][i] + srcs[1][i]) + srcs[2][i]) + ...),
// started from srcs[0] (so -0.0 survives), in the accumulation type (f32 for
// f16 and bf16), rounded once to nearest even at the end.
//
// Sums obey the caller's MXCSR or FPCR and never change it.  XLA computes with
// flush-to-zero, denormals-are-zero and round-to-nearest, so a thread that
// reduces must set all three, or the bits depend on which thread came last.
// Max and min, the narrowing conversions, copies and n == 1 work on bit
// patterns and ignore those modes: they keep denormals.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/types.h"

namespace strata {

// Whether ReduceN knows this pair.  No for sums of kPred (convert to integers)
// and for max and min of complex numbers.
bool Reducible(DType dtype, ReduceOp op);

// Integers wrap.  NaN stays NaN (its payload is unspecified); max and min
// propagate NaN and order -0 below +0.  Pointers need no alignment.  dst may
// equal sources exactly and overlaps none in part.  n >= 1, count >= 0, and
// Reducible(dtype, op).
void ReduceN(const void* const* srcs, int n, void* dst, int64_t count,
             DType dtype, ReduceOp op);

// The same into dsts[0], and the bytes of it into the other destinations, block
// by block while a block is in the cache.  dsts[k] equals sources exactly or
// overlaps none.
void ReduceToAll(const void* const* srcs, int n, void* const* dsts, int copies,
                 int64_t count, DType dtype, ReduceOp op);

// dst == src is allowed, other overlap is not.
void CopyBytes(void* dst, const void* src, size_t bytes);
// As CopyBytes, past the caches where the machine can: for results so large
// that they would not stay there.
void StreamBytes(void* dst, const void* src, size_t bytes);
// Results from this size on are streamed.  (The C library's memcpy streams from
// a share of the last cache on, which virtual machines report as the host's.)
inline constexpr int64_t kStreamFrom = int64_t{8} << 20;
// The one of the two that suits a result of this size.
void CopyResult(void* dst, const void* src, size_t bytes);
void ZeroBytes(void* dst, size_t bytes);

enum class KernelIsa : uint8_t { kBaseline, kAvx2, kAvx512 };

const char* NameOf(KernelIsa isa);

// Whether this build and this CPU have it.  kBaseline always is there.
bool KernelIsaAvailable(KernelIsa isa);

// The best available one unless SetKernelIsa chose another (tests and
// measurements do).  False, and no change, if it is not available.
KernelIsa ActiveKernelIsa();
bool SetKernelIsa(KernelIsa isa);

}  // namespace strata
