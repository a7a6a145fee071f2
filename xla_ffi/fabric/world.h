// Owns: who takes part (ranks, processes, devices), the settings in force, and
// whether a process still lives.  Invariant: immutable after Start() except
// for the dead flags (set once, never cleared) and the counters.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fabric/arena.h"
#include "fabric/errors.h"
#include "fabric/registrar.h"
#include "fabric/signals.h"

namespace strata {

// How an operand too large for a post reaches peers of other processes.
enum class Registration : int {
  kStaged = 0,        // copied to a window, piece by piece
  kOnAllocation = 1,  // in memory that peers have mapped ahead of its use
  kJustInTime = 2,    // in memory that peers map when they first need it
};

struct Settings {
  uint64_t timeout_ns = 300ull * 1000000000u;
  uint64_t warn_after_ns = 20ull * 1000000000u;
  uint64_t spin_ns = 0;          // while cores >= ranks, else 0
  uint64_t yield_ns = 0;         // bounded yielding before the first sleep
  uint64_t inplace_ns = 300000;  // a handler waits in place at most this long
  size_t chunk_bytes = 256 << 10;
  int algorithm = 0;  // Algorithm::kAuto
  Registration registration = Registration::kStaged;
  bool direct = true;  // ranks of one process read XLA's own buffers
  bool trace = false;
};

struct Rank {
  int world = 0;  // position among all ranks
  int process = 0;
  int local = 0;  // index among its process's ranks
  int64_t device_id = 0;
  bool mine = false;                // belongs to this process
  const Control* shadow = nullptr;  // readable
  Control* rw = nullptr;            // writable view
};

// Per-rank counters; single writer at a time per binding, summed by the ledger.
struct Counters {
  std::atomic<uint64_t> operations{0}, inplace{0}, deferred{0};
  std::atomic<uint64_t> eager_bytes{0}, staged_bytes{0}, direct_bytes{0};
  // Of the staged bytes: operands outside the arena in spite of a direct mode;
  // results outside it, which peers could not store to.
  std::atomic<uint64_t> outside_bytes{0}, outside_result_bytes{0};
  std::atomic<uint64_t> sleeps{0}, wakes{0}, aborts{0};
  std::atomic<uint64_t> windows{0};
};
inline void Count(std::atomic<uint64_t>& c, uint64_t n = 1) {
  c.fetch_add(n, std::memory_order_relaxed);
}

class World {
 public:
  World(std::unique_ptr<Arena> arena, const Settings& settings);
  ~World();

  // Process p lives behind this pidfd (taken over); -1 = not watched.
  void Watch(int p, int pidfd, int64_t pid);
  // All ranks of the job in rank order: (process, device id).  Local indices
  // follow from the order.  Starts the monitor.
  void Start(const std::vector<std::pair<int, int64_t>>& ranks,
             bool divergent_programs);

  Arena& arena() const { return *arena_; }
  Registrar& registrar() const { return *registrar_; }
  // Ends the threads and gives the arena up, detached from its peers; blocks
  // that XLA still holds stay valid.  `unread`: see Arena::Detach.
  std::unique_ptr<Arena> TakeArena(bool unread);
  const Settings& settings() const { return settings_; }
  Settings& mutable_settings() { return settings_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  const Rank& rank(int world) const {
    return ranks_[static_cast<size_t>(world)];
  }
  int RankOfDevice(int64_t device_id) const;  // -1 if unknown
  // Whether processes run with different XLA flags, so that compilers may have
  // ordered clones differently.
  bool divergent_programs() const { return divergent_; }
  bool Dead(int process) const {
    // acquire pairs with the monitor's release: whatever the dead process had
    // published is visible to who sees it dead.
    return dead_[static_cast<size_t>(process)].load(std::memory_order_acquire);
  }
  // Whether another process has shut down: it has read what it wanted, and
  // others have read what it posted.  acquire, as above.
  bool Left(int process) const {
    return process != arena_->process() &&
           arena_->Shadow(process, 0)->left.load(std::memory_order_acquire) !=
               0;
  }
  void MarkDead(int process);
  std::string Name(int world) const;
  Counters& counters() { return counters_; }
  bool stopping() const { return stop_.load(std::memory_order_relaxed); }

 private:
  void Monitor();
  void EndThreads();

  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Registrar> registrar_;
  Settings settings_;
  std::vector<Rank> ranks_;
  std::unordered_map<int64_t, int> by_device_;
  std::vector<int> pidfds_;
  std::vector<int64_t> pids_;
  std::unique_ptr<std::atomic<bool>[]> dead_;
  bool divergent_ = false;
  Counters counters_;
  std::atomic<bool> stop_{false};
  int stop_event_ = -1;
  std::thread monitor_;
};

// True in a child made by fork() after Start(); such a process has no rank.
bool InForkedChild();

}  // namespace strata
