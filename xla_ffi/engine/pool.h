// Owns: the threads that carry operations which could not finish in place.
// Invariant: one thread a pending operation.  The thread that completes an
// operation runs the rest of the XLA program, which may block on the next
// one, so no thread ever has a second operation behind the first.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/op.h"

namespace strata {

class PendingPool {
 public:
  using Done = std::function<void(Outcome, const Failure&)>;

  void Submit(std::unique_ptr<Op> op, Done done);
  // Operations submitted and not yet completed.
  int pending() const { return pending_.load(std::memory_order_acquire); }
  int threads() const;

 private:
  struct Task {
    std::unique_ptr<Op> op;
    Done done;
  };
  void Run(Task task);

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Task> handed_;
  int idle_ = 0;
  int threads_ = 0;
  std::atomic<int> pending_{0};
};

}  // namespace strata
