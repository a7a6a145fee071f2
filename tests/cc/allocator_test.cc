// The arena's allocator against a model: no overlap, alignment, reuse, and the
// invariants of its own walk, under random use by one thread and by several.
#include "fabric/allocator.h"

#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "check.h"
#include "harness.h"

namespace strata {
namespace {

using harness::Deadline;
using harness::Random;
using harness::RunThreads;
using harness::Seeds;

constexpr size_t kGranule = Allocator::kGranule;

size_t RandomBytes(Random& random) {
  switch (random.Below(4)) {
    case 0:
      return random.Below(3 * kGranule);
    case 1:
      return random.Below(64 * kGranule);
    case 2:
      return (random.Below(40) + 1) * kGranule;
    default:
      return random.Below(2000 * kGranule);
  }
}

// Blocks in use, by offset; fails where two overlap.
class Model {
 public:
  size_t end() const {
    return blocks_.empty() ? 0
                           : blocks_.rbegin()->first + blocks_.rbegin()->second;
  }
  void Add(size_t offset, size_t bytes) {
    const auto next = blocks_.lower_bound(offset);
    CHECK(next == blocks_.end() || offset + bytes <= next->first);
    if (next != blocks_.begin()) {
      const auto previous = std::prev(next);
      CHECK(previous->first + previous->second <= offset);
    }
    blocks_[offset] = bytes;
    used_ += bytes;
  }
  size_t RemoveAny(Random& random) {
    auto it = blocks_.begin();
    std::advance(it, random.Below(blocks_.size()));
    const size_t offset = it->first;
    used_ -= it->second;
    blocks_.erase(it);
    return offset;
  }
  void Remove(size_t offset) {
    const auto it = blocks_.find(offset);
    CHECK(it != blocks_.end());
    used_ -= it->second;
    blocks_.erase(it);
  }
  size_t used() const { return used_; }
  bool empty() const { return blocks_.empty(); }
  size_t size() const { return blocks_.size(); }

