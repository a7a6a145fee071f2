// Owns: where the leaves of one call lie when they are packed end to end, and
// how that packed range is cut into chunks (steps of a pipeline) and parts
// (shares of the ranks).  Invariant: leaves start at multiples of 16 packed
// bytes and cuts fall on multiples of 64, so a cut is an element boundary of
// every reducible type, and two ranks never write one cache line of a window.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace strata {

inline constexpr int64_t kLeafAlign = 16;
inline constexpr int64_t kCutAlign = 64;

constexpr int64_t AlignUp(int64_t value, int64_t align) {
  return (value + align - 1) / align * align;
}

// Packed bytes [begin, end).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  bool empty() const { return begin >= end; }
};

// The part of one leaf that lies in a Range.
struct Piece {
  uint16_t leaf = 0;
  int64_t offset = 0;  // bytes into the leaf
  int64_t packed = 0;  // bytes into the packed range
  int64_t bytes = 0;
};

class Packing {
 public:
  explicit Packing(std::vector<int64_t> leaf_bytes)
      : bytes_(std::move(leaf_bytes)) {
    starts_.reserve(bytes_.size());
    for (int64_t bytes : bytes_) {
      starts_.push_back(AlignUp(total_, kLeafAlign));
      total_ = starts_.back() + bytes;
    }
  }

  int64_t total() const { return total_; }
  int64_t bytes(size_t leaf) const { return bytes_[leaf]; }
  int64_t start(size_t leaf) const { return starts_[leaf]; }
  Range all() const { return {0, total_}; }

  // Calls visit(Piece) for every non-empty piece of the range, in order.
  template <typename Visit>
  void ForEach(Range range, const Visit& visit) const {
    if (range.empty()) return;
    // Leaves of size 0 may share a start: the last one is the one with bytes.
    auto after = std::upper_bound(starts_.begin(), starts_.end(), range.begin);
    size_t leaf = static_cast<size_t>(after - starts_.begin()) - 1;
    for (; leaf < starts_.size() && starts_[leaf] < range.end; ++leaf) {
      int64_t begin = std::max(range.begin, starts_[leaf]);
      int64_t end = std::min(range.end, starts_[leaf] + bytes_[leaf]);
      if (begin >= end) continue;
      visit(Piece{.leaf = static_cast<uint16_t>(leaf),
                  .offset = begin - starts_[leaf],
                  .packed = begin,
                  .bytes = end - begin});
    }
  }

 private:
  std::vector<int64_t> bytes_;
  std::vector<int64_t> starts_;
  int64_t total_ = 0;
};

// Equal cuts of [0, total); one when chunk_bytes is 0 or reaches the total.
class Chunks {
 public:
  Chunks(int64_t total, int64_t chunk_bytes) : total_(total), step_(total) {
    if (chunk_bytes > 0 && chunk_bytes < total) {
      step_ = AlignUp(chunk_bytes, kCutAlign);
    }
    count_ = total == 0 ? 0 : (total - 1) / step_ + 1;
  }

  int64_t count() const { return count_; }

  // Empty outside [0, count): the fill and the drain of a pipeline.
  Range operator[](int64_t k) const {
    if (k < 0 || k >= count_) return {};
    return {k * step_, std::min(total_, (k + 1) * step_)};
  }

 private:
  int64_t total_;
  int64_t step_;
  int64_t count_;
};

// The share of rank r of n.  Shares differ by at most one cut unit; a range
// shorter than n units leaves some ranks without a share.
inline Range PartOf(Range range, int r, int n) {
  int64_t units = (range.end - range.begin + kCutAlign - 1) / kCutAlign;
  auto cut = [&](int64_t i) {
    return std::min(range.end, range.begin + units * i / n * kCutAlign);
  };
  return {cut(r), cut(r + 1)};
}

}  // namespace strata
