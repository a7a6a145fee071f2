// The kernels against one-element-at-a-time references, every instruction set
// against every other, over awkward counts, alignments and bit patterns.
#include "engine/kernels.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "check.h"

namespace strata {
namespace {

constexpr DType kAll[] = {DType::kPred, DType::kS8,  DType::kS16,  DType::kS32,
                          DType::kS64,  DType::kU8,  DType::kU16,  DType::kU32,
                          DType::kU64,  DType::kF16, DType::kBF16, DType::kF32,
                          DType::kF64,  DType::kC64, DType::kC128};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin};

std::mt19937_64& Random() {
  static std::mt19937_64 generator(20240607);
  return generator;
}

std::vector<KernelIsa> Isas() {
  std::vector<KernelIsa> found;
  for (KernelIsa isa :
       {KernelIsa::kBaseline, KernelIsa::kAvx2, KernelIsa::kAvx512}) {
    if (KernelIsaAvailable(isa)) found.push_back(isa);
  }
  return found;
}

// Restores the dispatcher's own choice.
struct IsaGuard {
  KernelIsa before = ActiveKernelIsa();
  ~IsaGuard() { SetKernelIsa(before); }
};

std::string Case(DType t, ReduceOp op, int n, int64_t count, KernelIsa isa) {
  return "dtype " + std::to_string(static_cast<int>(t)) + " op " +
         std::to_string(static_cast<int>(op)) + " n " + std::to_string(n) +
         " count " + std::to_string(count) + " on " + NameOf(isa);
}

// --- references -------------------------------------------------------------

double HalfToDouble(uint16_t h, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  int exponent = (h & 0x7fff) >> mantissa_bits;
  int mantissa = h & ((1 << mantissa_bits) - 1);
  double sign = (h & 0x8000) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::nan("") : sign * HUGE_VAL;
  }
  if (exponent == 0) {
    return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  }
  return sign * std::ldexp(mantissa + (1 << mantissa_bits),
                           exponent - bias - mantissa_bits);
}

// Nearest even, from a value that is exact in double.
uint16_t DoubleToHalf(double v, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
  const int inf = ((1 << exponent_bits) - 1) << mantissa_bits;
  if (std::isnan(v)) return static_cast<uint16_t>(inf | 1);
  v = std::fabs(v);
  if (std::isinf(v)) return static_cast<uint16_t>(sign | inf);
  int exponent = v == 0 ? 1 - bias : std::max(std::ilogb(v), 1 - bias);
  // An integer; 2^mantissa_bits is where the exponent field starts, so a carry
  // moves into it and beyond the largest number into infinity.
  auto units = static_cast<int64_t>(
      std::nearbyint(std::ldexp(v, mantissa_bits - exponent)));
  int64_t bits =
      ((static_cast<int64_t>(exponent) + bias - 1) << mantissa_bits) + units;
  return static_cast<uint16_t>(sign | std::min<int64_t>(bits, inf));
}

int ExponentBits(DType t) { return t == DType::kF16 ? 5 : 8; }

template <typename T>
T Get(const void* p, int64_t i) {
  T v;
  std::memcpy(&v, static_cast<const char*>(p) + i * sizeof(T), sizeof(T));
  return v;
}

template <typename T>
void Put(void* p, int64_t i, T v) {
  std::memcpy(static_cast<char*>(p) + i * sizeof(T), &v, sizeof(T));
}

// numpy.maximum and numpy.minimum, with -0 below +0.
template <typename T>
bool FirstWins(T a, T b, ReduceOp op) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) || std::isnan(b)) return std::isnan(a);
    if (a == b) {
      return op == ReduceOp::kMax ? std::signbit(a) <= std::signbit(b)
                                  : std::signbit(a) >= std::signbit(b);
    }
  }
  return op == ReduceOp::kMax ? a >= b : a <= b;
}

