// Owns: blocks of the arena that XLA has given back while a peer may still
// store to them, because the operation they belonged to was aborted.
// Invariant: a block that overlaps a held range is freed only after whoever
// held it says that it is over.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace strata {

class Quarantine {
 public:
  struct Range {
    uint64_t begin = 0, end = 0;
  };

  // Holds the ranges until `over` returns true; it is asked by Sweep only.
  void Hold(std::vector<Range> ranges, std::function<bool()> over);
  // True if the block must stay: Sweep frees it later.  One relaxed load while
  // nothing is held.
  bool Keeps(const void* block, uint64_t bytes) {
    // acquire pairs with Hold: the abort precedes the free of its results.
    return holding_.load(std::memory_order_acquire) != 0 &&
           KeepsSlow(block, bytes);
  }
  bool holding() const { return holding_.load(std::memory_order_relaxed) != 0; }
  // Lets go of what is over and frees the blocks that waited for it.
  void Sweep(const std::function<void(void*)>& free);
  // From now on nothing is over any more: the words to tell by are gone.
  void Seal();
  uint64_t bytes() const;  // kept back now

 private:
  struct Held {
    std::vector<Range> ranges;
    std::function<bool()> over;
  };
  struct Block {
    void* address;
    uint64_t bytes;
  };
  bool KeepsSlow(const void* block, uint64_t bytes);
  bool Overlaps(const void* block, uint64_t bytes) const;

  mutable std::mutex mutex_;
  std::vector<Held> held_;
  std::vector<Block> blocks_;
  std::atomic<int> holding_{0};
};

}  // namespace strata
