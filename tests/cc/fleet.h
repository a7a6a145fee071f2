// Owns: what the engine's tests run: the ranks of one process over a real
// arena, calls, and a call's operands and right results.  Invariant: an operand
// is a function of (salt, rank), so a result can be checked by whoever has it,
// and results start as noise, so a byte that nobody wrote is noticed.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "engine/op.h"
#include "harness.h"

namespace fleet {

using strata::DType;
using strata::Failure;
using strata::Instance;
using strata::Outcome;
using strata::Spec;

inline constexpr uint64_t kForever = ~uint64_t{0};
inline constexpr uint64_t kMs = 1'000'000;

// Not the rank itself, so that a confusion of the two is noticed.
inline int64_t DeviceOf(int rank) { return 10 + 7 * rank; }

inline std::vector<int> AllOf(int n) {
  std::vector<int> ranks;
  for (int r = 0; r < n; ++r) ranks.push_back(r);
  return ranks;
}

inline Spec Call(strata::OpKind op, const std::vector<int>& group,
                 const std::vector<strata::Leaf>& leaves, int64_t channel = 1) {
  Spec s;
  s.op = op;
  s.leaves = leaves;
  if (!leaves.empty()) s.dims = {leaves[0].count};
  s.groups.emplace_back();
  for (int r : group) s.groups[0].push_back(DeviceOf(r));
  s.channel = channel;
  return s;
}

inline strata::Leaf LeafOf(int64_t count, DType dtype) {
  return {count, dtype, static_cast<int64_t>(strata::SizeOf(dtype))};
}
inline strata::Leaf Floats(int64_t count) { return LeafOf(count, DType::kF32); }
inline strata::Leaf Ints(int64_t count) { return LeafOf(count, DType::kS32); }

inline Spec Psum(const std::vector<int>& group, int64_t count,
                 int64_t channel = 1) {
  return Call(strata::OpKind::kPsum, group, {Floats(count)}, channel);
}
inline Spec Barrier(const std::vector<int>& group, int64_t channel = 1) {
  return Call(strata::OpKind::kBarrier, group, {}, channel);
}
inline Spec Ppermute(const std::vector<int>& group, int64_t count,
                     std::vector<std::pair<int, int>> permutation,
                     int64_t channel = 1) {
  Spec s = Call(strata::OpKind::kPpermute, group, {Ints(count)}, channel);
  s.permutation = std::move(permutation);
  return s;
}

// One of each, from bytes that ride in the slot to several chunks.
inline std::vector<Spec> EveryCall(const std::vector<int>& group) {
  const int n = static_cast<int>(group.size());
  std::vector<std::pair<int, int>> ring, one = {{0, n - 1}}, self = {{0, 0}};
  for (int p = 0; p < n; ++p) ring.emplace_back(p, (p + 1) % n);
  std::vector<Spec> calls = {
      Psum(group, 2),
      Call(strata::OpKind::kPsum, group, {Ints(150)}),
      Psum(group, 2501),
      Call(strata::OpKind::kPsum, group,
           {Ints(7), Floats(300), Ints(0), Ints(1000), Floats(1)}),
      Call(strata::OpKind::kAllGather, group, {Ints(3)}),
      Call(strata::OpKind::kAllGather, group, {Floats(900), Ints(5)}),
      Call(strata::OpKind::kPsumScatter, group, {Floats(2 * n)}),
      Call(strata::OpKind::kPsumScatter, group, {Floats(600 * n), Ints(n)}),
      Barrier(group),
      Ppermute(group, 5, ring),
      Ppermute(group, 2000, ring),
      Ppermute(group, 1500, one),
      Ppermute(group, 10, self),
      Call(strata::OpKind::kPsum, group, {Ints(0)}),
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i].channel = static_cast<int64_t>(i);
  }
  return calls;
}

struct Data {
  std::vector<std::vector<unsigned char>> in, out;
  std::vector<const void*> ins;
  std::vector<void*> outs;
};

inline uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t h = (a ^ (b + 0x9e3779b97f4a7c15u)) * 0xbf58476d1ce4e5b9u;
  h = (h ^ h >> 29) * 0x94d049bb133111ebu;
  return h ^ h >> 32;
}

// Element i of leaf l of the member at `position`.  Sums of these floats are
// inexact: their bits tell the order of the additions.
inline void ElementOf(DType dtype, uint64_t salt, int position, size_t leaf,
                      int64_t i, void* to) {
  const uint64_t h = Mix(Mix(salt, static_cast<uint64_t>(position) << 8 | leaf),
                         static_cast<uint64_t>(i));
  if (dtype == DType::kF32) {
    const float f =
        static_cast<float>(static_cast<int32_t>(h >> 40) - (1 << 23)) *
        0x1p-13f;
    std::memcpy(to, &f, sizeof(f));
  } else {
    std::memcpy(to, &h, strata::SizeOf(dtype));
  }
}

