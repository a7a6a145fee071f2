// ReduceToAll and StreamBytes: the bytes of ReduceN and of a copy, whatever the
// size, the alignment and the way they take to memory.
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "engine/kernels.h"

namespace strata {
namespace {

using Bytes = std::vector<unsigned char>;

Bytes Noise(size_t bytes, unsigned seed) {
  std::mt19937_64 random(seed);
  Bytes data(bytes);
  for (unsigned char& b : data) b = static_cast<unsigned char>(random());
  return data;
}

TEST(StreamCopies) {
  const Bytes from = Noise(5000, 1);
  for (size_t bytes : {0u, 1u, 63u, 64u, 65u, 127u, 128u, 1000u, 4096u}) {
    for (size_t to : {0u, 1u, 17u, 63u}) {
      for (size_t at : {0u, 3u, 64u}) {
        Bytes got(5000, 0xee), want(5000, 0xee);
        std::memcpy(want.data() + to, from.data() + at, bytes);
        StreamBytes(got.data() + to, from.data() + at, bytes);
        CHECK(got == want);
      }
    }
  }
}

// Sizes below, at and above the one from which stores go past the caches.
TEST(EveryDestinationGetsTheSum) {
  constexpr int64_t kCounts[] = {
      0, 1, 4095, 4097, 100003, kStreamFrom / 4, kStreamFrom / 4 + 1, 2500001};
  for (int64_t count : kCounts) {
    for (int n : {1, 2, 5}) {
      const size_t bytes = static_cast<size_t>(count) * 4;
      std::vector<Bytes> srcs;
      std::vector<const void*> src;
      for (int k = 0; k < n; ++k) {
        srcs.push_back(Noise(bytes + 4, static_cast<unsigned>(k)));
        src.push_back(srcs.back().data() + 4);
      }
      Bytes want(bytes);
      ReduceN(src.data(), n, want.data(), count, DType::kS32, ReduceOp::kSum);
      for (int copies : {1, 2, 4}) {
        std::vector<Bytes> dsts(static_cast<size_t>(copies), Bytes(bytes + 9));
        std::vector<void*> dst;
        for (Bytes& d : dsts) dst.push_back(d.data() + 5);
        ReduceToAll(src.data(), n, dst.data(), copies, count, DType::kS32,
                    ReduceOp::kSum);
        for (const Bytes& d : dsts) {
          CHECK(bytes == 0 ||
                std::memcmp(d.data() + 5, want.data(), bytes) == 0);
          for (size_t i : {0u, 1u, 2u, 3u, 4u}) CHECK_EQ(int{d[i]}, 0);
          for (size_t i : {5u, 6u, 7u, 8u}) CHECK_EQ(int{d[bytes + i]}, 0);
        }
      }
    }
  }
}

TEST(InPlace) {
  for (int64_t count : {1000, 2200000}) {
    Bytes a = Noise(static_cast<size_t>(count) * 4, 1);
    const Bytes b = Noise(a.size(), 2);
    Bytes other(a.size()), want(a.size());
    const void* src[] = {a.data(), b.data()};
    ReduceN(src, 2, want.data(), count, DType::kU32, ReduceOp::kMax);
    void* dst[] = {a.data(), other.data()};
    ReduceToAll(src, 2, dst, 2, count, DType::kU32, ReduceOp::kMax);
    CHECK(a == want);
    CHECK(other == want);
  }
}

}  // namespace
}  // namespace strata
