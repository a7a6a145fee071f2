// What a library that stands for jaxlib gets from the interception: which
// blocks lie in the arena, and that each goes back where it came from, from any
// thread, in a forked child, and after its arena has been left.
#include "fabric/intercept.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "fabric/world.h"
#include "harness.h"

extern "C" {
int StandInMemalign(void** out, size_t alignment, size_t size);
void StandInFree(void* p);
void* StandInRealloc(void* p, size_t size);
void StandInFreeByPointer(void* p);
void* StandInReallocByPointer(void* p, size_t size);
}

#if defined(__SANITIZE_ADDRESS__)
// Impossible requests are errors of the caller and not of the test.
extern "C" __attribute__((visibility("default"))) const char*
__asan_default_options() {
  return "allocator_may_return_null=1";
}
#endif

namespace strata {
namespace {

using harness::Deadline;
using harness::Random;
using harness::RunThreads;
using harness::Seeds;

constexpr size_t kThreshold = 8192;

// Every arena there was: as in the product, none is ever destroyed.
std::vector<Arena*>& AllArenas() {
  static auto* all = new std::vector<Arena*>();  // at the exit, too
  return *all;
}

// An arena that serves the library while this lives.
class Armed {
 public:
  explicit Armed(size_t limit = 0) {
    Interception::DropEmpty();  // sanitizers leave few addresses
    arena_ = harness::PrivateArena().release();
    AllArenas().push_back(arena_);
    arena_->set_limit(limit);
    CHECK_EQ(Interception::Arm(arena_, kThreshold), "");
  }
  ~Armed() { Leave(); }
  Armed(const Armed&) = delete;
  Armed& operator=(const Armed&) = delete;

  Arena* operator->() const { return arena_; }
  bool Has(const void* p, size_t bytes = 1) const {
    return arena_->Contains(p, bytes);
  }
  size_t used() const { return arena_->allocator().used(); }
  void Leave() {
    Interception::Disarm();
    arena_->Detach(/*unread=*/true);
  }

