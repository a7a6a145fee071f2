#include "fabric/quarantine.h"

#include <algorithm>

namespace strata {

void Quarantine::Hold(std::vector<Range> ranges, std::function<bool()> over) {
  std::lock_guard<std::mutex> lock(mutex_);
  held_.push_back({std::move(ranges), std::move(over)});
  holding_.store(static_cast<int>(held_.size()), std::memory_order_release);
}

bool Quarantine::Overlaps(const void* block, uint64_t bytes) const {
  const uint64_t begin = reinterpret_cast<uint64_t>(block);
  for (const Held& h : held_) {
    for (const Range& r : h.ranges) {
      if (r.begin < begin + bytes && begin < r.end) return true;
    }
  }
  return false;
}

bool Quarantine::KeepsSlow(const void* block, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!Overlaps(block, bytes)) return false;
  blocks_.push_back({const_cast<void*>(block), bytes});
  return true;
}

void Quarantine::Sweep(const std::function<void(void*)>& free) {
  if (!holding()) return;
  std::vector<Block> ready;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(held_, [](const Held& h) { return h.over(); });
    holding_.store(static_cast<int>(held_.size()), std::memory_order_release);
    const auto kept = std::partition(
        blocks_.begin(), blocks_.end(),
        [this](const Block& b) { return Overlaps(b.address, b.bytes); });
    ready.assign(kept, blocks_.end());
    blocks_.erase(kept, blocks_.end());
  }
  for (const Block& b : ready) free(b.address);
}

void Quarantine::Seal() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Held& h : held_) h.over = [] { return false; };
}

uint64_t Quarantine::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t sum = 0;
  for (const Block& b : blocks_) sum += b.bytes;
  return sum;
}

}  // namespace strata