template <typename T>
void ReferencePlain(const std::vector<const void*>& srcs, void* dst,
                    int64_t count, ReduceOp op) {
  for (int64_t i = 0; i < count; ++i) {
    T r = Get<T>(srcs[0], i);
    for (size_t k = 1; k < srcs.size(); ++k) {
      T x = Get<T>(srcs[k], i);
      if (op != ReduceOp::kSum) {
        r = FirstWins(r, x, op) ? r : x;
      } else if constexpr (std::is_integral_v<T>) {
        using U = std::make_unsigned_t<T>;
        r = static_cast<T>(
            static_cast<U>(static_cast<U>(r) + static_cast<U>(x)));
      } else {
        r = r + x;
      }
    }
    Put(dst, i, r);
  }
}

void ReferenceHalf(const std::vector<const void*>& srcs, void* dst,
                   int64_t count, DType t, ReduceOp op) {
  const int e = ExponentBits(t);
  for (int64_t i = 0; i < count; ++i) {
    uint16_t first = Get<uint16_t>(srcs[0], i);
    float sum = static_cast<float>(HalfToDouble(first, e));
    uint16_t best = first;
    for (size_t k = 1; k < srcs.size(); ++k) {
      uint16_t bits = Get<uint16_t>(srcs[k], i);
      double x = HalfToDouble(bits, e);
      sum = sum + static_cast<float>(x);
      best = FirstWins(HalfToDouble(best, e), x, op) ? best : bits;
    }
    Put(dst, i, op == ReduceOp::kSum ? DoubleToHalf(sum, e) : best);
  }
}

void Reference(const std::vector<const void*>& srcs, void* dst, int64_t count,
               DType t, ReduceOp op) {
  if (count == 0) return;
  if (srcs.size() == 1) {
    std::memcpy(dst, srcs[0], count * SizeOf(t));
    return;
  }
  switch (t) {
    case DType::kPred:
    case DType::kU8:
      return ReferencePlain<uint8_t>(srcs, dst, count, op);
    case DType::kS8:
      return ReferencePlain<int8_t>(srcs, dst, count, op);
    case DType::kS16:
      return ReferencePlain<int16_t>(srcs, dst, count, op);
    case DType::kU16:
      return ReferencePlain<uint16_t>(srcs, dst, count, op);
    case DType::kS32:
      return ReferencePlain<int32_t>(srcs, dst, count, op);
    case DType::kU32:
      return ReferencePlain<uint32_t>(srcs, dst, count, op);
    case DType::kS64:
      return ReferencePlain<int64_t>(srcs, dst, count, op);
    case DType::kU64:
      return ReferencePlain<uint64_t>(srcs, dst, count, op);
    case DType::kF32:
      return ReferencePlain<float>(srcs, dst, count, op);
    case DType::kF64:
      return ReferencePlain<double>(srcs, dst, count, op);
    case DType::kC64:
      return ReferencePlain<float>(srcs, dst, 2 * count, op);
    case DType::kC128:
      return ReferencePlain<double>(srcs, dst, 2 * count, op);
    case DType::kF16:
    case DType::kBF16:
      return ReferenceHalf(srcs, dst, count, t, op);
  }
}

// Bits, except that one NaN is as good as another where `any_nan`.
bool SameNumbers(const void* a, const void* b, int64_t count, DType t,
                 bool any_nan) {
  const size_t bytes = count * SizeOf(t);
  if (bytes == 0 || std::memcmp(a, b, bytes) == 0) return true;
  if (!any_nan) return false;
  auto same = [&](auto zero, int64_t numbers) {
    using T = decltype(zero);
    for (int64_t i = 0; i < numbers; ++i) {
      T x = Get<T>(a, i), y = Get<T>(b, i);
      if (std::memcmp(&x, &y, sizeof(T)) == 0) continue;
      if constexpr (std::is_floating_point_v<T>) {
        if (!std::isnan(x) || !std::isnan(y)) return false;
      } else {
        int e = ExponentBits(t);
        if (!std::isnan(HalfToDouble(x, e)) ||
            !std::isnan(HalfToDouble(y, e))) {
          return false;
        }
      }
    }
    return true;
  };
  switch (t) {
    case DType::kF16:
    case DType::kBF16:
      return same(uint16_t{0}, count);
    case DType::kF32:
      return same(0.0f, count);
    case DType::kF64:
      return same(0.0, count);
    case DType::kC64:
      return same(0.0f, 2 * count);
    case DType::kC128:
      return same(0.0, 2 * count);
    default:
      return false;
  }
}