 private:
  Arena* arena_;
};

void* Get(size_t size, size_t alignment = 64) {
  void* p = nullptr;
  CHECK_EQ(StandInMemalign(&p, alignment, size), 0);
  CHECK_EQ(reinterpret_cast<uintptr_t>(p) % alignment, 0u);
  return p;
}

bool Resident(const void* p, size_t bytes) {
  std::vector<unsigned char> pages(bytes / 4096);
  CHECK_EQ(mincore(const_cast<void*>(p), bytes, pages.data()), 0);
  for (unsigned char page : pages) {
    if ((page & 1) != 0) return true;
  }
  return false;
}

TEST(LargeBlocksAndNoOthersLieInTheArena) {
  void* before = Get(1 << 20);
  const Armed arena;
  CHECK(!arena.Has(before));
  for (size_t size : {size_t{0}, size_t{1}, size_t{64}, kThreshold - 1}) {
    void* p = Get(size);
    CHECK(!arena.Has(p));
    StandInFree(p);
  }
  for (size_t size :
       {kThreshold, kThreshold + 1, size_t{100'001}, size_t{1} << 26}) {
    for (size_t alignment : {8, 16, 64, 256, 4096}) {
      auto* p = static_cast<char*>(Get(size, alignment));
      CHECK(arena.Has(p, size));
      p[0] = 1;
      p[size - 1] = 2;
      if (alignment % 16 == 0) {
        StandInFree(p);
      } else {
        StandInFreeByPointer(p);
      }
    }
  }
  CHECK_EQ(arena.used(), 0u);
  // More than the arena promises: from libc, aligned.
  void* p = Get(1 << 20, 1 << 16);
  CHECK(!arena.Has(p));
  StandInFree(p);
  StandInFree(nullptr);
  StandInFree(before);
  CHECK_EQ(arena.used(), 0u);
  CHECK_EQ(Interception::counts().blocks, 4u * 5u);
  CHECK_EQ(Interception::counts().fallback_bytes, 0u);
}

TEST(ImpossibleRequestsGetLibcsAnswer) {
  const Armed arena;
  int mark = 0;
  for (size_t alignment :
       {size_t{0}, size_t{3}, size_t{4}, size_t{24}, size_t{96}, ~size_t{0}}) {
    void* p = &mark;
    CHECK_EQ(StandInMemalign(&p, alignment, 1 << 20), EINVAL);
  }
  for (size_t size : {~size_t{0}, ~size_t{0} - 4096, size_t{1} << 62}) {
    void* p = &mark;
    CHECK_EQ(StandInMemalign(&p, 64, size), ENOMEM);
  }
  CHECK_EQ(arena.used(), 0u);
  errno = 77;
  void* p = Get(1 << 20);
  StandInFree(p);
  CHECK_EQ(errno, 77);
}

TEST(ReallocLeavesTheArena) {
  const Armed arena;
  const auto filled = [](size_t size) {
    auto* p = static_cast<unsigned char*>(Get(size));
    for (size_t i = 0; i < size; ++i) p[i] = static_cast<unsigned char>(i * 7);
    return p;
  };
  for (size_t size : {size_t{100'000}, size_t{8192}, size_t{300'000}}) {
    for (const bool by_pointer : {false, true}) {
      unsigned char* p = filled(100'000);
      CHECK(arena.Has(p));
      auto* q = static_cast<unsigned char*>(
          by_pointer ? StandInReallocByPointer(p, size)
                     : StandInRealloc(p, size));
      CHECK(!arena.Has(q));
      CHECK_EQ(arena.used(), 0u);
      for (size_t i = 0; i < std::min<size_t>(size, 100'000); ++i) {
        CHECK_EQ(q[i], static_cast<unsigned char>(i * 7));
      }
      // libc's own from here on.
      q = static_cast<unsigned char*>(StandInRealloc(q, 2 * size));
      CHECK_EQ(q[8191], static_cast<unsigned char>(8191 * 7));
      StandInFree(q);
    }
  }
  CHECK(StandInRealloc(filled(100'000), 0) == nullptr);
  CHECK_EQ(arena.used(), 0u);
  StandInFree(StandInRealloc(nullptr, 1 << 20));
  CHECK(StandInRealloc(filled(100'000), ~size_t{0} - 64) == nullptr);
  CHECK(arena.used() > 0);  // a failed realloc leaves the block alone
}

TEST(AFullArenaLeavesTheRestToLibc) {
  const Armed arena(4 << 20);
  void* in[4];
  for (void*& p : in) {
    p = Get(1 << 20);
    CHECK(arena.Has(p));
  }
  void* out = Get(kThreshold);
  CHECK(!arena.Has(out));
  CHECK_EQ(Interception::counts().fallback_bytes, kThreshold);
  StandInFree(in[2]);
  in[2] = Get(1 << 20);
  CHECK(arena.Has(in[2]));
  void* huge = Get(5 << 20);
  CHECK(!arena.Has(huge));
  // The engine's windows are not XLA's: the limit is not theirs.
  void* window = arena->Allocate(6 << 20);
  CHECK(window != nullptr);
  arena->Free(window);
  for (void* p : in) StandInFree(p);
  StandInFree(out);
  StandInFree(huge);
  CHECK_EQ(arena.used(), 0u);
  CHECK_EQ(Interception::counts().fallback_bytes, kThreshold + (5u << 20));
}

TEST(ASpanThatIsUsedUpLeavesTheRestToLibc) {
  const Armed arena;
  std::vector<void*> blocks;
  size_t inside = 0;
  for (int i = 0; i < 40; ++i) {
    blocks.push_back(Get(size_t{64} << 20));
    inside += arena.Has(blocks.back(), size_t{64} << 20);
  }
  // Of a span of 2 GiB, less the posting tables.
  CHECK(inside >= 20 && inside < 40);
  CHECK_EQ(Interception::counts().fallback_bytes, (40 - inside) << 26);
  for (void* p : blocks) StandInFree(p);
  CHECK_EQ(arena.used(), 0u);
}

TEST(BlocksChangeThreads) {
  const Deadline deadline("BlocksChangeThreads", 60);
  for (uint64_t seed : Seeds("BlocksChangeThreads")) {
    const Armed arena(8 << 20);  // so small that some lie outside
    std::mutex mutex;
    std::vector<std::pair<unsigned char*, size_t>> shared;
    RunThreads(4, [&](int me) {
      Random random(seed * 10 + static_cast<uint64_t>(me));
      for (int step = 0; step < 4000 / harness::kSlow; ++step) {
        const size_t size = random.OneIn(8) ? random.Below(kThreshold) + 1
                                            : random.Below(1 << 19) + 1;
        auto* p = static_cast<unsigned char*>(Get(size));
        const auto mark = static_cast<unsigned char>(size * 3);
        p[0] = p[size / 2] = p[size - 1] = mark;
        std::pair<unsigned char*, size_t> other = {nullptr, 0};
        {
          std::lock_guard<std::mutex> lock(mutex);
          shared.emplace_back(p, size);
          if (shared.size() > 24) {
            std::swap(shared[random.Below(shared.size())], shared.back());
            other = shared.back();
            shared.pop_back();
          }
        }
        if (other.first == nullptr) continue;
        const auto [q, bytes] = other;
        const auto was = static_cast<unsigned char>(bytes * 3);
        CHECK(q[0] == was && q[bytes / 2] == was && q[bytes - 1] == was);
        if (random.OneIn(6)) {
          auto* r = static_cast<unsigned char*>(StandInRealloc(q, bytes + 100));
          CHECK(r[0] == was && r[bytes / 2] == was && r[bytes - 1] == was);
          StandInFree(r);
        } else {
          StandInFree(q);
        }
      }
    });
    CHECK(Interception::counts().blocks > 0);
    CHECK(Interception::counts().fallback_bytes > 0);
    for (const auto& [p, size] : shared) StandInFree(p);
    CHECK_EQ(arena.used(), 0u);
    arena->allocator().CheckInvariants();
  }
}

TEST(LaterArenasServeAndEarlierOnesTakeBack) {
  auto first = std::make_unique<Armed>();
  const Arena* const old = first->operator->();
  const uint64_t base = old->base();
  auto* kept = static_cast<unsigned char*>(Get(1 << 20));
  auto* other = static_cast<unsigned char*>(Get(1 << 20));
  memset(kept, 5, 1 << 20);
  memset(other, 6, 1 << 20);
  CHECK(first->Has(kept) && first->Has(other));
  first->Leave();
  void* between = Get(1 << 20);
  CHECK(!first->Has(between));
  {
    const Armed second;
    void* p = Get(1 << 20);
    CHECK(second.Has(p));
    CHECK_EQ(kept[12345], 5);
    StandInFree(other);
    // Its memory goes with it, and its neighbour's stays.
    CHECK(!Resident(other, 1 << 20));
    CHECK_EQ(kept[(1 << 20) - 1], 5);
    StandInFree(p);
    CHECK_EQ(second.used(), 0u);
  }
  Interception::DropEmpty();
  CHECK(!RangeIsFree(base, harness::kSpan));  // one block is out
  StandInFree(kept);
  CHECK_EQ(old->allocator().used(), 0u);
  Interception::DropEmpty();
  CHECK(RangeIsFree(base, harness::kSpan));
  StandInFree(between);
  // As often as one likes.
  uint64_t where = 0;
  for (int i = 0; i < 200; ++i) {
    const Armed again;
    if (i == 0) where = again->base();
    CHECK_EQ(again->base(), where);
    StandInFree(Get(1 << 16));
    again->Detach(/*unread=*/true);
    Interception::DropEmpty();
  }
}

TEST(AnArenaInUseIsNotDropped) {
  const Armed arena;
  Interception::DropEmpty();
  CHECK(!RangeIsFree(arena->base(), harness::kSpan));
  void* p = Get(1 << 20);
  CHECK(arena.Has(p));
  StandInFree(p);
}

TEST(NobodyGetsABlockOfADroppedArena) {
  const Deadline deadline("NobodyGetsABlockOfADroppedArena", 60);
  std::atomic<bool> stop{false};
  std::thread user([&] {
    while (!stop.load(std::memory_order_relaxed)) {
      auto* p = static_cast<unsigned char*>(Get(1 << 16));
      p[0] = p[(1 << 16) - 1] = 1;  // dies if it is not mapped
      StandInFree(p);
    }
  });
  for (int i = 0; i < 400 / harness::kSlow; ++i) {
    const Armed arena;
    while (Interception::counts().blocks == 0) std::this_thread::yield();
    Interception::Disarm();
    arena->Detach(/*unread=*/true);
    Interception::DropEmpty();
  }
  stop.store(true, std::memory_order_relaxed);
  user.join();
}

// Runs `child` in a fork; fails unless it ended well.
template <typename Body>
void Fork(Body child) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    alarm(20);
    int code = 0;
    try {
      child();
    } catch (const std::exception& e) {
      fprintf(stderr, "in the child: %s\n", e.what());
      code = 1;
    }
    _exit(code);
  }
  int status = 0;
  CHECK_EQ(waitpid(pid, &status, 0), pid);
  CHECK_EQ(status, 0);
}

#if !STRATACL_TSAN  // which knows no child of a process with threads
TEST(AForkedChildLeavesTheArenaAlone) {
  const Deadline deadline("AForkedChildLeavesTheArenaAlone", 120);
  const World world(harness::PrivateArena(), Settings{});  // watches forks
  const Armed arena;
  std::atomic<bool> stop{false};
  // Often holds the allocator's lock when the child is made.
  std::thread user([&] {
    while (!stop.load(std::memory_order_relaxed)) StandInFree(Get(1 << 16));
  });
  auto* mine = static_cast<unsigned char*>(Get(1 << 20));
  memset(mine, 9, 1 << 20);
  for (int i = 0; i < 30; ++i) {
    Fork([&] {
      void* p = Get(1 << 20);
      CHECK(!arena.Has(p));
      memset(p, 1, 1 << 20);
      StandInFree(p);
      CHECK_EQ(mine[4096], 9);
      auto* q = static_cast<unsigned char*>(StandInRealloc(mine, 2 << 20));
      CHECK(!arena.Has(q));
      CHECK(q[0] == 9 && q[(1 << 20) - 1] == 9);
      StandInFree(q);
      void* r = Get(1 << 20);
      CHECK(!arena.Has(r));
      StandInFree(mine);  // as far as the child is concerned
    });
  }
  stop.store(true, std::memory_order_relaxed);
  user.join();
  CHECK_EQ(mine[1 << 19], 9);
  CHECK_EQ(arena->SizeOf(mine), size_t{1} << 20);
  StandInFree(mine);
  CHECK_EQ(arena.used(), 0u);
}
#endif

}  // namespace
}  // namespace strata
