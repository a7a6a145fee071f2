// Owns: what is known of a collective at compile time.  An Instance is one
// custom call of one compiled module; a Binding is that instance on one local
// rank, with its communicator and its plan.  Invariant: everything the steady
// path needs is decided here; Execute only reads it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "fabric/comm.h"
#include "plan/plan.h"

namespace strata {

// The attributes of the custom call, decoded.
struct Spec {
  OpKind op = OpKind::kPsum;
  ReduceOp reduce = ReduceOp::kSum;
  std::vector<Leaf> leaves;
  std::vector<int64_t> dims;                 // of the first leaf, for messages
  std::vector<std::vector<int64_t>> groups;  // device ids, listed order
  std::vector<std::pair<int, int>> permutation;
  int64_t channel = 0;  // ordinal of the call among ours in the lowered module
};

uint64_t SiteOf(const Spec& spec);
const char* OpName(OpKind op, ReduceOp reduce);
std::string DTypeName(DType t);

class Instance;

// The instances that XLA made while it compiled (or loaded) one executable, in
// its order.  Equal calls inside it are told apart by their index.
struct Module {
  std::mutex mutex;
  std::vector<Instance*> instances;
  // (rank, communicator) pairs of the module, for aborts.
  std::vector<Comm*> comms;
};

struct Binding {
  Instance* instance = nullptr;
  Comm* comm = nullptr;
  Plan plan;
  Transport transport = Transport::kStaged;
  int prologue = 0;  // stages without needs in front, run before the post
  bool all_read_me = false;  // readers are all others, or one, or nobody
  int one_reader = -1;
  uint64_t operand_bytes = 0;
  // Peers store parts of the results to this rank.
  bool stored_to = false;
  // Before it ends, an operation waits until all readers are through.
  bool awaits_readers = false;
  std::vector<uint64_t> in_bytes, out_bytes;  // by leaf
  uint64_t site = 0;
  Description description;

  // Advanced by one execution at a time (XLA orders an instance's executions
  // on a device); atomic because they may run on different threads.
  std::atomic<int64_t> run_id{INT64_MIN};
  std::atomic<uint64_t> iteration{0};
  std::atomic<uint64_t> count{0};
  struct Past {
    std::atomic<int> slot{-1};
    std::atomic<uint64_t> gen{0};
  } past[kWays];
};

class Instance {
 public:
  Instance(World* world, CommRegistry* comms, Spec spec,
           std::shared_ptr<Module> module);
  ~Instance();

  const Spec& spec() const { return spec_; }
  Module* module() const { return module_.get(); }
  // Binding of a device of this process; nullptr if it is in no group.
  Binding* Of(int64_t device_id) const {
    for (const auto& b : bindings_) {
      if (b->comm->self().device_id == device_id) return b.get();
    }
    return nullptr;
  }
  // clone index and count, packed as Key::instance wants them.
  uint64_t Clone();
  bool cloned() { return (Clone() >> 40 & 0xfff) > 1; }
  std::string Describe() const;

 private:
  void Bind(World* world, CommRegistry* comms,
            const std::vector<int64_t>& group);

  Spec spec_;
  uint64_t site_;
  std::shared_ptr<Module> module_;
  std::vector<std::unique_ptr<Binding>> bindings_;
  std::atomic<uint64_t> clone_{0};
};

// Every site this process ever compiled: a peer's post of a site that is not
// here can have no counterpart.
class Sites {
 public:
  static void Add(uint64_t site);
  static bool Known(uint64_t site);
};

inline constexpr char kDivergentPrograms[] =
    "ranks run with different XLA_FLAGS or jaxlib versions, and a program "
    "calls "
    "the same collective from copies of one function; they cannot be matched "
    "safely. Use the same flags on all ranks";

std::string DescribeCall(OpKind op, ReduceOp reduce, DType dtype,
                         const std::vector<int64_t>& dims, size_t leaves,
                         size_t group);

}  // namespace strata
