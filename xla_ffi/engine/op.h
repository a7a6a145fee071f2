// Owns: one execution of one collective on one rank, from its post to its last
// acknowledgement.  Invariants: an Op is driven by one thread at a time; it
// never waits longer than the budget it is given; it ends in exactly one of
// kDone and kFailed, and after that no peer reads memory of XLA on its behalf.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/instance.h"
#include "fabric/world.h"

namespace strata {

enum class Outcome { kDone, kFailed, kPending };

// What this process remembers about a slot of one of its ranks.
struct LocalSlot {
  std::atomic<uint32_t> claimed{0};  // 0 idle (perhaps draining), 1 in use
  std::atomic<uint64_t> gen{0};
  Comm* comm = nullptr;  // of the last operation; nullptr = never used
  Key key;               // of the last operation
  bool all_read = false;
  int one_reader = -1;
  bool displaced = false;
  bool queued = false;  // waits in RankState::windows to give its window back
  void* window = nullptr;  // arena memory
  uint64_t window_bytes = 0;
  std::vector<const void*> in;
  std::vector<void*> out;      // where results are written
  std::vector<void*> results;  // where XLA wants them, if that is elsewhere
};

struct RankState {
  Control* control = nullptr;
  std::unique_ptr<LocalSlot[]> slots;
  // Slots whose arena window is to be given back once every reader is done.
  std::atomic<uint32_t> windows_lock{0};
  std::vector<int> windows;
};

// A peer's post, found.
struct PeerPost {
  const Slot* slot = nullptr;
  int index = 0;
  uint64_t gen = 0;
  const unsigned char* window = nullptr;
  const void* const* inputs = nullptr;
  const void* const* outputs = nullptr;
};

struct Op {
  enum class At : uint8_t { kClaim, kStages, kExit };

  Binding* binding = nullptr;
  RankState* state = nullptr;
  Key key;
  int64_t run_id = 0;
  uint64_t gen = 0;
  int slot = -1;
  At at = At::kClaim;
  int stage = 0;
  size_t cursor = 0;     // needs (or readers) before it are satisfied
  bool aborted = false;  // kExit only drains what may still be read
  uint64_t start_ns = 0, check_ns = 0;
  bool warned = false;
  // Idle rule: CPU time of all processes when the stall was first seen.
  uint64_t idle_since_ns = 0, idle_cpu = 0;
  unsigned char* window = nullptr;
  // What peers are told of a direct operation's buffers: addresses of operands,
  // then of results, in shared memory.
  const void** table = nullptr;
  bool no_room = false;  // the arena could not hold what must be staged
  // Operands while there is no slot to keep them in.
  const void* const* in = nullptr;
  void* const* out = nullptr;
  std::vector<const void*> kept_in;
  std::vector<void*> kept_out;
  PeerPost found[kMaxRanks];

  Comm& comm() const { return *binding->comm; }
  World& world() const { return binding->comm->world(); }
  Slot* own() const { return &state->control->slots[slot]; }
  LocalSlot& local() const { return state->slots[static_cast<size_t>(slot)]; }
};

class Engine {
 public:
  explicit Engine(World* world);

  // Posts and runs.  Waits at most the in-place budget; kPending hands out an
  // Op that somebody must Continue until it is not pending.
  Outcome Start(Binding* b, int64_t run_id, const void* const* in,
                void* const* out, std::unique_ptr<Op>* pending,
                Failure* failure);
  static Outcome Continue(Op* op, uint64_t budget_ns, Failure* failure);
  // For an execution that must not take part: the launch counts, and fails for
  // the group, so that the next one is everybody's next one.
  void Refuse(Binding* b, int64_t run_id, Failure* failure);
  // Whether nobody reads any more what this process's ranks have posted.
  bool Drained();
  // Frees the windows whose readers are through.  No operation is under way.
  void GiveWindowsBack();

 private:
  World* world_;
  std::vector<RankState> ranks_;  // by local index
};

// Pieces of the engine, apart only for their size.  All take the op's thread.
namespace detail {

inline int HomeBucket(const Key& k) {
  const uint64_t h = (k.comm ^ (k.site * 0x9e3779b97f4a7c15u) ^
                      (k.instance >> 52) * 0xd6e8feb86659fd93u);
  return static_cast<int>((h >> 17) % kBuckets);
}

// Whether group position `p` is through with this rank's operation `key`.
bool ReaderDone(const Comm& comm, Control* control, int slot, uint64_t gen,
                const Key& key, int p);
bool Drained(const RankState& rank, int slot);
// Whether everybody is through with the operation of generation `gen`.
bool SlotOver(RankState* rank, int slot, uint64_t gen);
// Frees the window of a slot, if it has one that nobody reads any more.
void DropWindow(RankState* rank, int slot);
// Copies to the arena what peers could not read where it lies.
void StageOutsiders(Op* op);
bool TryClaim(Op* op);
bool AllDrained(RankState* rank);
// World ranks that still read what a claim waits to reuse.
std::vector<int> LateReaders(const Op& op);
void Post(Op* op);
bool Find(const Op& op, int position, PeerPost* post);
// The peer's slot for a key and its generation; nullptr if it has none.
const Slot* FindSlot(const Comm& comm, int position, const Key& key, int likely,
                     uint64_t* gen);
// 1: go on; 0: not yet; -1: look closer (something failed or changed).
int Ready(Op* op);
// Group position the op waits for (valid after Ready() returned 0).
int Missing(const Op& op);
void RunStage(const Op& op, const Stage& stage);
void ReleaseSlot(Op* op);
// Copies results that were put together in the arena to where XLA wants them.
void DeliverResults(const Op& op);
void WakeReaders(const Op& op);
void AckSources(const Op& op, bool wake);

// True if the op is over (failure filled); false to keep waiting.
bool SlowCheck(Op* op, uint64_t now_ns, Failure* failure);
// False if the op turned out to be able to go on.  `final`: a peer's abort of
// this very operation is committed, so it cannot.
bool Abort(Op* op, const Failure& why, int culprit, bool final = false);
// After the last stage: whether every source still stands by its post.
bool Confirm(Op* op, Failure* failure);
// At the end of an exit that had a deadline: whether every source stood by its
// post to the last.
bool Agreed(Op* op, Failure* failure);
bool FindMismatch(Op* op, int position, Failure* failure);
bool FindCircle(Op* op, uint64_t now_ns, int* culprit, Failure* failure);

}  // namespace detail

// Flush-to-zero, denormals-are-zero, round-to-nearest: what XLA computes with.
class FloatMode {
 public:
  FloatMode();
  ~FloatMode();
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;
  static void SetForThread();

 private:
  uint64_t saved_;
};

}  // namespace strata