// --- operands ---------------------------------------------------------------

// Numbers of one magnitude, so that order and rounding show, among arbitrary
// bit patterns: NaN, infinities, subnormals, both zeros.
void Fill(char* p, int64_t count, DType t) {
  auto& random = Random();
  const size_t bytes = count * SizeOf(t);
  for (size_t i = 0; i < bytes; ++i) p[i] = static_cast<char>(random());
  std::normal_distribution<double> normal;
  auto numbers = [&](auto zero, int64_t n) {
    using T = decltype(zero);
    for (int64_t i = 0; i < n; ++i) {
      uint64_t dice = random() % 16;
      if (dice < 12) Put(p, i, static_cast<T>(normal(random)));
      if (dice == 12) Put(p, i, T{0});
      if (dice == 13) Put(p, i, -T{0});
      if (dice == 14) {
        Put(p, i,
            std::numeric_limits<T>::denorm_min() *
                static_cast<T>(random() % 999));
      }
    }
  };
  switch (t) {
    case DType::kPred:
      for (size_t i = 0; i < bytes; ++i) p[i] &= 1;
      break;
    case DType::kF32:
      return numbers(0.0f, count);
    case DType::kC64:
      return numbers(0.0f, 2 * count);
    case DType::kF64:
      return numbers(0.0, count);
    case DType::kC128:
      return numbers(0.0, 2 * count);
    case DType::kF16:
    case DType::kBF16:
      for (int64_t i = 0; i < count; ++i) {
        if (random() % 16 < 12) {
          Put(p, i,
              DoubleToHalf(static_cast<float>(normal(random)),
                           ExponentBits(t)));
        }
      }
      break;
    default:
      break;
  }
}

struct Operands {
  // Exactly sized blocks, so that AddressSanitizer sees a byte too many.
  std::vector<std::vector<char>> blocks;
  std::vector<const void*> srcs;

  Operands(int n, int64_t count, DType t) {
    for (int k = 0; k < n; ++k) {
      size_t shift = Random()() % 64;
      blocks.emplace_back(shift + count * SizeOf(t));
      Fill(blocks.back().data() + shift, count, t);
      srcs.push_back(blocks.back().data() + shift);
    }
  }
};

void CheckCase(DType t, ReduceOp op, int n, int64_t count) {
  IsaGuard guard;
  Operands operands(n, count, t);
  const size_t bytes = count * SizeOf(t);
  std::vector<char> want(bytes);
  Reference(operands.srcs, want.data(), count, t, op);
  const bool any_nan = op == ReduceOp::kSum;
  for (KernelIsa isa : Isas()) {
    CHECK(SetKernelIsa(isa));
    const size_t shift = Random()() % 64;
    std::vector<char> got(shift + bytes + 64, 0x5a);
    ReduceN(operands.srcs.data(), n, got.data() + shift, count, t, op);
    CHECK_MSG(SameNumbers(got.data() + shift, want.data(), count, t, any_nan),
              Case(t, op, n, count, isa));
    for (size_t i = 0; i < 64; ++i) {
      CHECK_MSG(got[shift + bytes + i] == 0x5a, Case(t, op, n, count, isa));
    }
    // In place, over any one of the sources, which is restored afterwards.
    const int victim = static_cast<int>(Random()() % n);
    void* dst = const_cast<void*>(operands.srcs[victim]);
    std::vector<char> saved(bytes);
    if (bytes == 0) continue;
    std::memcpy(saved.data(), dst, bytes);
    ReduceN(operands.srcs.data(), n, dst, count, t, op);
    CHECK_MSG(SameNumbers(dst, want.data(), count, t, any_nan),
              "in place, " + Case(t, op, n, count, isa));
    std::memcpy(dst, saved.data(), bytes);
  }
}

