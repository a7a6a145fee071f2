// The registrar: pages come ahead of demand, are announced and mapped by the
// peer, go when they are not needed, and an idle registrar does nothing.
#include "fabric/registrar.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "harness.h"

namespace strata {
namespace {

using harness::Deadline;
using harness::Random;
using harness::RunThreads;
using harness::Seeds;

constexpr size_t kMiB = size_t{1} << 20;
// What the registrar keeps ahead, at most, and free, before it gives back.
constexpr size_t kAhead = 256 * kMiB, kKeep = 256 * kMiB;

void Until(const std::function<bool()>& condition, const char* what) {
  for (int i = 0; i < 30'000; ++i) {
    if (condition()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw check::Failure(std::string("not in time: ") + what);
}

void Doze(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// Bytes of memory behind a range of the own heap.
size_t Present(const Arena& arena, size_t begin, size_t end) {
  std::vector<unsigned char> pages((end - begin) / 4096);
  CHECK_EQ(mincore(reinterpret_cast<void*>(arena.heap_begin() + begin),
                   end - begin, pages.data()),
           0);
  size_t present = 0;
  for (unsigned char page : pages) present += (page & 1) * 4096;
  return present;
}

uint64_t Read(const std::atomic<uint64_t>& counter) {
  return counter.load(std::memory_order_relaxed);
}

struct Own {
  std::unique_ptr<Arena> arena = harness::PrivateArena();
  std::unique_ptr<Registrar> registrar;

  explicit Own(bool ahead = true, size_t limit = 0) {
    arena->set_limit(limit);
    registrar = std::make_unique<Registrar>(arena.get(), ahead);
  }
  uint64_t warm() const { return Read(registrar->counts().warm_bytes); }
  size_t high() const { return arena->allocator().high_water(); }
};

TEST(PagesComeAheadOfDemand) {
  const Deadline deadline("PagesComeAheadOfDemand", 120);
  const Own own;
  Until([&] { return own.warm() >= 8 * kMiB; }, "the first pages");
  // Grows in steps, each of which finds its pages.
  for (int step = 0; step < 12; ++step) {
    auto* p = static_cast<unsigned char*>(own.arena->Allocate(5 * kMiB));
    memset(p, 1, 5 * kMiB);
    Until([&] { return own.warm() >= own.high() + 2 * kMiB; }, "more pages");
    CHECK(own.warm() <= own.high() + own.high() / 4 + 12 * kMiB);
  }
  CHECK_EQ(Present(*own.arena, 0, own.high()), own.high());
  CHECK(Present(*own.arena, 0, own.high() + kAhead) >= own.high() + 2 * kMiB);
}

TEST(TheLimitHoldsForPages) {
  const Deadline deadline("TheLimitHoldsForPages", 120);
  const Own own(true, 6 * kMiB);
  CHECK(own.arena->AllocateForXla(5 * kMiB) != nullptr);
  Until([&] { return own.warm() >= 6 * kMiB; }, "all that is allowed");
  CHECK(own.arena->AllocateForXla(2 * kMiB) == nullptr);
  Doze(0.3);
  CHECK_EQ(own.warm(), 6 * kMiB);
}

TEST(AnIdleRegistrarDoesNothing) {
  const Deadline deadline("AnIdleRegistrarDoesNothing", 120);
  const Own own;
  void* p = own.arena->Allocate(20 * kMiB);
  Until([&] { return own.warm() >= 28 * kMiB; }, "the first pages");
  own.arena->Free(p);
  Doze(0.3);
  const uint64_t warm = own.warm();
  const uint64_t extents = Read(own.registrar->counts().extents);
  Doze(6.5);  // longer than it takes before free memory is given back
  CHECK_EQ(own.warm(), warm);
  CHECK_EQ(Read(own.registrar->counts().extents), extents);
  CHECK_EQ(Read(own.registrar->counts().trims), 0u);
  CHECK_EQ(ExtentOf(own.arena->Shadow(0, 0)), warm);
}

TEST(FreeMemoryIsGivenBack) {
  const Deadline deadline("FreeMemoryIsGivenBack", 120);
  const Own own;
  constexpr size_t kLarge = 480 * kMiB;
  auto* low = static_cast<unsigned char*>(own.arena->Allocate(3 * kMiB));
  memset(low, 3, 3 * kMiB);
  void* large = own.arena->Allocate(kLarge);
  const size_t high = own.high();
  Until([&] { return own.warm() >= high; }, "all pages");
  CHECK_EQ(Present(*own.arena, 0, high), high);
  own.arena->Free(large);
  Until([&] { return Read(own.registrar->counts().trims) > 0; }, "the trim");
  Doze(0.5);
  CHECK_EQ(own.high(), kKeep);
  // Below it all, above it what is ahead of it, and no more.
  CHECK_EQ(Present(*own.arena, 0, kKeep), kKeep);
  CHECK(Present(*own.arena, kKeep, high + kAhead) <= kKeep / 4 + 2 * kMiB);
  for (size_t i = 0; i < 3 * kMiB; i += 4096) CHECK_EQ(low[i], 3);
  own.arena->allocator().CheckInvariants();
  // And again: nothing more to give, and all of it usable.
  Doze(6.5);
  CHECK_EQ(Read(own.registrar->counts().trims), 1u);
  auto* again = static_cast<unsigned char*>(own.arena->Allocate(kLarge));
  memset(again, 1, kLarge);
  CHECK_EQ(low[3 * kMiB - 1], 3);
}

TEST(MemoryInUseIsNotGivenBack) {
  const Deadline deadline("MemoryInUseIsNotGivenBack", 120);
  // Without a thread: every trim is ours, as often as we like.
  const Own own(false);
  constexpr size_t kBlock = 64 * 1024;
  RunThreads(4, [&](int me) {
    if (me == 0) {
      for (int i = 0; i < 3000 / harness::kSlow; ++i) {
        own.arena->Trim(size_t(i % 7) * kBlock, size_t(i % 90) * kBlock);
        if (i % 100 == 0) own.arena->allocator().CheckInvariants();
      }
      return;
    }
    Random random(static_cast<uint64_t>(me));
    std::vector<unsigned char*> mine;
    for (int step = 0; step < 6000 / harness::kSlow; ++step) {
      if (mine.size() < 12 && !random.OneIn(3)) {
        auto* p = static_cast<unsigned char*>(own.arena->Allocate(kBlock));
        CHECK(p != nullptr);
        for (size_t i = 0; i < kBlock; i += 4096) {
          p[i] = static_cast<unsigned char>(me);
        }
        mine.push_back(p);
      } else if (!mine.empty()) {
        std::swap(mine[random.Below(mine.size())], mine.back());
        for (size_t i = 0; i < kBlock; i += 4096) {
          CHECK_EQ(mine.back()[i], me);
        }
        own.arena->Free(mine.back());
        mine.pop_back();
      }
    }
    for (unsigned char* p : mine) own.arena->Free(p);
  });
  CHECK_EQ(own.arena->allocator().used(), 0u);
  own.arena->allocator().CheckInvariants();
}

TEST(GapsAreCountedOncePerExtent) {
  const Deadline deadline("GapsAreCountedOncePerExtent", 120);
  const Own own;
  auto* p = static_cast<unsigned char*>(own.arena->Allocate(100 * kMiB));
  Until([&] { return own.warm() >= 100 * kMiB; }, "all pages");
  const Registrar::Counts& counts = own.registrar->counts();
  CHECK_EQ(Read(counts.gaps), 0u);
  Doze(0.01);
  for (int i = 0; i < 3; ++i) own.registrar->FirstUse(p + i * kMiB);
  CHECK_EQ(Read(counts.gaps), 1u);
  CHECK(Read(counts.gap_min_ns) >= 10'000'000u);
  own.registrar->FirstUse(p + 70 * kMiB);
  CHECK_EQ(Read(counts.gaps), 2u);
  int outside = 0;
  own.registrar->FirstUse(&outside);  // nobody's extent
  own.registrar->FirstUse(nullptr);
  CHECK_EQ(Read(counts.gaps), 2u);
  uint64_t buckets = 0;
  for (const auto& bucket : counts.gap_log2_us) buckets += Read(bucket);
  CHECK_EQ(buckets, 2u);
}

TEST(ItStopsAtOnce) {
  const Deadline deadline("ItStopsAtOnce", 120);
  for (int i = 0; i < 30; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    {
      const Own own;
      if (i % 2 == 0) own.arena->Allocate(300 * kMiB);
      if (i % 3 == 0) Doze(0.005);
    }
    // A generous bound: it sleeps for a second at a time.
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
  }
}

#if !STRATACL_TSAN  // its child makes a thread
// Faults while `bytes` are touched that are present: the rest of the program
// has a few, and AddressSanitizer's shadow has one for eight pages.
long Allowed(size_t bytes) {
  return 64 + static_cast<long>(bytes / 4096 / (harness::kSlow > 1 ? 7 : 64));
}

// The two processes of a job; `body(me)` runs in both, then they part.
void TwoProcesses(const std::function<void(Arena*, int)>& body) {
  const uint64_t base = harness::FreeBase(2 * harness::kSpan);
  int pipes[2][2];  // to process 0, to process 1
  for (auto& p : pipes) CHECK_EQ(pipe(p), 0);
  const pid_t parent = getpid();
  const pid_t child = fork();
  CHECK(child >= 0);
  const int me = child == 0 ? 1 : 0;
  const auto run = [&] {
    Arena arena(me, 2, base, harness::kSpan, ControlGeometry(harness::kEager));
    const int mine = arena.memfd();
    CHECK_EQ(write(pipes[1 - me][1], &mine, sizeof(int)), ssize_t{sizeof(int)});
    int theirs = -1;
    CHECK_EQ(read(pipes[me][0], &theirs, sizeof(int)), ssize_t{sizeof(int)});
    const std::string path = "/proc/" +
                             std::to_string(me == 0 ? child : parent) + "/fd/" +
                             std::to_string(theirs);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    CHECK_MSG(fd >= 0, path);
    arena.Attach(1 - me, fd);
    close(fd);
    body(&arena, me);
  };
  if (me == 1) {
    alarm(100);
    int code = 0;
    try {
      run();
    } catch (const std::exception& e) {
      fprintf(stderr, "in the second process: %s\n", e.what());
      code = 1;
    }
    _exit(code);
  }
  std::exception_ptr failure;
  try {
    run();
  } catch (...) {
    failure = std::current_exception();
    kill(child, SIGKILL);
  }
  int status = 0;
  waitpid(child, &status, 0);
  for (auto& p : pipes) {
    close(p[0]);
    close(p[1]);
  }
  if (failure != nullptr) std::rethrow_exception(failure);
  CHECK_EQ(status, 0);
}

// A word of process p that both see; here to tell each other how far they are.
std::atomic<uint64_t>& Word(Arena* arena, int p, int i) {
  return arena->Writable(p, 1)->comms[i].hash;
}

TEST(PeersMapWhatIsAnnounced) {
  const Deadline deadline("PeersMapWhatIsAnnounced", 120);
  TwoProcesses([](Arena* arena, int me) {
    Registrar registrar(arena, true);
    const Registrar::Counts& counts = registrar.counts();
    const auto told = [&](int i) {
      Until([&] { return Word(arena, 0, i).load() == 1; }, "process 0");
    };
    const auto tell = [&](int i) { Word(arena, 0, i).store(1); };
    const auto answer = [&](int i) { Word(arena, 1, i).store(1); };
    const auto answered = [&](int i) {
      Until([&] { return Word(arena, 1, i).load() == 1; }, "process 1");
    };
    constexpr size_t kBytes = 40 * kMiB, kLarge = 480 * kMiB;
    auto* theirs = reinterpret_cast<unsigned char*>(arena->HeapOf(0));
    if (me == 0) {
      auto* p = static_cast<unsigned char*>(arena->Allocate(kBytes));
      CHECK(p == theirs);
      memset(p, 7, kBytes);
      Until([&] { return Read(counts.warm_bytes) >= kBytes; }, "own pages");
      tell(0);
      answered(0);
      CHECK_EQ(p[5], 8);  // a store by the peer
      p = static_cast<unsigned char*>(arena->Allocate(kLarge));
      Until([&] { return Read(counts.warm_bytes) >= kLarge; }, "own pages");
      tell(1);
      answered(1);
      arena->Free(p);
      Until([&] { return Read(counts.trims) == 1; }, "the trim");
      tell(2);
      answered(2);
      CHECK(ExtentOf(arena->Shadow(0, 0)) < kLarge);
      return;
    }
    told(0);
    Until([&] { return Read(counts.populated_bytes) >= kBytes; }, "mapping");
    rusage before, after;
    CHECK_EQ(getrusage(RUSAGE_SELF, &before), 0);
    size_t sum = 0;
    for (size_t i = 0; i < kBytes; i += 4096) sum += theirs[i];
    auto* alias = static_cast<unsigned char*>(arena->WritableAt(0, theirs));
    CHECK(alias != theirs);
    for (size_t i = 5; i < kBytes; i += 4096) alias[i] = 8;
    CHECK_EQ(getrusage(RUSAGE_SELF, &after), 0);
    CHECK_EQ(sum, 7 * kBytes / 4096);
    CHECK_MSG(after.ru_minflt - before.ru_minflt < Allowed(2 * kBytes),
              std::to_string(after.ru_minflt - before.ru_minflt));
    registrar.Use(0, theirs + kBytes - 4096, 4096);
    CHECK_EQ(Read(counts.found_ready), 1u);
    CHECK_EQ(Read(counts.found_unready), 0u);
    answer(0);
    told(1);
    Until([&] { return Read(counts.populated_bytes) >= kLarge; }, "mapping");
    registrar.Use(0, theirs + kLarge - 4096, 4096);
    CHECK_EQ(Read(counts.found_ready), 2u);
    CHECK_EQ(Read(counts.remaps), 0u);
    answer(1);
    told(2);
    Until([&] { return Read(counts.remaps) == 1; }, "the withdrawal");
    registrar.Use(0, theirs + kLarge - 4096, 4096);
    CHECK_EQ(Read(counts.found_unready), 1u);
    CHECK_EQ(theirs[kLarge - 1], 0);  // given back, and safe to look at
    answer(2);
  });
}

TEST(JustInTimeMapsAtFirstUse) {
  const Deadline deadline("JustInTimeMapsAtFirstUse", 120);
  TwoProcesses([](Arena* arena, int me) {
    Registrar registrar(arena, false);
    const Registrar::Counts& counts = registrar.counts();
    if (me == 0) {
      auto* p = static_cast<unsigned char*>(arena->Allocate(10 * kMiB));
      memset(p, 7, 10 * kMiB);
      Word(arena, 0, 0).store(1);
      Until([&] { return Word(arena, 1, 0).load() == 1; }, "process 1");
      CHECK_EQ(Read(counts.warm_bytes), 0u);
      return;
    }
    Until([&] { return Word(arena, 0, 0).load() == 1; }, "process 0");
    auto* theirs = reinterpret_cast<unsigned char*>(arena->HeapOf(0));
    registrar.Use(0, theirs + kMiB, 2 * kMiB);  // in two pieces of 2 MiB
    CHECK_EQ(Read(counts.jit_bytes), 4 * kMiB);
    CHECK_EQ(Read(counts.found_unready), 1u);
    rusage before, after;
    CHECK_EQ(getrusage(RUSAGE_SELF, &before), 0);
    size_t sum = 0;
    for (size_t i = 0; i < 4 * kMiB; i += 4096) sum += theirs[i];
    CHECK_EQ(getrusage(RUSAGE_SELF, &after), 0);
    CHECK_EQ(sum, 7 * 4 * kMiB / 4096);
    CHECK_MSG(after.ru_minflt - before.ru_minflt < Allowed(4 * kMiB),
              std::to_string(after.ru_minflt - before.ru_minflt));
    registrar.Use(0, theirs, 4 * kMiB);
    registrar.Use(0, theirs, 0);
    CHECK_EQ(Read(counts.jit_bytes), 4 * kMiB);
    CHECK_EQ(Read(counts.found_ready), 1u);
    registrar.Use(0, theirs + 4 * kMiB - 1, 2);
    CHECK_EQ(Read(counts.jit_bytes), 6 * kMiB);
    CHECK_EQ(Read(counts.found_unready), 2u);
    Word(arena, 1, 0).store(1);
  });
}
#endif

}  // namespace
}  // namespace strata
