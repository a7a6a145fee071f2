// Blocks that are held back: only those that overlap a held range, until all
// who hold it are through, whatever the threads do.
#include "fabric/quarantine.h"

#include <atomic>
#include <set>
#include <vector>

#include "check.h"
#include "fabric/arena.h"
#include "harness.h"

namespace strata {
namespace {

using harness::Deadline;
using harness::Random;
using harness::RunThreads;
using harness::Seeds;

using Range = Quarantine::Range;

void* At(uint64_t address) { return reinterpret_cast<void*>(address); }

std::multiset<void*> Swept(Quarantine& q) {
  std::multiset<void*> freed;
  q.Sweep([&](void* p) { freed.insert(p); });
  return freed;
}

TEST(KeepsWhatOverlapsAndNothingElse) {
  Quarantine q;
  CHECK(!q.holding());
  CHECK(!q.Keeps(At(1000), 100));
  bool over = false;
  q.Hold({{1000, 1100}, {2000, 2001}}, [&] { return over; });
  CHECK(q.holding());
  CHECK(!q.Keeps(At(900), 100));
  CHECK(!q.Keeps(At(1100), 500));
  CHECK(!q.Keeps(At(1990), 10));
  CHECK_EQ(q.bytes(), 0u);
  CHECK(q.Keeps(At(901), 100));    // its end
  CHECK(q.Keeps(At(1099), 1));     // its beginning
  CHECK(q.Keeps(At(1010), 10));    // inside
  CHECK(q.Keeps(At(1500), 1000));  // around
  CHECK_EQ(q.bytes(), 1111u);
  CHECK(Swept(q).empty());
  CHECK_EQ(q.bytes(), 1111u);
  over = true;
  CHECK_EQ(Swept(q).size(), 4u);
  CHECK(!q.holding());
  CHECK_EQ(q.bytes(), 0u);
  CHECK(!q.Keeps(At(1010), 10));
  CHECK(Swept(q).empty());
}

TEST(AllWhoHoldABlockMustLetGo) {
  Quarantine q;
  bool first = false, second = false;
  q.Hold({{100, 200}}, [&] { return first; });
  q.Hold({{150, 300}}, [&] { return second; });
  CHECK(q.Keeps(At(180), 10));
  CHECK(q.Keeps(At(100), 10));
  CHECK(q.Keeps(At(290), 10));
  first = true;
  CHECK((Swept(q) == std::multiset<void*>{At(100)}));
  CHECK(!q.Keeps(At(110), 10));
  CHECK_EQ(q.bytes(), 20u);
  second = true;
  CHECK((Swept(q) == std::multiset<void*>{At(180), At(290)}));
}

TEST(NothingIsOverAfterTheSeal) {
  Quarantine q;
  q.Hold({{100, 200}}, [] { return true; });
  CHECK(q.Keeps(At(100), 10));
  q.Seal();
  CHECK(Swept(q).empty());
  CHECK(q.Keeps(At(190), 100));
  CHECK_EQ(q.bytes(), 110u);
}

TEST(ABlockOfTheArenaIsNotReusedMeanwhile) {
  const auto arena = harness::PrivateArena();
  void* result = arena->Allocate(3 << 20);
  void* fence = arena->Allocate(1 << 20);
  const uint64_t begin = reinterpret_cast<uint64_t>(result);
  bool over = false;
  // Part of the block, as a result within XLA's temporary memory.
  arena->quarantine().Hold({{begin + (1 << 20), begin + (2 << 20)}},
                           [&] { return over; });
  arena->FreeForXla(result);
  CHECK_EQ(arena->quarantine().bytes(), size_t{3} << 20);
  CHECK_EQ(arena->SizeOf(result), size_t{3} << 20);
  for (int i = 0; i < 50; ++i) {
    void* p = arena->Allocate(3 << 20);
    CHECK(p != result && p != nullptr);
  }
  over = true;
  arena->quarantine().Sweep([&](void* p) { arena->Free(p); });
  CHECK_EQ(arena->quarantine().bytes(), 0u);
  CHECK(arena->Allocate(3 << 20) == result);
  arena->FreeForXla(fence);
  arena->allocator().CheckInvariants();
}

TEST(ThreadsHoldFreeAndSweep) {
  const Deadline deadline("ThreadsHoldFreeAndSweep", 60);
  for (uint64_t seed : Seeds("ThreadsHoldFreeAndSweep")) {
    const auto arena = harness::PrivateArena();
    std::atomic<int> working{3};
    std::atomic<uint64_t> early{0};
    RunThreads(4, [&](int me) {
      if (me == 3) {  // the monitor
        while (working.load() > 0 || arena->quarantine().holding()) {
          arena->quarantine().Sweep([&](void* p) {
            // Zero while somebody may store to it.
            if (*static_cast<unsigned char*>(p) == 0) early.fetch_add(1);
            arena->Free(p);
          });
        }
        return;
      }
      Random random(seed * 10 + static_cast<uint64_t>(me));
      std::vector<unsigned char*> aborted;
      const auto let_go = [&](size_t i) {
        std::swap(aborted[i], aborted.back());
        __atomic_store_n(aborted.back(), 1, __ATOMIC_RELEASE);
        aborted.pop_back();
      };
      for (int step = 0; step < 3000 / harness::kSlow; ++step) {
        const size_t size = 4096 * (random.Below(20) + 1);
        auto* p = static_cast<unsigned char*>(arena->Allocate(size));
        CHECK(p != nullptr);
        __atomic_store_n(p, random.OneIn(3) ? 0 : 1, __ATOMIC_RELEASE);
        if (*p == 0) {
          const uint64_t at = reinterpret_cast<uint64_t>(p);
          arena->quarantine().Hold({{at, at + size}}, [p] {
            return __atomic_load_n(p, __ATOMIC_ACQUIRE) == 1;
          });
          aborted.push_back(p);
        }
        arena->FreeForXla(p);
        if (aborted.size() > 8) let_go(random.Below(aborted.size()));
      }
      while (!aborted.empty()) let_go(0);
      working.fetch_sub(1);
    });
    CHECK_EQ(early.load(), 0u);
    CHECK_EQ(arena->quarantine().bytes(), 0u);
    CHECK_EQ(arena->allocator().used(), 0u);
    arena->allocator().CheckInvariants();
  }
}

}  // namespace
}  // namespace strata
