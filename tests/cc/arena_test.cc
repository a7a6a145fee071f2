// Arenas: the address plan, mappings and seals, in one process and between
// processes that meet in them.
#include "fabric/arena.h"

#include <fcntl.h>
#include <setjmp.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <set>

#include "check.h"
#include "fabric/errors.h"
#include "forked.h"
#include "harness.h"

namespace strata {
namespace {

using forked::Board;
using forked::Job;
using harness::Deadline;
using harness::FreeBase;
using harness::kSpan;
using harness::PrivateArena;

// Of this process: how many lines of /proc/self/maps touch the range.
int MappingsIn(uint64_t begin, uint64_t end) {
  std::ifstream maps("/proc/self/maps");
  int found = 0;
  for (std::string line; std::getline(maps, line);) {
    char* rest = nullptr;
    const uint64_t from = std::strtoull(line.c_str(), &rest, 16);
    const uint64_t to = std::strtoull(rest + 1, nullptr, 16);
    found += from < end && to > begin;
  }
  return found;
}

int OpenDescriptors() {
  int open_ones = 0;
  for (int fd = 0; fd < 1024; ++fd) open_ones += fcntl(fd, F_GETFD) >= 0;
  return open_ones;
}

TEST(CandidatesAreApartAndMostlyFree) {
  const std::vector<uint64_t> bases = CandidateBases();
  CHECK(bases.size() >= 8);
  CHECK_EQ(std::set<uint64_t>(bases.begin(), bases.end()).size(), bases.size());
  int free_ones = 0;
  for (uint64_t base : bases) {
    CHECK_EQ(base % (uint64_t{1} << 30), 0u);
    free_ones += RangeIsFree(base, 8 * kSpan);
  }
  CHECK(free_ones >= 2);
  // A span as large as a machine may need, in this build too.
  CHECK(RangeIsFree(FreeBase(size_t{32} << 30), size_t{32} << 30));
}

TEST(ATakenRangeIsNotFree) {
  const uint64_t base = FreeBase(kSpan);
  const size_t page = size_t{1} << 16;
  void* want = reinterpret_cast<void*>(base + kSpan / 2);
  CHECK(mmap(want, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
             0) == want);
  CHECK(!RangeIsFree(base, kSpan));
  CHECK(RangeIsFree(base, kSpan / 2));
  CHECK_THROWS(Arena(0, 1, base, kSpan, ControlGeometry(1024)), Error,
               "cannot reserve");
  munmap(want, page);
  CHECK(RangeIsFree(base, kSpan));
}

TEST(GeometryHoldsControlAndPayloads) {
  for (size_t eager : {size_t{0}, size_t{1}, size_t{64}, size_t{1000},
                       size_t{8192}, size_t{65536}}) {
    const ControlGeometry g(eager);
    CHECK(g.eager_bytes >= eager && g.eager_bytes < eager + 64);
    CHECK(g.payload_stride >= g.eager_bytes);
    CHECK_EQ(g.payload_stride % 64, 0u);
    CHECK(g.control_bytes >= sizeof(Control) + kSlots * g.payload_stride);
    CHECK_EQ(g.control_bytes % 4096, 0u);
  }
}

TEST(PrivateMemoryIsZeroAndGoesAway) {
  const int before = OpenDescriptors();
  uint64_t base;
  {
    const auto arena = PrivateArena();
    base = arena->base();
    CHECK_EQ(arena->memfd(), -1);
    CHECK(!RangeIsFree(base, kSpan));
    for (int local : {0, 1, kMaxLocalRanks - 1}) {
      Control* c = arena->Writable(0, local);
      CHECK(c == arena->Shadow(0, local));
      CHECK(PhaseOf(StateOf(c->slots[kSlots - 1])) == Phase::kFree);
      // The last payload of a rank ends before the next rank's words.
      unsigned char* end =
          arena->Payload(c, kSlots - 1) + arena->geometry().payload_stride;
      CHECK(end <= reinterpret_cast<unsigned char*>(c) +
                       arena->geometry().control_bytes);
      std::memset(arena->Payload(c, kSlots - 1), 0xff,
                  arena->geometry().payload_stride);
    }
    CHECK_EQ(arena->Writable(0, 2)->nonce.load(), 0u);
  }
  CHECK(RangeIsFree(base, kSpan));
  CHECK_EQ(OpenDescriptors(), before);
}

TEST(WindowsLieInTheHeap) {
  const auto arena = PrivateArena();
  auto* a = static_cast<unsigned char*>(arena->Allocate(100'000));
  auto* b = static_cast<unsigned char*>(arena->Allocate(1));
  CHECK(a != nullptr && b != nullptr);
  std::memset(a, 1, 100'000);
  *b = 2;
  CHECK(arena->Contains(a, 100'000) && arena->Contains(b, 1));
  // Behind every posting table, this side of the end.
  CHECK(a >=
        reinterpret_cast<unsigned char*>(arena->Shadow(0, kMaxLocalRanks - 1)) +
            arena->geometry().control_bytes);
  CHECK(!arena->Contains(arena->Shadow(0, 0), 1));
  CHECK(!arena->Contains(a, kSpan));
  CHECK(!arena->Contains(&arena, 1));
  CHECK(a + 100'000 <= b || b + 1 <= a);
  const size_t used = arena->allocator().used();
  arena->Free(b);
  arena->Free(a);
  CHECK(arena->allocator().used() < used);
  CHECK_EQ(arena->allocator().used(), 0u);
  CHECK(arena->Allocate(kSpan) == nullptr);
  arena->allocator().CheckInvariants();
}

TEST(UnsuitableSettingsAreRefused) {
  const uint64_t base = FreeBase(8 * kSpan);
  const int before = OpenDescriptors();
  CHECK_THROWS(Arena(0, 1, base, size_t{1} << 30, ControlGeometry(1024)), Error,
               "STRATACL_ARENA_SPAN");
  CHECK_THROWS(Arena(0, 1, base, kSpan, ControlGeometry(1 << 20)), Error,
               "STRATACL_EAGER_BYTES");
  CHECK(RangeIsFree(base, 8 * kSpan));
  CHECK_EQ(OpenDescriptors(), before);
}

// The limits are lowered in a child, for they cannot be raised again; and a
// limit on the file size must be found before the kernel sends SIGXFSZ.
TEST(LimitsAreNamed) {
  Job job(1, 60, [](int, Board*) {
    const uint64_t base = FreeBase(8 * kSpan);
    rlimit old;
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
    const rlimit small = {1 << 20, old.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    CHECK_THROWS(Arena(0, 2, base, kSpan, ControlGeometry(1024)), Error,
                 "RLIMIT_FSIZE");
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
    CHECK_EQ(getrlimit(RLIMIT_AS, &old), 0);
    const rlimit tight = {3 * kSpan - 1, old.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_AS, &tight), 0);
    CHECK_THROWS(Arena(0, 2, base, kSpan, ControlGeometry(1024)), Error,
                 "RLIMIT_AS");
    CHECK_EQ(setrlimit(RLIMIT_AS, &old), 0);
    const Arena arena(0, 2, base, kSpan, ControlGeometry(1024));
    CHECK(arena.memfd() >= 0);
  });
  job.Join();
}

TEST(TheMemfdIsSealed) {
  const uint64_t base = FreeBase(2 * kSpan);
  const Arena arena(1, 2, base, kSpan, ControlGeometry(1024));
  CHECK_EQ(arena.base(), base);
  struct stat st;
  CHECK_EQ(fstat(arena.memfd(), &st), 0);
  CHECK_EQ(static_cast<size_t>(st.st_size), kSpan);
  CHECK(ftruncate(arena.memfd(), 4096) != 0);
  CHECK(ftruncate(arena.memfd(), static_cast<off_t>(2 * kSpan)) != 0);
  CHECK(fcntl(arena.memfd(), F_ADD_SEALS, F_SEAL_WRITE) != 0);
  CHECK((fcntl(arena.memfd(), F_GETFD) & FD_CLOEXEC) != 0);
  // Sparse: 2 GiB of address space cost no memory.
  CHECK(st.st_blocks * 512 < 64 << 20);
}

TEST(AnArenaOfAnotherSizeIsRefused) {
  const uint64_t base = FreeBase(8 * kSpan);
  Arena mine(0, 2, base, kSpan, ControlGeometry(1024));
  const Arena other(1, 2, base + 4 * kSpan, kSpan + (1 << 21),
                    ControlGeometry(1024));
  CHECK_THROWS(mine.Attach(1, other.memfd()), Error, "another size");
  CHECK_THROWS(mine.Attach(1, -1), Error, "STRATACL_ARENA_SPAN");
}

sigjmp_buf escape;

// Whether a store to the byte is refused by the hardware.
bool StoreFaults(volatile unsigned char* byte) {
  struct sigaction action = {}, old;
  action.sa_handler = [](int) { siglongjmp(escape, 1); };
  sigaction(SIGSEGV, &action, &old);
  volatile bool faulted = true;  // kept across the jump
  if (sigsetjmp(escape, 1) == 0) {
    *byte = 1;
    faulted = false;
  }
  sigaction(SIGSEGV, &old, nullptr);
  return faulted;
}

TEST(OneByteOneAddressInEveryProcess) {
  const Deadline deadline("OneByteOneAddressInEveryProcess", 60);
  constexpr int kProcesses = 3;
  const uint64_t base = FreeBase(kProcesses * kSpan);
  Job job(kProcesses, 50, [base](int me, Board* board) {
    const auto arena = forked::MeetInArenas(me, kProcesses, base, board);
    // Each writes a pointer into its window, and where the window is.
    auto** mine = static_cast<void**>(arena->Allocate(1 << 20));
    mine[0] = mine;
    mine[1] = reinterpret_cast<void*>(static_cast<uint64_t>(me) + 77);
    board->words[me].store(reinterpret_cast<uint64_t>(mine));
    arena->Writable(me, 3)->nonce.store(1000 + static_cast<uint64_t>(me));
    board->Meet(kProcesses, 3);
    for (int p = 0; p < kProcesses; ++p) {
      auto** theirs = reinterpret_cast<void**>(board->words[p].load());
      CHECK(theirs[0] == theirs);
      CHECK(theirs[1] ==
            reinterpret_cast<void*>(static_cast<uint64_t>(p) + 77));
      CHECK_EQ(arena->Shadow(p, 3)->nonce.load(), 1000u + p);
      if (p == me) continue;
      // Readable only; words are written through another view.
      CHECK(StoreFaults(reinterpret_cast<unsigned char*>(theirs)));
      CHECK(StoreFaults(reinterpret_cast<unsigned char*>(
          const_cast<Control*>(arena->Shadow(p, 0)))));
      CHECK(arena->Writable(p, 0) != arena->Shadow(p, 0));
      Wake(arena->Writable(p, 5), RankBit(me));
      AckWord(arena->Writable(p, 5), 9, me).store(50u + me);
    }
    CHECK(!arena->Contains(
        reinterpret_cast<void*>(board->words[(me + 1) % kProcesses].load()),
        1));
    board->Meet(kProcesses, 4);
    Control* own = arena->Writable(me, 5);
    CHECK_EQ(own->bell.load(), 2u);
    for (int p = 0; p < kProcesses; ++p) {
      CHECK_EQ(AckWord(own, 9, p).load(), p == me ? 0u : 50u + p);
    }
  });
  job.Join();
}

// A process that is gone takes nothing with it: no SIGBUS, the bytes stay.
TEST(TheDeadLeaveTheirMemory) {
  const Deadline deadline("TheDeadLeaveTheirMemory", 60);
  const uint64_t base = FreeBase(2 * kSpan);
  Job job(2, 50, [base](int me, Board* board) {
    const auto arena = forked::MeetInArenas(me, 2, base, board);
    if (me == 1) {
      auto* window = static_cast<unsigned char*>(arena->Allocate(1 << 20));
      std::memset(window, 0x5a, 1 << 20);
      board->words[0].store(reinterpret_cast<uint64_t>(window));
      raise(SIGKILL);
    }
    while (board->words[1].load() == 0) sched_yield();
    const auto* theirs =
        reinterpret_cast<const unsigned char*>(board->words[0].load());
    for (int i = 0; i < 1 << 20; i += 511) CHECK_EQ(theirs[i], 0x5a);
    // Never touched by anybody, and still there.
    CHECK_EQ(theirs[size_t{512} << 20], 0);
  });
  CHECK_EQ(job.Wait(1), -SIGKILL);
  job.board()->words[1].store(1);
  job.Join();
}

// All ways out unmap everything: shadows, aliases and the rest of the range.
TEST(NothingStaysMapped) {
  const Deadline deadline("NothingStaysMapped", 60);
  const uint64_t base = FreeBase(2 * kSpan);
  Job job(2, 50, [base](int me, Board* board) {
    const int before = OpenDescriptors();
    {
      const auto arena = forked::MeetInArenas(me, 2, base, board);
      CHECK(MappingsIn(base, base + 2 * kSpan) >= 2);
      const uint64_t alias =
          reinterpret_cast<uint64_t>(arena->Writable(1 - me, 0));
      board->words[me].store(alias);
    }
    CHECK_EQ(MappingsIn(base, base + 2 * kSpan), 0);
    CHECK_EQ(MappingsIn(board->words[me].load(), board->words[me].load() + 1),
             0);
    CHECK_EQ(OpenDescriptors(), before);
    board->Meet(2, 3);
  });
  job.Join();
}

}  // namespace
}  // namespace strata
