// Owns: which ranges of an arena are in use.  A two-level bitmap allocator
// (TLSF) over granules, all metadata outside the arena, so that no peer can
// read or corrupt it.  Invariant: every granule belongs to exactly one block;
// two free blocks are never neighbours.  Allocate and Free are O(1).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace strata {

class Allocator {
 public:
  static constexpr size_t kGranule = 4096;

  // Manages [0, bytes) as offsets; bytes is rounded down to the granule.
  explicit Allocator(size_t bytes);
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  static constexpr size_t kFull = ~size_t{0};
  // Offset of a block of at least `bytes`, aligned to the granule (or to a
  // larger power of two); kFull if there is none.
  size_t Allocate(size_t bytes, size_t alignment = kGranule);
  void Free(size_t offset);
  // Bytes of the block that starts at `offset`, as rounded up.
  size_t SizeOf(size_t offset) const;

  // Takes the free end of the range, from `keep` or from where it begins,
  // whichever is later, up to the high-water mark or `upto`, whichever is
  // later; kFull if there is none, or (unless `beyond`) none below the mark.
  // *end: where it ends.
  size_t TakeTail(size_t keep, size_t upto, bool beyond, size_t* end);
  // After Free of a tail: nothing past `offset` holds memory.
  void LowerHighWater(size_t offset);

  // If nothing is in use: nothing will ever be again, and the metadata goes.
  bool Close();

  size_t used() const { return used_.load(std::memory_order_relaxed); }
  size_t high_water() const { return high_.load(std::memory_order_relaxed); }
  // Walks every block; throws std::logic_error where an invariant is broken.
  void CheckInvariants() const;

 private:
  static constexpr int kSecondBits = 4;  // 16 lists per power of two
  static constexpr int kFirst = 32;
  static constexpr uint32_t kNil = ~uint32_t{0};

  struct Block {
    uint32_t start = 0, count = 0;         // granules
    uint32_t before = kNil, after = kNil;  // neighbours in the arena
    uint32_t prev = kNil, next = kNil;     // free list, when free
    bool free = false;
  };

  class Guard;
  static void ListOf(uint32_t count, int* first, int* second);
  uint32_t NewBlock();
  void Insert(uint32_t b);
  void Remove(uint32_t b);
  // Splits `b` so that it keeps `count` granules; the rest becomes free.
  void Split(uint32_t b, uint32_t count);
  uint32_t Find(uint32_t count) const;

  uint32_t granules_;
  uint32_t* block_at_ = nullptr;  // sparse: block + 1 that starts at a granule
  size_t map_bytes_ = 0;
  std::vector<Block> blocks_;
  std::vector<uint32_t> spare_;
  uint32_t first_map_ = 0;
  uint32_t second_map_[kFirst] = {};
  uint32_t heads_[kFirst][1 << kSecondBits];
  uint32_t last_ = 0;  // the block that ends the range
  bool closed_ = false;
  std::atomic<size_t> used_{0}, high_{0};
  mutable std::atomic<uint32_t> lock_{0};
};

}  // namespace strata