 private:
  std::map<size_t, size_t> blocks_;
  size_t used_ = 0;
};

TEST(RandomUseKeepsInvariants) {
  const Deadline deadline("RandomUseKeepsInvariants", 60);
  for (uint64_t seed : Seeds("RandomUseKeepsInvariants", 4)) {
    Random random(seed);
    const size_t total = (random.Below(20000) + 500) * kGranule;
    Allocator allocator(total + random.Below(kGranule));
    Model model;
    size_t refused = 0;
    for (int step = 0; step < 6000; ++step) {
      // Phases of growth and of shrinking.
      const bool grow = random.Below(10) < (step / 500 % 2 == 0 ? 7u : 3u);
      if (grow || model.empty()) {
        const size_t bytes = RandomBytes(random);
        const size_t alignment = random.OneIn(4)
                                     ? kGranule << random.Below(8)
                                     : (random.OneIn(3) ? 64 : kGranule);
        const size_t offset = allocator.Allocate(bytes, alignment);
        if (offset == Allocator::kFull) {
          ++refused;
          continue;
        }
        const size_t size = allocator.SizeOf(offset);
        CHECK(size >= bytes && size > 0 && size < bytes + kGranule + 1);
        CHECK_EQ(offset % std::max(alignment, kGranule), 0u);
        CHECK(offset + size <= total);
        model.Add(offset, size);
      } else {
        allocator.Free(model.RemoveAny(random));
      }
      CHECK_EQ(allocator.used(), model.used());
      if (step % 50 == 0) allocator.CheckInvariants();
    }
    while (!model.empty()) allocator.Free(model.RemoveAny(random));
    allocator.CheckInvariants();
    CHECK_EQ(allocator.used(), 0u);
    // All of it is one block again.
    CHECK_EQ(allocator.Allocate(total / 2), 0u);
    CHECK(refused < 6000);
  }
}

TEST(TheTailIsTakenAndComesBack) {
  const Deadline deadline("TheTailIsTakenAndComesBack", 60);
  for (uint64_t seed : Seeds("TheTailIsTakenAndComesBack", 4)) {
    Random random(seed);
    const size_t total = (random.Below(20000) + 500) * kGranule;
    Allocator allocator(total);
    Model model;
    size_t taken = Allocator::kFull;  // a tail, while it is out
    int tails = 0;
    for (int step = 0; step < 6000; ++step) {
      const size_t high = allocator.high_water();
      CHECK(high >= model.end() || taken != Allocator::kFull);
      if (random.OneIn(8) && taken == Allocator::kFull) {
        const size_t keep = random.Below(high + 40 * kGranule);
        const size_t upto = random.Below(total + 40 * kGranule);
        size_t end = 0;
        const bool beyond = random.OneIn(3);
        taken = allocator.TakeTail(keep, upto, beyond, &end);
        // There is one whenever something free lies past `keep`.
        const size_t last =
            std::max(high, std::min(total, upto / kGranule * kGranule));
        const size_t first =
            std::max((keep + kGranule - 1) / kGranule * kGranule, model.end());
        CHECK_EQ(taken == Allocator::kFull, first >= (beyond ? last : high));
        if (taken == Allocator::kFull) continue;
        ++tails;
        CHECK_EQ(taken, first);
        CHECK_EQ(end, last);
        CHECK_EQ(allocator.SizeOf(taken), end - taken);
        CHECK_EQ(allocator.high_water(), high);
        model.Add(taken, end - taken);
      } else if (random.OneIn(3) && taken != Allocator::kFull) {
        allocator.Free(taken);
        model.Remove(taken);
        const size_t before = allocator.high_water();
        allocator.LowerHighWater(taken);
        // Unless somebody sits behind it.
        CHECK_EQ(allocator.high_water(), model.end() <= taken ? taken : before);
        taken = Allocator::kFull;
      } else if (random.Below(10) < (step / 500 % 2 == 0 ? 7u : 3u) ||
                 model.empty()) {
        const size_t offset = allocator.Allocate(RandomBytes(random));
        if (offset == Allocator::kFull) continue;
        model.Add(offset, allocator.SizeOf(offset));
      } else {
        const size_t offset = model.RemoveAny(random);
        if (offset == taken) taken = Allocator::kFull;
        allocator.Free(offset);
      }
      CHECK_EQ(allocator.used(), model.used());
      if (step % 50 == 0) allocator.CheckInvariants();
    }
    CHECK(tails > 20);
    while (!model.empty()) allocator.Free(model.RemoveAny(random));
    allocator.CheckInvariants();
    allocator.LowerHighWater(0);
    CHECK_EQ(allocator.high_water(), 0u);
    size_t end = 0;
    CHECK_EQ(allocator.TakeTail(0, total, false, &end), Allocator::kFull);
    CHECK_EQ(allocator.Allocate(total / 2), 0u);
    CHECK_EQ(allocator.TakeTail(0, total, false, &end), Allocator::kFull);
  }
}

TEST(NothingComesFromAClosedOne) {
  Allocator allocator(64 * kGranule);
  const size_t a = allocator.Allocate(kGranule);
  CHECK(!allocator.Close());
  CHECK(allocator.Allocate(kGranule) != Allocator::kFull);
  allocator.Free(a);
  CHECK(!allocator.Close());
  allocator.Free(a + kGranule);
  CHECK(allocator.Close());
  CHECK(allocator.Close());
  CHECK_EQ(allocator.Allocate(kGranule), Allocator::kFull);
  size_t end = 0;
  CHECK_EQ(allocator.TakeTail(0, 0, true, &end), Allocator::kFull);
  allocator.CheckInvariants();
}

TEST(FullAndThenReused) {
  Allocator allocator(64 * kGranule);
  std::vector<size_t> offsets;
  for (;;) {
    const size_t offset = allocator.Allocate(kGranule);
    if (offset == Allocator::kFull) break;
    offsets.push_back(offset);
  }
  CHECK(offsets.size() >= 63);
  const size_t high = allocator.high_water();
  for (size_t offset : offsets) allocator.Free(offset);
  CHECK_EQ(allocator.used(), 0u);
  // The lowest granules serve again; the high-water mark stays.
  CHECK_EQ(allocator.Allocate(10 * kGranule), 0u);
  CHECK_EQ(allocator.high_water(), high);
  allocator.CheckInvariants();
}

TEST(ImpossibleRequestsAreRefused) {
  Allocator allocator(64 * kGranule);
  CHECK_EQ(allocator.Allocate(65 * kGranule), Allocator::kFull);
  CHECK_EQ(allocator.Allocate(~size_t{0}), Allocator::kFull);
  CHECK_EQ(allocator.Allocate(~size_t{0} - kGranule), Allocator::kFull);
  CHECK_EQ(allocator.Allocate(1, size_t{1} << 40), Allocator::kFull);
  allocator.CheckInvariants();
  Allocator nothing(100);
  CHECK_EQ(nothing.Allocate(1), Allocator::kFull);
  nothing.CheckInvariants();
}

TEST(WrongFreesAreErrors) {
  Allocator allocator(64 * kGranule);
  const size_t a = allocator.Allocate(4 * kGranule);
  CHECK_THROWS(allocator.Free(a + kGranule), std::logic_error, "not allocated");
  CHECK_THROWS(allocator.Free(a + 1), std::logic_error, "not allocated");
  allocator.Free(a);
  CHECK_THROWS(allocator.Free(a), std::logic_error, "not allocated");
  allocator.CheckInvariants();
}

TEST(ThreadsShareIt) {
  const Deadline deadline("ThreadsShareIt", 60);
  for (uint64_t seed : Seeds("ThreadsShareIt")) {
    constexpr size_t kTotal = 4096 * kGranule;
    Allocator allocator(kTotal);
    // Who owns a granule; plain bytes, so that the sanitizer sees an overlap as
    // the data race that it would be.
    std::vector<unsigned char> owner(kTotal / kGranule, 0);
    RunThreads(4, [&](int me) {
      Random random(seed * 100 + static_cast<uint64_t>(me));
      std::vector<std::pair<size_t, size_t>> mine;
      for (int step = 0; step < 4000 / harness::kSlow; ++step) {
        if (mine.size() < 20 && !random.OneIn(3)) {
          const size_t bytes = random.Below(30 * kGranule) + 1;
          const size_t at =
              allocator.Allocate(bytes, kGranule << random.Below(3));
          if (at == Allocator::kFull) continue;
          const size_t end = (at + allocator.SizeOf(at)) / kGranule;
          for (size_t g = at / kGranule; g < end; ++g) {
            CHECK_EQ(owner[g], 0);
            owner[g] = static_cast<unsigned char>(me + 1);
          }
          mine.emplace_back(at, end);
        } else if (!mine.empty()) {
          std::swap(mine[random.Below(mine.size())], mine.back());
          const auto [at, end] = mine.back();
          mine.pop_back();
          for (size_t g = at / kGranule; g < end; ++g) {
            CHECK_EQ(owner[g], me + 1);
            owner[g] = 0;
          }
          allocator.Free(at);
        }
        if (step % 500 == 0) allocator.CheckInvariants();
      }
      for (const auto& [at, end] : mine) {
        for (size_t g = at / kGranule; g < end; ++g) owner[g] = 0;
        allocator.Free(at);
      }
    });
    CHECK_EQ(allocator.used(), 0u);
    allocator.CheckInvariants();
  }
}

}  // namespace
}  // namespace strata
