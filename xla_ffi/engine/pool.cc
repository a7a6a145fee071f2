#include "engine/pool.h"

#include <pthread.h>

#include <chrono>
#include <thread>

namespace strata {

namespace {
constexpr auto kIdleLife = std::chrono::seconds(10);
}

void PendingPool::Submit(std::unique_ptr<Op> op, Done done) {
  pending_.fetch_add(1, std::memory_order_acq_rel);
  Task task{std::move(op), std::move(done)};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_ > static_cast<int>(handed_.size())) {
      handed_.push_back(std::move(task));
      wake_.notify_one();
      return;
    }
    ++threads_;
  }
  // Detached: a thread may sit in XLA code for the rest of the process.
  std::thread([this, t = std::move(task)]() mutable {
    pthread_setname_np(pthread_self(), "strata-pending");
    FloatMode::SetForThread();
    Run(std::move(t));
  }).detach();
}

void PendingPool::Run(Task task) {
  for (;;) {
    Failure failure;
    const Outcome o = Engine::Continue(task.op.get(), ~uint64_t{0}, &failure);
    task.op.reset();
    // Before the completion: what runs behind it may last.
    pending_.fetch_sub(1, std::memory_order_acq_rel);
    task.done(o, failure);
    task.done = nullptr;
    std::unique_lock<std::mutex> lock(mutex_);
    ++idle_;
    const bool got =
        wake_.wait_for(lock, kIdleLife, [this] { return !handed_.empty(); });
    --idle_;
    if (!got) {
      --threads_;
      return;
    }
    task = std::move(handed_.back());
    handed_.pop_back();
  }
}

int PendingPool::threads() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return threads_;
}

}  // namespace strata
