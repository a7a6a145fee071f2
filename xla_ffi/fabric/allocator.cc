#include "fabric/allocator.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <new>
#include <stdexcept>

#include "fabric/signals.h"

namespace strata {

// Held for some tens of nanoseconds and never across a system call, so a
// spinning waiter yields only if the holder lost its core.
class Allocator::Guard {
 public:
  explicit Guard(std::atomic<uint32_t>& lock) : lock_(lock) {
    // acquire pairs with the release below: the lists seen are those that the
    // previous holder left.
    for (int i = 0; lock_.exchange(1, std::memory_order_acquire) != 0; ++i) {
      if (i < 200) {
        CpuRelax();
      } else {
        sched_yield();
      }
    }
  }
  ~Guard() { lock_.store(0, std::memory_order_release); }

 private:
  std::atomic<uint32_t>& lock_;
};

Allocator::Allocator(size_t bytes)
    : granules_(static_cast<uint32_t>(bytes / kGranule)) {
  for (auto& list : heads_) std::fill(std::begin(list), std::end(list), kNil);
  map_bytes_ = (size_t{granules_} + 1) * sizeof(uint32_t);
  void* map = mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  block_at_ = static_cast<uint32_t*>(map);
  blocks_.reserve(1024);
  if (granules_ == 0) return;
  const uint32_t b = NewBlock();
  blocks_[b].count = granules_;
  last_ = b;
  block_at_[0] = b + 1;
  Insert(b);
}

Allocator::~Allocator() {
  if (!closed_) munmap(block_at_, map_bytes_);
}

bool Allocator::Close() {
  Guard guard(lock_);
  if (closed_) return true;
  if (used_.load(std::memory_order_relaxed) != 0) return false;
  closed_ = true;
  munmap(block_at_, map_bytes_);
  block_at_ = nullptr;
  blocks_ = {};
  spare_ = {};
  return true;
}

void Allocator::ListOf(uint32_t count, int* first, int* second) {
  if (count < (1u << kSecondBits)) {
    *first = 0;
    *second = static_cast<int>(count);
    return;
  }
  const int log = std::bit_width(count) - 1;
  *first = log - kSecondBits + 1;
  *second = static_cast<int>(count >> (log - kSecondBits)) & 15;
}

uint32_t Allocator::NewBlock() {
  if (!spare_.empty()) {
    const uint32_t b = spare_.back();
    spare_.pop_back();
    blocks_[b] = Block{};
    return b;
  }
  blocks_.emplace_back();
  return static_cast<uint32_t>(blocks_.size() - 1);
}

void Allocator::Insert(uint32_t b) {
  int f, s;
  ListOf(blocks_[b].count, &f, &s);
  blocks_[b].free = true;
  blocks_[b].prev = kNil;
  blocks_[b].next = heads_[f][s];
  if (heads_[f][s] != kNil) blocks_[heads_[f][s]].prev = b;
  heads_[f][s] = b;
  first_map_ |= 1u << f;
  second_map_[f] |= 1u << s;
}

void Allocator::Remove(uint32_t b) {
  int f, s;
  Block& block = blocks_[b];
  ListOf(block.count, &f, &s);
  if (block.prev != kNil) {
    blocks_[block.prev].next = block.next;
  } else {
    heads_[f][s] = block.next;
    if (block.next == kNil) {
      second_map_[f] &= ~(1u << s);
      if (second_map_[f] == 0) first_map_ &= ~(1u << f);
    }
  }
  if (block.next != kNil) blocks_[block.next].prev = block.prev;
  block.free = false;
}

void Allocator::Split(uint32_t b, uint32_t count) {
  if (blocks_[b].count == count) return;
  const uint32_t rest = NewBlock();  // may move blocks_
  Block& block = blocks_[b];
  Block& tail = blocks_[rest];
  tail.start = block.start + count;
  tail.count = block.count - count;
  tail.before = b;
  tail.after = block.after;
  if (block.after != kNil) {
    blocks_[block.after].before = rest;
  } else {
    last_ = rest;
  }
  block.after = rest;
  block.count = count;
  block_at_[tail.start] = rest + 1;
  Insert(rest);
}

uint32_t Allocator::Find(uint32_t count) const {
  // Round up to the next list, whose every block is large enough.
  uint32_t want = count;
  if (count >= (1u << kSecondBits)) {
    const int log = std::bit_width(count) - 1;
    const uint64_t up = uint64_t{count} + (1u << (log - kSecondBits)) - 1;
    if (up > granules_) return kNil;
    want = static_cast<uint32_t>(up);
  }
  int f, s;
  ListOf(want, &f, &s);
  const uint32_t in_second = second_map_[f] & (~0u << s);
  if (in_second != 0) return heads_[f][std::countr_zero(in_second)];
  if (f + 1 >= kFirst) return kNil;
  const uint32_t in_first = first_map_ & (~0u << (f + 1));
  if (in_first == 0) return kNil;
  const int g = std::countr_zero(in_first);
  return heads_[g][std::countr_zero(second_map_[g])];
}

size_t Allocator::Allocate(size_t bytes, size_t alignment) {
  // Not rounded up by an addition: any number of bytes may be asked for.
  const uint64_t count64 = bytes / kGranule + (bytes % kGranule != 0);
  const uint64_t align = std::max<uint64_t>(1, alignment / kGranule);
  if (count64 + align - 1 > granules_) return kFull;
  const uint32_t count = std::max<uint32_t>(1, static_cast<uint32_t>(count64));
  Guard guard(lock_);
  if (closed_) return kFull;
  uint32_t b = Find(count + static_cast<uint32_t>(align) - 1);
  if (b == kNil) return kFull;
  Remove(b);
  const uint32_t skip =
      static_cast<uint32_t>((align - blocks_[b].start % align) % align);
  if (skip != 0) {
    Split(b, skip);
    const uint32_t aligned = blocks_[b].after;
    Remove(aligned);
    Insert(b);
    b = aligned;
  }
  Split(b, count);
  const size_t used =
      used_.load(std::memory_order_relaxed) + size_t{count} * kGranule;
  used_.store(used, std::memory_order_relaxed);
  const size_t end = (size_t{blocks_[b].start} + count) * kGranule;
  if (end > high_.load(std::memory_order_relaxed)) {
    high_.store(end, std::memory_order_relaxed);
  }
  return size_t{blocks_[b].start} * kGranule;
}

size_t Allocator::TakeTail(size_t keep, size_t upto, bool beyond, size_t* end) {
  Guard guard(lock_);
  if (closed_ || granules_ == 0) return kFull;
  const size_t high = high_.load(std::memory_order_relaxed) / kGranule;
  const size_t last =
      std::min<size_t>(granules_, std::max(high, upto / kGranule));
  const uint32_t b = last_;
  const size_t first =
      std::max<size_t>((keep + kGranule - 1) / kGranule, blocks_[b].start);
  if (!blocks_[b].free || first >= (beyond ? last : high)) return kFull;
  const uint32_t from = static_cast<uint32_t>(first);
  const uint32_t to = static_cast<uint32_t>(last);
  Remove(b);
  uint32_t tail = b;
  if (from > blocks_[b].start) {
    Split(b, from - blocks_[b].start);
    tail = blocks_[b].after;
    Remove(tail);
    Insert(b);
  }
  if (to < granules_) Split(tail, to - from);
  used_.store(used_.load(std::memory_order_relaxed) +
                  size_t{blocks_[tail].count} * kGranule,
              std::memory_order_relaxed);
  *end = size_t{to} * kGranule;
  return size_t{from} * kGranule;
}

void Allocator::LowerHighWater(size_t offset) {
  Guard guard(lock_);
  if (blocks_[last_].free &&
      size_t{blocks_[last_].start} * kGranule <= offset) {
    high_.store(offset, std::memory_order_relaxed);
  }
}

void Allocator::Free(size_t offset) {
  Guard guard(lock_);
  const uint32_t at = block_at_[offset / kGranule];
  if (offset % kGranule != 0 || at == 0 || blocks_[at - 1].free) {
    throw std::logic_error("free of a range that is not allocated");
  }
  uint32_t b = at - 1;
  used_.store(used_.load(std::memory_order_relaxed) -
                  size_t{blocks_[b].count} * kGranule,
              std::memory_order_relaxed);
  auto merge = [this](uint32_t left, uint32_t right) {
    block_at_[blocks_[right].start] = 0;
    blocks_[left].count += blocks_[right].count;
    blocks_[left].after = blocks_[right].after;
    if (blocks_[right].after != kNil) {
      blocks_[blocks_[right].after].before = left;
    } else {
      last_ = left;
    }
    spare_.push_back(right);
  };
  const uint32_t after = blocks_[b].after;
  if (after != kNil && blocks_[after].free) {
    Remove(after);
    merge(b, after);
  }
  const uint32_t before = blocks_[b].before;
  if (before != kNil && blocks_[before].free) {
    Remove(before);
    merge(before, b);
    b = before;
  }
  Insert(b);
}

size_t Allocator::SizeOf(size_t offset) const {
  Guard guard(lock_);
  const uint32_t at = block_at_[offset / kGranule];
  return at == 0 ? 0 : size_t{blocks_[at - 1].count} * kGranule;
}

void Allocator::CheckInvariants() const {
  Guard guard(lock_);
  if (closed_) return;
  auto require = [](bool ok, const char* what) {
    if (!ok) throw std::logic_error(what);
  };
  uint32_t at = 0, previous = kNil;
  size_t used = 0;
  bool previous_free = false;
  while (at < granules_) {
    require(block_at_[at] != 0, "a granule starts no block");
    const uint32_t b = block_at_[at] - 1;
    const Block& block = blocks_[b];
    require(block.start == at && block.count > 0, "block is misplaced");
    require(block.before == previous, "neighbour link is wrong");
    require(!(block.free && previous_free), "free neighbours not merged");
    if (!block.free) used += size_t{block.count} * kGranule;
    previous_free = block.free;
    previous = b;
    at += block.count;
  }
  require(at == granules_, "blocks do not fill the arena");
  require(used == used_.load(std::memory_order_relaxed), "used is wrong");
}

}  // namespace strata
