// Owns: registration on allocation.  One thread a process keeps the pages of
// its arena ahead of demand (present, huge where the kernel can), announces
// how far, and maps what its peers announce.  Invariant: nothing waits for it;
// memory it has not reached yet works and faults on first touch.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "fabric/arena.h"

namespace strata {

class Registrar {
 public:
  // Figures for the ledger; single writer, the thread, but for `jit`.
  struct Counts {
    std::atomic<uint64_t> warm_bytes{0}, warm_ns{0};           // own pages
    std::atomic<uint64_t> populated_bytes{0}, populate_ns{0};  // peers' pages
    std::atomic<uint64_t> jit_bytes{0}, jit_ns{0};  // mapped at first use
    std::atomic<uint64_t> extents{0}, remaps{0}, trims{0};
    std::atomic<uint64_t> found_ready{0}, found_unready{0};  // peers' operands
    // From an extent's becoming warm to the first collective operand in it.
    std::atomic<uint64_t> gaps{0}, gap_min_ns{~uint64_t{0}};
    std::atomic<uint64_t> gap_log2_us[32] = {};
  };

  // ahead: whether to work ahead of demand; else peers' memory is mapped when
  // it is first used, by whoever uses it.
  Registrar(Arena* arena, bool ahead);
  ~Registrar();

  // A peer's operand is about to be read (or a result stored to): counts
  // whether it is ready, and maps it if nobody works ahead.
  void Use(int process, const void* address, uint64_t bytes);
  // An own operand goes into a collective.
  void FirstUse(const void* address);

  const Counts& counts() const { return counts_; }

 private:
  static constexpr size_t kPiece = size_t{2} << 20;    // a huge page
  static constexpr size_t kExtent = size_t{32} << 20;  // of first-use times

  void Run();
  bool WarmOwn();
  bool PopulatePeers();
  size_t Target() const;

  Arena* arena_;
  bool ahead_;
  Counts counts_;
  size_t warm_end_ = 0;
  int idle_ticks_ = 0;
  struct Peer {
    std::atomic<uint64_t> ready_end{0};  // heap offset mapped here so far
    std::unique_ptr<std::atomic<uint64_t>[]> mapped;  // by piece, bits
  };
  std::unique_ptr<Peer[]> peers_;
  std::unique_ptr<std::atomic<uint64_t>[]> warmed_ns_;  // by extent; 1 = used
  size_t extents_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace strata
