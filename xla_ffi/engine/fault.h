// Owns: places where a test makes this process die or stop in the middle of
// the protocol.  Off unless a test asks for it; then one relaxed load a point.
#pragma once

#include <signal.h>

#include <atomic>
#include <cstdint>

namespace strata {

enum class FaultPoint : int {
  kNone = 0,
  kBeforePost = 1,      // slot claimed, nothing visible
  kAfterPost = 2,       // visible, no peer read yet
  kMidStages = 3,       // before the last stage
  kBeforeAck = 4,       // all read, nothing acknowledged
  kAfterAck = 5,        // acknowledged, not returned
  kAbortRequested = 6,  // ABORT_REQ stands, not resolved
  kGivingUp = 7,        // about to ask for an abort
  kMidStores = 8,       // a part is stored to the peers, more may follow
};

struct Fault {
  std::atomic<int> point{0};
  std::atomic<int> signal{SIGKILL};
  std::atomic<int64_t> countdown{0};  // passes before it strikes
};
inline Fault fault;

inline void MaybeFault(FaultPoint at) {
  if (__builtin_expect(fault.point.load(std::memory_order_relaxed) == 0, 1)) {
    return;
  }
  if (fault.point.load(std::memory_order_relaxed) != static_cast<int>(at)) {
    return;
  }
  if (fault.countdown.fetch_sub(1, std::memory_order_relaxed) != 0) return;
  // To this very thread: a stop that another thread takes lets this one run on.
  raise(fault.signal.load(std::memory_order_relaxed));
}

}  // namespace strata