// --- tests ------------------------------------------------------------------

TEST(EveryTypeSmallCounts) {
  for (DType t : kAll) {
    for (ReduceOp op : kOps) {
      if (!Reducible(t, op)) continue;
      for (int n : {1, 2, 3, 4, 5, 7, 8, 9, 13, 17, 64, 65}) {
        for (int64_t count : {0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 65, 130}) {
          CheckCase(t, op, n, count);
        }
      }
    }
  }
}

TEST(EveryTypeAcrossBlocks) {
  for (DType t : kAll) {
    for (ReduceOp op : kOps) {
      if (!Reducible(t, op)) continue;
      for (int n : {2, 4, 5, 9, 12, 13}) {
        for (int64_t count : {1023, 1024, 2049, 4096, 4097, 5003}) {
          CheckCase(t, op, n, count);
        }
      }
    }
  }
}

TEST(ReduciblePairs) {
  for (DType t : kAll) {
    bool complex = t == DType::kC64 || t == DType::kC128;
    CHECK_EQ(Reducible(t, ReduceOp::kSum), t != DType::kPred);
    CHECK_EQ(Reducible(t, ReduceOp::kMax), !complex);
    CHECK_EQ(Reducible(t, ReduceOp::kMin), !complex);
  }
  CHECK(!Reducible(static_cast<DType>(19), ReduceOp::kSum));
}

TEST(NegativeZeroSurvives) {
  for (int n : {1, 2, 3, 9}) {
    float x = -0.0f, y = 1;
    std::vector<const void*> srcs(n, &x);
    ReduceN(srcs.data(), n, &y, 1, DType::kF32, ReduceOp::kSum);
    CHECK(y == 0 && std::signbit(y));
    uint16_t h = 0x8000, g = 1;
    srcs.assign(n, &h);
    for (DType t : {DType::kF16, DType::kBF16}) {
      ReduceN(srcs.data(), n, &g, 1, t, ReduceOp::kSum);
      CHECK_EQ(g, 0x8000);
    }
  }
}

TEST(OrderIsTheGroups) {
  // (1e8 + 1) - 1e8 is 0 in f32; any other order gives 1.
  float a = 1e8f, b = 1, c = -1e8f, r = 7;
  const void* srcs[] = {&a, &b, &c};
  ReduceN(srcs, 3, &r, 1, DType::kF32, ReduceOp::kSum);
  CHECK_EQ(r, 0.0f);
}

TEST(OneRoundingForHalves) {
  // 2048 + 1 + 1: 2050 when rounded once, 2048 when rounded each time.
  uint16_t a = DoubleToHalf(2048, 5), b = DoubleToHalf(1, 5), r = 0;
  const void* srcs[] = {&a, &b, &b};
  ReduceN(srcs, 3, &r, 1, DType::kF16, ReduceOp::kSum);
  CHECK_EQ(HalfToDouble(r, 5), 2050.0);
  a = DoubleToHalf(256, 8), b = DoubleToHalf(1, 8);
  ReduceN(srcs, 3, &r, 1, DType::kBF16, ReduceOp::kSum);
  CHECK_EQ(HalfToDouble(r, 8), 258.0);
}

