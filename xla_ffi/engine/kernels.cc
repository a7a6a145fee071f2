#include "engine/kernels.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <memory>

#include "engine/kernels_isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace strata {
namespace {

constexpr int64_t kBlock = int64_t{16} << 10;  // stays in the first-level cache

#if defined(__x86_64__)
// Not by __builtin_cpu_supports: clang's does not know this one.
bool HasF16C() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

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
      return __builtin_cpu_supports("avx2") && HasF16C();
#else
      return false;
#endif
    case KernelIsa::kAvx512:
#if defined(__x86_64__)
      return __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && HasF16C();
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

void ReduceToAll(const void* const* srcs, int n, void* const* dsts, int copies,
                 int64_t count, DType dtype, ReduceOp op) {
  const int64_t bytes = count * static_cast<int64_t>(SizeOf(dtype));
  if (bytes <= 0) return;
  const bool stream = bytes >= kStreamFrom;
  if (copies == 1 && !stream) {
    ReduceN(srcs, n, dsts[0], count, dtype, op);
    return;
  }
  alignas(64) unsigned char scratch[kBlock];
  constexpr int kMost = 64;
  const void* shifted[kMost];
  std::unique_ptr<const void*[]> many;
  const void** at = shifted;
  if (n > kMost) {
    many = std::make_unique<const void*[]>(static_cast<size_t>(n));
    at = many.get();
  }
  for (int64_t done = 0; done < bytes; done += kBlock) {
    const int64_t block = std::min(kBlock, bytes - done);
    for (int k = 0; k < n; ++k) {
      at[k] = static_cast<const unsigned char*>(srcs[k]) + done;
    }
    const auto target = [&](int k) {
      return static_cast<unsigned char*>(dsts[k]) + done;
    };
    unsigned char* from = stream ? scratch : target(0);
    ReduceN(at, n, from, block / static_cast<int64_t>(SizeOf(dtype)), dtype,
            op);
    for (int k = stream ? 0 : 1; k < copies; ++k) {
      if (stream) {
        StreamBytes(target(k), from, static_cast<size_t>(block));
      } else {
        CopyBytes(target(k), from, static_cast<size_t>(block));
      }
    }
  }
}

#if defined(__x86_64__)
void StreamBytes(void* dst, const void* src, size_t bytes) {
  auto* to = static_cast<unsigned char*>(dst);
  auto* from = static_cast<const unsigned char*>(src);
  const size_t head =
      std::min(bytes, (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64);
  CopyBytes(to, from, head);
  to += head;
  from += head;
  bytes -= head;
  const size_t lines = bytes / 64;
  for (size_t i = 0; i < lines; ++i, to += 64, from += 64) {
    // Loaded whole before it is stored: one cache line, one burst.
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i b =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16));
    const __m128i c =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 32));
    const __m128i d =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 48));
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), a);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + 16), b);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + 32), c);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + 48), d);
  }
  // Streaming stores are not ordered by the stores that publish them.
  _mm_sfence();
  CopyBytes(to, from, bytes % 64);
}
#else
void StreamBytes(void* dst, const void* src, size_t bytes) {
  CopyBytes(dst, src, bytes);
}
#endif

void CopyBytes(void* dst, const void* src, size_t bytes) {
  if (bytes != 0 && dst != src) std::memcpy(dst, src, bytes);
}

void CopyResult(void* dst, const void* src, size_t bytes) {
  if (static_cast<int64_t>(bytes) < kStreamFrom) {
    CopyBytes(dst, src, bytes);
  } else if (dst != src) {
    StreamBytes(dst, src, bytes);
  }
}

void ZeroBytes(void* dst, size_t bytes) {
  if (bytes != 0) std::memset(dst, 0, bytes);
}

}  // namespace strata
