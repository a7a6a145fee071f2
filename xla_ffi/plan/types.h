// Owns: the vocabulary of element types and reductions shared by plan, engine
// and ffi.  Invariant: DType values are XLA's own (xla/ffi/api/c_api.h), so a
// buffer's type code needs no translation, but plan and engine never include
// an XLA header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace strata {

enum class DType : uint8_t {
  kPred = 1,
  kS8 = 2,
  kS16 = 3,
  kS32 = 4,
  kS64 = 5,
  kU8 = 6,
  kU16 = 7,
  kU32 = 8,
  kU64 = 9,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kC64 = 15,
  kBF16 = 16,
  kC128 = 18,
};

enum class ReduceOp : uint8_t { kSum = 0, kMax = 1, kMin = 2 };

enum class OpKind : uint8_t {
  kPsum = 1,
  kPsumScatter = 2,
  kAllGather = 3,
  kPpermute = 4,
  kBarrier = 5,
};

// Bytes of one element; 0 for a type no reduction is defined for.
constexpr size_t SizeOf(DType t) {
  switch (t) {
    case DType::kPred:
    case DType::kS8:
    case DType::kU8:
      return 1;
    case DType::kS16:
    case DType::kU16:
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kS32:
    case DType::kU32:
    case DType::kF32:
      return 4;
    case DType::kS64:
    case DType::kU64:
    case DType::kF64:
    case DType::kC64:
      return 8;
    case DType::kC128:
      return 16;
  }
  return 0;
}

}  // namespace strata