// Every 16-bit pattern against a handful of others: all widenings, and the
// narrowing of sums that round up, down, to even, to infinity and to zero.
TEST(EveryHalfPattern) {
  IsaGuard guard;
  std::vector<uint16_t> all(65536), other(65536), got(65536), want(65536);
  for (int i = 0; i < 65536; ++i) all[i] = static_cast<uint16_t>(i);
  for (DType t : {DType::kF16, DType::kBF16}) {
    for (int fixed : {0x8000, 0x0001, 0x83ff, 0x0400, 0x3c00, 0x3c01, 0x7bff,
                      0xfbff, 0x7c00, 0xfc01, 0x7f7f, 0x7f80, 0xffff}) {
      std::fill(other.begin(), other.end(), static_cast<uint16_t>(fixed));
      const void* srcs[] = {all.data(), other.data()};
      for (ReduceOp op : kOps) {
        Reference({srcs[0], srcs[1]}, want.data(), 65536, t, op);
        for (KernelIsa isa : Isas()) {
          SetKernelIsa(isa);
          ReduceN(srcs, 2, got.data(), 65536, t, op);
          CHECK_MSG(SameNumbers(got.data(), want.data(), 65536, t,
                                op == ReduceOp::kSum),
                    Case(t, op, 2, fixed, isa));
        }
      }
    }
  }
}

TEST(NanStaysNan) {
  // Payloads whose set bits a careless rounding loses or carries away.
  for (uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
    for (KernelIsa isa : Isas()) {
      IsaGuard guard;
      SetKernelIsa(isa);
      std::vector<uint32_t> x(37, bits), y(37, 0x3f800000u), r(37);
      for (bool swap : {false, true}) {
        const void* srcs[] = {swap ? y.data() : x.data(),
                              swap ? x.data() : y.data()};
        for (ReduceOp op : kOps) {
          ReduceN(srcs, 2, r.data(), 37, DType::kF32, op);
          for (uint32_t v : r) CHECK((v & 0x7fffffffu) > 0x7f800000u);
        }
      }
    }
  }
}

TEST(IntegersWrap) {
  int32_t a = std::numeric_limits<int32_t>::max(), b = 1, r = 0;
  const void* srcs[] = {&a, &b};
  ReduceN(srcs, 2, &r, 1, DType::kS32, ReduceOp::kSum);
  CHECK_EQ(r, std::numeric_limits<int32_t>::min());
}

TEST(CopyAndZero) {
  char a[9] = "abcdefgh", b[9] = {};
  CopyBytes(b, a, 9);
  CHECK_EQ(std::string(b), "abcdefgh");
  CopyBytes(b, b, 9);
  CopyBytes(nullptr, nullptr, 0);
  ZeroBytes(b + 2, 3);
  CHECK(std::memcmp(b, "ab\0\0\0fgh", 9) == 0);
  ZeroBytes(nullptr, 0);
}

#if defined(__x86_64__)
// As XLA computes: flush to zero and denormals are zero.  Whatever the mode,
// the instruction sets agree; and bit-wise operations keep denormals.
TEST(FlushingModesAgree) {
  IsaGuard guard;
  const unsigned before = _mm_getcsr();
  bool same = true;
  for (DType t : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    for (ReduceOp op : kOps) {
      for (int n : {2, 3, 6, 11}) {
        Operands operands(n, 4000, t);
        std::vector<char> first(4000 * SizeOf(t)), got(first.size());
        SetKernelIsa(KernelIsa::kBaseline);
        _mm_setcsr(before | 0x8040);
        ReduceN(operands.srcs.data(), n, first.data(), 4000, t, op);
        for (KernelIsa isa : Isas()) {
          SetKernelIsa(isa);
          ReduceN(operands.srcs.data(), n, got.data(), 4000, t, op);
          same = same && SameNumbers(got.data(), first.data(), 4000, t, true);
        }
        _mm_setcsr(before);
        if (op != ReduceOp::kSum) {
          Reference(operands.srcs, got.data(), 4000, t, op);
          same = same && SameNumbers(got.data(), first.data(), 4000, t, false);
        }
      }
    }
  }
  CHECK(same);
}
#endif

}  // namespace
}  // namespace strata