inline size_t OutputBytes(const Spec& s, const strata::Leaf& leaf) {
  const auto bytes = static_cast<size_t>(leaf.count * leaf.element_bytes);
  const size_t n = s.groups[0].size();
  if (s.op == strata::OpKind::kAllGather) return bytes * n;
  if (s.op == strata::OpKind::kPsumScatter) return bytes / n;
  return bytes;
}

inline std::vector<unsigned char> Operand(const Spec& s, uint64_t salt,
                                          int position, size_t leaf) {
  const strata::Leaf& shape = s.leaves[leaf];
  std::vector<unsigned char> bytes(
      static_cast<size_t>(shape.count * shape.element_bytes));
  for (int64_t i = 0; i < shape.count; ++i) {
    ElementOf(shape.dtype, salt, position, leaf, i,
              bytes.data() + i * shape.element_bytes);
  }
  return bytes;
}

inline Data DataOf(const Spec& s, uint64_t salt, int position) {
  Data d;
  for (size_t l = 0; l < s.leaves.size(); ++l) {
    d.in.push_back(Operand(s, salt, position, l));
    d.out.emplace_back(OutputBytes(s, s.leaves[l]), 0xa5);
  }
  for (size_t l = 0; l < s.leaves.size(); ++l) {
    d.ins.push_back(d.in[l].data());
    d.outs.push_back(d.out[l].data());
  }
  return d;
}

template <typename T>
void AddTo(std::vector<unsigned char>* sum,
           const std::vector<unsigned char>& term) {
  for (size_t at = 0; at < sum->size(); at += sizeof(T)) {
    T a, b;
    std::memcpy(&a, sum->data() + at, sizeof(T));
    std::memcpy(&b, term.data() + at, sizeof(T));
    a = static_cast<T>(a + b);
    std::memcpy(sum->data() + at, &a, sizeof(T));
  }
}

// The definition of the operators, for one leaf of one member.
inline std::vector<unsigned char> Expected(const Spec& s, uint64_t salt,
                                           int position, size_t leaf) {
  const int n = static_cast<int>(s.groups[0].size());
  const size_t bytes = OutputBytes(s, s.leaves[leaf]);
  std::vector<unsigned char> want;
  switch (s.op) {
    case strata::OpKind::kPsum:
    case strata::OpKind::kPsumScatter:
      want = Operand(s, salt, 0, leaf);
      for (int p = 1; p < n; ++p) {
        const auto term = Operand(s, salt, p, leaf);
        if (s.leaves[leaf].dtype == DType::kF32) {
          AddTo<float>(&want, term);
        } else {
          CHECK(s.leaves[leaf].dtype == DType::kS32);
          AddTo<uint32_t>(&want, term);
        }
      }
      if (s.op == strata::OpKind::kPsumScatter) {
        const auto at = static_cast<size_t>(position) * bytes;
        want.erase(want.begin(), want.begin() + static_cast<long>(at));
        want.resize(bytes);
      }
      return want;
    case strata::OpKind::kAllGather:
      for (int p = 0; p < n; ++p) {
        const auto block = Operand(s, salt, p, leaf);
        want.insert(want.end(), block.begin(), block.end());
      }
      return want;
    case strata::OpKind::kPpermute:
      for (const auto& [from, to] : s.permutation) {
        if (to == position) return Operand(s, salt, from, leaf);
      }
      return std::vector<unsigned char>(bytes, 0);
    case strata::OpKind::kBarrier:
      break;
  }
  return want;
}

inline void CheckResult(const Spec& s, uint64_t salt, int position,
                        const Data& d) {
  for (size_t l = 0; l < s.leaves.size(); ++l) {
    const std::string which =
        std::string(OpName(s.op, s.reduce)) + ", leaf " + std::to_string(l) +
        " of " + std::to_string(s.leaves[l].count) + " elements at position " +
        std::to_string(position);
    CHECK_MSG(d.out[l] == Expected(s, salt, position, l), which);
    CHECK_MSG(d.in[l] == Operand(s, salt, position, l), which + ": operand");
  }
}

