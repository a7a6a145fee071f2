#include "fabric/registrar.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

namespace strata {
namespace {

constexpr size_t kLeastAhead = size_t{8} << 20;
constexpr size_t kMostAhead = size_t{256} << 20;
// Free warm memory is given back above this, or above what is in use, after
// so many quiet seconds.
constexpr size_t kKeep = size_t{256} << 20;
constexpr int kQuietTicks = 5;
constexpr uint64_t kTickNs = 1'000'000'000;

size_t RoundUp(size_t n, size_t to) { return (n + to - 1) / to * to; }

void Add(std::atomic<uint64_t>& c, uint64_t n) {
  c.fetch_add(n, std::memory_order_relaxed);
}

}  // namespace

Registrar::Registrar(Arena* arena, bool ahead)
    : arena_(arena),
      ahead_(ahead),
      extents_((arena->heap_end() - arena->heap_begin()) / kExtent + 1) {
  const size_t n = static_cast<size_t>(arena->processes());
  const size_t words = arena->span() / kPiece / 64 + 1;
  peers_ = std::make_unique<Peer[]>(n);
  if (!ahead) {
    for (size_t p = 0; p < n; ++p) {
      peers_[p].mapped = std::make_unique<std::atomic<uint64_t>[]>(words);
    }
  }
  warmed_ns_ = std::make_unique<std::atomic<uint64_t>[]>(extents_);
  if (ahead) thread_ = std::thread([this] { Run(); });
}

Registrar::~Registrar() {
  stop_.store(true, std::memory_order_relaxed);
  if (!thread_.joinable()) return;
  RingExtents(arena_->Writable(arena_->process(), 0));
  thread_.join();
}

// How far pages should be present: what is in use and a quarter more.
size_t Registrar::Target() const {
  const size_t high = arena_->allocator().high_water();
  const size_t target =
      RoundUp(high + std::clamp(high / 4, kLeastAhead, kMostAhead), kPiece);
  size_t most = (arena_->heap_end() - arena_->heap_begin()) / kPiece * kPiece;
  if (arena_->limit() != 0) {
    most = std::min(most, arena_->limit() / kPiece * kPiece);
  }
  return std::min(target, most);
}

bool Registrar::WarmOwn() {
  const size_t target = Target();
  if (warm_end_ >= target) return false;
  const uint64_t begin = NowNs();
  const size_t end = std::min(target, warm_end_ + 4 * kPiece);
  arena_->Warm(warm_end_, end);
  const uint64_t now = NowNs();
  Add(counts_.warm_bytes, end - warm_end_);
  Add(counts_.warm_ns, now - begin);
  Add(counts_.extents, 1);
  for (size_t e = warm_end_ / kExtent; e <= (end - 1) / kExtent; ++e) {
    uint64_t never = 0;
    warmed_ns_[e].compare_exchange_strong(never, now,
                                          std::memory_order_relaxed);
  }
  warm_end_ = end;
  const size_t high = arena_->allocator().high_water();
  arena_->RingAbove(high + (target - std::min(high, target)) / 2);
  // The announcement: peers map [what they have, end) and nothing else.
  AnnounceExtent(arena_->Writable(arena_->process(), 0), warm_end_);
  for (int p = 0; p < arena_->processes(); ++p) {
    if (p != arena_->process()) RingExtents(arena_->Writable(p, 0));
  }
  return true;
}

bool Registrar::PopulatePeers() {
  bool worked = false;
  for (int p = 0; p < arena_->processes(); ++p) {
    if (p == arena_->process()) continue;
    Peer& peer = peers_[static_cast<size_t>(p)];
    const uint64_t end = ExtentOf(arena_->Shadow(p, 0));
    const uint64_t have = peer.ready_end.load(std::memory_order_relaxed);
    if (have > end) {  // its tail was given back
      peer.ready_end.store(end, std::memory_order_relaxed);
      Add(counts_.remaps, 1);
      continue;
    }
    if (have == end) continue;
    const uint64_t begin = NowNs();
    const uint64_t to = std::min<uint64_t>(end, have + 4 * kPiece);
    arena_->Populate(p, have, to);
    Add(counts_.populated_bytes, to - have);
    Add(counts_.populate_ns, NowNs() - begin);
    peer.ready_end.store(to, std::memory_order_relaxed);
    worked = true;
  }
  return worked;
}

void Registrar::Run() {
  pthread_setname_np(pthread_self(), "strata-register");
  // Behind everything that computes.
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 10);
  Control* own = arena_->Writable(arena_->process(), 0);
  while (!stop_.load(std::memory_order_relaxed)) {
    const uint32_t seen = ArmExtents(own);
    // Own pages before peers': a first touch costs most.
    if (WarmOwn() || PopulatePeers()) {
      idle_ticks_ = 0;
      continue;
    }
    if (SleepExtents(own, seen, kTickNs)) {
      idle_ticks_ = 0;
    } else if (++idle_ticks_ >= kQuietTicks) {
      idle_ticks_ = 0;
      const size_t used = arena_->allocator().used();
      const size_t begin = arena_->Trim(std::max(kKeep, 2 * used), warm_end_);
      if (begin != Allocator::kFull) {
        warm_end_ = std::min(warm_end_, RoundUp(begin, kPiece));
        Add(counts_.trims, 1);
        AnnounceExtent(own, warm_end_);
      }
    }
  }
}

void Registrar::Use(int process, const void* address, uint64_t bytes) {
  if (bytes == 0) return;
  Peer& peer = peers_[static_cast<size_t>(process)];
  const uint64_t begin =
      reinterpret_cast<uint64_t>(address) - arena_->HeapOf(process);
  const uint64_t end = begin + bytes;
  if (ahead_) {
    const bool ready = end <= peer.ready_end.load(std::memory_order_relaxed);
    Add(ready ? counts_.found_ready : counts_.found_unready, 1);
    return;
  }
  bool ready = true;
  for (uint64_t piece = begin / kPiece; piece <= (end - 1) / kPiece; ++piece) {
    std::atomic<uint64_t>& word = peer.mapped[piece / 64];
    const uint64_t bit = uint64_t{1} << (piece % 64);
    if ((word.load(std::memory_order_relaxed) & bit) != 0) continue;
    ready = false;
    const uint64_t start = NowNs();
    arena_->Populate(process, piece * kPiece, (piece + 1) * kPiece);
    Add(counts_.jit_bytes, kPiece);
    Add(counts_.jit_ns, NowNs() - start);
    word.fetch_or(bit, std::memory_order_relaxed);
  }
  Add(ready ? counts_.found_ready : counts_.found_unready, 1);
}

void Registrar::FirstUse(const void* address) {
  const uint64_t offset =
      reinterpret_cast<uint64_t>(address) - arena_->heap_begin();
  const size_t e = offset / kExtent;
  if (e >= extents_) return;  // not in the arena
  const uint64_t warmed = warmed_ns_[e].load(std::memory_order_relaxed);
  if (warmed <= 1) return;
  warmed_ns_[e].store(1, std::memory_order_relaxed);
  const uint64_t gap = NowNs() - warmed;
  Add(counts_.gaps, 1);
  const int bucket = std::min(31, static_cast<int>(std::bit_width(gap / 1000)));
  Add(counts_.gap_log2_us[bucket], 1);
  uint64_t least = counts_.gap_min_ns.load(std::memory_order_relaxed);
  while (gap < least && !counts_.gap_min_ns.compare_exchange_weak(
                            least, gap, std::memory_order_relaxed)) {
  }
}

}  // namespace strata
