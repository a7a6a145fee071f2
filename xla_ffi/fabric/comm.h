// Owns: one rank's view of one communicator (a listed group of ranks): its
// launch ordinal, which launches were aborted and why.  Invariant: the ordinal
// counts the launches of this rank that touched the communicator, so that
// ranks which run the same programs in the same order hold the same number.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fabric/world.h"

namespace strata {

class Comm {
 public:
  // members: world ranks in listed order; me: position of the local rank.
  Comm(World* world, std::vector<int> members, int me);

  World& world() const { return *world_; }
  uint64_t hash() const { return hash_; }
  int size() const { return static_cast<int>(members_.size()); }
  int me() const { return me_; }
  const Rank& rank(int position) const {
    return world_->rank(members_[static_cast<size_t>(position)]);
  }
  const Rank& self() const { return rank(me_); }
  const std::vector<int>& members() const { return members_; }
  bool one_process() const { return one_process_; }

  // Ordinal of the launch `run_id`, counting it if it is new.  0 and a failure
  // if the launch overlaps another one or the communicator is broken.
  uint64_t BeginLaunch(int64_t run_id, Failure* failure);
  void EndOperation() { in_flight_.fetch_sub(1, std::memory_order_release); }

  // The ordinal this rank gave to `run_id`; 0 if the launch has not come here.
  uint64_t OrdinalOf(int64_t run_id) const {
    return run_id_.load(std::memory_order_acquire) == run_id
               ? ordinal_.load(std::memory_order_relaxed)
               : 0;
  }

  // Ends every operation of launch `ordinal` on this rank and tells the group.
  void AbortLaunch(uint64_t ordinal, const Failure& why, int culprit);
  void Break(const Failure& why, int culprit);
  bool Aborted(uint64_t ordinal) const {
    return entry_->aborted.load(std::memory_order_seq_cst) >= ordinal ||
           entry_->broken.load(std::memory_order_acquire) != 0;
  }
  Failure Why() const;
  void WakeGroup() const;

  // What a peer's entry says; nullptr while the peer has not come here yet.
  const CommEntry* PeerEntry(int position) const;

 private:
  CommEntry* Claim();
  void Explain(const Failure& why);

  World* world_;
  std::vector<int> members_;
  int me_;
  uint64_t hash_;
  bool one_process_ = true;
  CommEntry* entry_;
  std::atomic<int64_t> run_id_;
  std::atomic<uint64_t> ordinal_{0};
  std::atomic<int64_t> in_flight_{0};
  mutable std::unique_ptr<std::atomic<const CommEntry*>[]> peer_entries_;

  static constexpr int kRecent = 64;
  std::mutex mutex_;  // a new launch or a failure, never the steady path
  int64_t recent_[kRecent] = {};
  bool recent_used_[kRecent] = {};
  int recent_next_ = 0;
  mutable std::mutex why_mutex_;
  Failure why_;
};

uint64_t HashBytes(const void* data, size_t bytes, uint64_t seed);

// Finds or makes the view of (rank, members).  Never destroyed while the world
// lives: their number is bounded by kCommEntries a rank.
class CommRegistry {
 public:
  explicit CommRegistry(World* world) : world_(world) {}
  Comm* Get(const std::vector<int>& members, int me);

 private:
  World* world_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Comm>> comms_;
};

}  // namespace strata