// One process of a job and its ranks.
class Node {
 public:
  // All processes of a job on one host, in order of ranks.
  Node(std::unique_ptr<strata::Arena> arena, int devices,
       const strata::Settings& settings)
      : devices_(devices),
        world_(std::make_unique<strata::World>(std::move(arena), settings)) {}
  // A job of one process.
  Node(int devices, const strata::Settings& settings)
      : Node(harness::PrivateArena(), devices, settings) {
    Start();
  }
  ~Node() { instances_.clear(); }
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  void Start() {
    std::vector<std::pair<int, int64_t>> ranks;
    for (int p = 0; p < world_->arena().processes(); ++p) {
      for (int d = 0; d < devices_; ++d) {
        ranks.emplace_back(p, DeviceOf(p * devices_ + d));
      }
    }
    world_->Start(ranks, false);
    comms_ = std::make_unique<strata::CommRegistry>(world_.get());
    engine_ = std::make_unique<strata::Engine>(world_.get());
    NextModule();
  }

  strata::World& world() { return *world_; }
  int ranks() const { return world_->size(); }
  // What is compiled from now on belongs to another executable.
  void NextModule() { module_ = std::make_shared<strata::Module>(); }
  Instance* Compile(const Spec& s) {
    instances_.push_back(
        std::make_unique<Instance>(world_.get(), comms_.get(), s, module_));
    return instances_.back().get();
  }
  strata::Binding* Of(Instance* i, int rank) { return i->Of(DeviceOf(rank)); }

  // Starts a call and does not wait longer than the in-place budget.
  Outcome Begin(Instance* i, int rank, int64_t run_id, const Data& d,
                std::unique_ptr<strata::Op>* pending, Failure* failure) {
    return engine_->Start(Of(i, rank), run_id, d.ins.data(), d.outs.data(),
                          pending, failure);
  }
  // Runs a call to its end on this thread.
  Failure Run(Instance* i, int rank, int64_t run_id, const Data& d) {
    std::unique_ptr<strata::Op> pending;
    Failure failure;
    Outcome o = Begin(i, rank, run_id, d, &pending, &failure);
    if (o == Outcome::kPending) {
      o = strata::Engine::Continue(pending.get(), kForever, &failure);
    }
    CHECK(o == (failure ? Outcome::kFailed : Outcome::kDone));
    return failure;
  }
  // As Run, with operands and a check of the result.
  Failure RunChecked(Instance* i, int rank, int64_t run_id, uint64_t salt) {
    const int position = Of(i, rank)->comm->me();
    const Data d = DataOf(i->spec(), salt, position);
    Failure failure = Run(i, rank, run_id, d);
    if (!failure) CheckResult(i->spec(), salt, position, d);
    return failure;
  }

 private:
  int devices_;
  std::unique_ptr<strata::World> world_;
  std::unique_ptr<strata::CommRegistry> comms_;
  std::unique_ptr<strata::Engine> engine_;
  std::shared_ptr<strata::Module> module_;
  std::vector<std::unique_ptr<Instance>> instances_;
};

// A call that a test takes forward step by step.
class Stepped {
 public:
  Stepped(Node* node, Instance* i, int rank, int64_t run_id, uint64_t salt)
      : instance_(i),
        salt_(salt),
        position_(node->Of(i, rank)->comm->me()),
        data_(DataOf(i->spec(), salt, position_)) {
    outcome_ = node->Begin(i, rank, run_id, data_, &op_, &failure_);
    Note();
  }
  Stepped(const Stepped&) = delete;
  Stepped& operator=(const Stepped&) = delete;

  // Takes it as far as it can go without waiting.
  Outcome Step(uint64_t budget_ns = 0) {
    if (outcome_ == Outcome::kPending) {
      outcome_ = strata::Engine::Continue(op_.get(), budget_ns, &failure_);
      Note();
    }
    return outcome_;
  }
  bool pending() const { return outcome_ == Outcome::kPending; }
  bool done() const { return outcome_ == Outcome::kDone; }
  bool failed() const { return outcome_ == Outcome::kFailed; }
  const Failure& failure() const { return failure_; }
  strata::Op* op() { return op_.get(); }

 private:
  void Note() {
    if (done()) CheckResult(instance_->spec(), salt_, position_, data_);
    if (!pending()) op_.reset();
  }

  Instance* instance_;
  uint64_t salt_;
  int position_;
  Data data_;
  std::unique_ptr<strata::Op> op_;
  Outcome outcome_ = Outcome::kPending;
  Failure failure_;
};

inline std::string Text(const Failure& f) {
  return std::string(strata::NameOf(f.kind)) + ": " + f.message;
}

// The failure is of that kind and its message contains every part.
inline void CheckFailure(const Failure& f, strata::ErrorKind kind,
                         std::initializer_list<const char*> parts = {}) {
  CHECK_MSG(f.kind == kind, f ? Text(f) : "it succeeded");
  for (const char* part : parts) {
    CHECK_MSG(f.message.find(part) != std::string::npos,
              Text(f) + " does not say " + part);
  }
}
inline void CheckFine(const Failure& f) { CHECK_MSG(!f, Text(f)); }

}  // namespace fleet
