#include "engine/kernels.h"

#include <atomic>
#include <cstring>
#include <initializer_list>

#include "engine/kernels_isa.h"

namespace strata {
namespace {

using Finder = Kernel (*)(DType, ReduceOp);

Finder FinderOf(KernelIsa isa) {
  switch (isa) {
    case KernelIsa::kBaseline:
      return &kernels_baseline::FindKernel;
#if defined(__x86_64__)
    case KernelIsa::kAvx2:
      return &kernels_avx2::FindKernel;
    case KernelIsa::kAvx512:
      return &kernels_avx512::FindKernel;
#else
    case KernelIsa::kAvx2:
    case KernelIsa::kAvx512:
      break;
#endif
  }
  return nullptr;
}

KernelIsa BestIsa() {
  for (KernelIsa isa : {KernelIsa::kAvx512, KernelIsa::kAvx2}) {
    if (KernelIsaAvailable(isa)) return isa;
  }
  return KernelIsa::kBaseline;
}

// Not a plain global: a handler may run before this file's initializers.
std::atomic<KernelIsa>& Active() {
  static std::atomic<KernelIsa> active{BestIsa()};
  return active;
}

}  // namespace

const char* NameOf(KernelIsa isa) {
  switch (isa) {
    case KernelIsa::kBaseline:
      return "baseline";
    case KernelIsa::kAvx2:
      return "avx2";
    case KernelIsa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

bool KernelIsaAvailable(KernelIsa isa) {
  switch (isa) {
    case KernelIsa::kBaseline:
      return true;
    case KernelIsa::kAvx2:
#if defined(__x86_64__)
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
      return false;
#endif
    case KernelIsa::kAvx512:
#if defined(__x86_64__)
      return __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("f16c");
#else
      return false;
#endif
  }
  return false;
}

KernelIsa ActiveKernelIsa() { return Active().load(std::memory_order_relaxed); }

bool SetKernelIsa(KernelIsa isa) {
  if (!KernelIsaAvailable(isa)) return false;
  Active().store(isa, std::memory_order_relaxed);
  return true;
}

bool Reducible(DType dtype, ReduceOp op) {
  return kernels_baseline::FindKernel(dtype, op) != nullptr;
}

void ReduceN(const void* const* srcs, int n, void* dst, int64_t count,
             DType dtype, ReduceOp op) {
  const int64_t bytes = count * static_cast<int64_t>(SizeOf(dtype));
  if (bytes <= 0) return;
  if (n == 1) {
    CopyBytes(dst, srcs[0], static_cast<size_t>(bytes));
    return;
  }
  FinderOf(ActiveKernelIsa())(dtype, op)(srcs, n, dst, bytes);
}

void CopyBytes(void* dst, const void* src, size_t bytes) {
  if (bytes != 0 && dst != src) std::memcpy(dst, src, bytes);
}

void ZeroBytes(void* dst, size_t bytes) {
  if (bytes != 0) std::memset(dst, 0, bytes);
}

}  // namespace strata
