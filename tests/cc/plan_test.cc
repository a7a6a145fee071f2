// Plans executed: all ranks in one process over plain byte arrays, operation
// by operation in a random interleaving that the needs rule allows, against
// the definition of the operator.  (tests/plan_verifier.py proves what a run
// can only sample.)
#include "plan/plan.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "engine/kernels.h"
#include "plan/describe.h"

namespace strata {
namespace {

using Bytes = std::vector<char>;

std::mt19937_64& Random() {
  static std::mt19937_64 generator(7);
  return generator;
}

int64_t Below(int64_t limit) {
  return static_cast<int64_t>(Random()() % static_cast<uint64_t>(limit));
}

Bytes Noise(int64_t bytes) {
  Bytes noise(bytes);
  for (char& c : noise) c = static_cast<char>(Random()());
  return noise;
}

int64_t OutputBytes(const Problem& p, const Leaf& leaf) {
  int64_t bytes = leaf.count * leaf.element_bytes;
  if (p.op == OpKind::kAllGather) return bytes * p.ranks;
  if (p.op == OpKind::kPsumScatter) return bytes / p.ranks;
  return bytes;
}

// One rank's memory and position in its plan.
struct Rank {
  Plan plan;
  std::vector<Bytes> input;
  std::vector<Bytes> output;
  Bytes window;
  size_t progress = 0;
  std::vector<std::function<void()>> pending;  // of the stage being executed
};

class Execution {
 public:
  // in_place: a rank's output is its input, as when XLA donates the operand.
  Execution(const Problem& problem,
            const std::vector<std::vector<Bytes>>& inputs, bool in_place)
      : in_place_(in_place), ranks_(problem.ranks) {
    for (int r = 0; r < problem.ranks; ++r) {
      Problem mine = problem;
      mine.me = r;
      ranks_[r].plan = BuildPlan(mine);
      ranks_[r].input = inputs[r];
      for (const Leaf& leaf : problem.leaves) {
        ranks_[r].output.push_back(Noise(OutputBytes(problem, leaf)));
      }
      ranks_[r].window = Noise(ranks_[r].plan.window_bytes);
    }
  }

  void Run() {
    for (;;) {
      std::vector<int> able;
      bool all_done = true;
      for (size_t r = 0; r < ranks_.size(); ++r) {
        all_done = all_done && Done(ranks_[r]);
        if (!Done(ranks_[r]) && MayRun(ranks_[r])) {
          able.push_back(static_cast<int>(r));
        }
      }
      if (all_done) return;
      CHECK(!able.empty());  // else the plans deadlock
      Step(ranks_[able[Below(static_cast<int64_t>(able.size()))]]);
    }
  }

  const std::vector<Bytes>& output(int r) const {
    return in_place_ ? ranks_[r].input : ranks_[r].output;
  }

 private:
  static bool Done(const Rank& rank) {
    return rank.progress == rank.plan.stages.size();
  }

  bool MayRun(const Rank& rank) const {
    if (!rank.pending.empty()) return true;
    for (uint16_t p : rank.plan.stages[rank.progress].needs) {
      if (ranks_[p].progress < rank.progress) return false;
    }
    return true;
  }

  // One slice or reduce, in any order within its stage.
  void Step(Rank& rank) {
    const Stage& stage = rank.plan.stages[rank.progress];
    if (rank.pending.empty()) {
      for (const Slice& slice : stage.slices) {
        rank.pending.push_back([this, &slice] { Execute(slice); });
      }
      for (const Reduce& reduce : stage.reduces) {
        rank.pending.push_back([this, &reduce] { Execute(reduce); });
      }
      std::shuffle(rank.pending.begin(), rank.pending.end(), Random());
    }
    if (!rank.pending.empty()) {
      rank.pending.back()();
      rank.pending.pop_back();
    }
    if (rank.pending.empty()) ++rank.progress;
  }

  char* Resolve(const Addr& addr, int64_t bytes) {
    Rank& rank = ranks_.at(addr.rank);
    Bytes* buffer = nullptr;
    if (addr.space == Space::kInput) buffer = &rank.input.at(addr.buffer);
    if (addr.space == Space::kOutput) {
      buffer = in_place_ ? &rank.input.at(addr.buffer)
                         : &rank.output.at(addr.buffer);
    }
    if (addr.space == Space::kWindow) buffer = &rank.window;
    CHECK(buffer != nullptr);
    CHECK(addr.offset >= 0 && bytes > 0);
    CHECK(addr.offset + bytes <= static_cast<int64_t>(buffer->size()));
    return buffer->data() + addr.offset;
  }

  void Execute(const Slice& slice) {
    char* dst = Resolve(slice.dst, slice.bytes);
    if (slice.src.space == Space::kZero) {
      ZeroBytes(dst, slice.bytes);
    } else {
      CopyBytes(dst, Resolve(slice.src, slice.bytes), slice.bytes);
    }
  }

  void Execute(const Reduce& reduce) {
    int64_t bytes = reduce.count * static_cast<int64_t>(SizeOf(reduce.dtype));
    std::vector<const void*> srcs;
    for (const Addr& src : reduce.srcs) srcs.push_back(Resolve(src, bytes));
    std::vector<void*> dsts = {Resolve(reduce.dst, bytes)};
    for (const Addr& copy : reduce.copies) dsts.push_back(Resolve(copy, bytes));
    ReduceToAll(srcs.data(), static_cast<int>(srcs.size()), dsts.data(),
                static_cast<int>(dsts.size()), reduce.count, reduce.dtype,
                reduce.op);
  }

  bool in_place_;
  std::vector<Rank> ranks_;
};

// What rank `me` must get for one leaf, from the operator's definition.
Bytes Expected(const Problem& p, const std::vector<std::vector<Bytes>>& inputs,
               size_t leaf, int me) {
  const Leaf& shape = p.leaves[leaf];
  Bytes want(OutputBytes(p, shape));
  const auto size = static_cast<int64_t>(want.size());
  if (size == 0) return want;
  switch (p.op) {
    case OpKind::kPsum:
    case OpKind::kPsumScatter: {
      int64_t offset = p.op == OpKind::kPsum ? 0 : me * size;
      std::vector<const void*> srcs;
      for (int r = 0; r < p.ranks; ++r) {
        srcs.push_back(inputs[r][leaf].data() + offset);
      }
      ReduceN(srcs.data(), p.ranks, want.data(), size / shape.element_bytes,
              shape.dtype, p.reduce);
      break;
    }
    case OpKind::kAllGather:
      for (int r = 0; r < p.ranks; ++r) {
        const Bytes& block = inputs[r][leaf];
        std::copy(block.begin(), block.end(), want.begin() + r * block.size());
      }
      break;
    case OpKind::kPpermute:
      for (auto [from, to] : p.permutation) {
        if (to == me) want = inputs[from][leaf];
      }
      break;
    case OpKind::kBarrier:
      break;
  }
  return want;
}

// Floats whose sums are exact in no order: bits tell the order of summation.
Bytes Operand(const Leaf& leaf) {
  Bytes data = Noise(leaf.count * leaf.element_bytes);
  if (leaf.dtype == DType::kF32) {
    for (int64_t i = 0; i < leaf.count; ++i) {
      float x = static_cast<float>(Below(1 << 24)) / (1 << Below(24));
      std::memcpy(data.data() + 4 * i, &x, 4);
    }
  } else if (leaf.dtype == DType::kBF16) {  // no NaN: its payload may differ
    for (int64_t i = 0; i < leaf.count; ++i) data[2 * i + 1] &= 0x3f;
  }
  return data;
}

void CheckProblem(const Problem& problem, bool in_place = false) {
  std::vector<std::vector<Bytes>> inputs(problem.ranks);
  for (auto& input : inputs) {
    for (const Leaf& leaf : problem.leaves) input.push_back(Operand(leaf));
  }
  Execution execution(problem, inputs, in_place);
  execution.Run();
  for (int r = 0; r < problem.ranks; ++r) {
    for (size_t leaf = 0; leaf < problem.leaves.size(); ++leaf) {
      if (execution.output(r)[leaf] == Expected(problem, inputs, leaf, r)) {
        continue;
      }
      Problem mine = problem;
      mine.me = r;
      check::Fail(__FILE__, __LINE__,
                  std::string(NameOf(problem.op)) + " of " +
                      std::to_string(problem.ranks) + " ranks, chunk " +
                      std::to_string(problem.chunk_bytes) + ", rank " +
                      std::to_string(r) + ", leaf " + std::to_string(leaf) +
                      ":\n" + Describe(BuildPlan(mine)));
    }
  }
}

Leaf F32(int64_t count) { return {count, DType::kF32, 4}; }

std::vector<Leaf> RandomLeaves(int multiple) {
  constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kS8,
                              DType::kU16, DType::kS64};
  std::vector<Leaf> leaves(1 + Below(4));
  for (Leaf& leaf : leaves) {
    leaf.dtype = kTypes[Below(5)];
    leaf.element_bytes = static_cast<int64_t>(SizeOf(leaf.dtype));
    int64_t counts[] = {0, 1, 3, 17, 64, 257, Below(3000)};
    leaf.count = counts[Below(7)] * multiple;
  }
  return leaves;
}

std::vector<std::pair<int, int>> RandomPermutation(int n) {
  std::vector<int> from(n), to(n);
  std::iota(from.begin(), from.end(), 0);
  std::iota(to.begin(), to.end(), 0);
  std::shuffle(from.begin(), from.end(), Random());
  std::shuffle(to.begin(), to.end(), Random());
  std::vector<std::pair<int, int>> pairs(Below(n + 1));
  for (size_t i = 0; i < pairs.size(); ++i) pairs[i] = {from[i], to[i]};
  return pairs;
}

Problem RandomProblem(OpKind op, int n) {
  Problem p;
  p.op = op;
  p.ranks = n;
  p.leaves = RandomLeaves(op == OpKind::kPsumScatter ? n : 1);
  p.reduce = static_cast<ReduceOp>(Below(3));
  p.permutation = RandomPermutation(n);
  p.transport = static_cast<Transport>(Below(2));
  int64_t chunks[] = {0, 1, 64, 100, 1000, 4096, 1 << 20};
  p.chunk_bytes = chunks[Below(7)];
  p.algorithm = static_cast<Algorithm>(Below(3));
  return p;
}

void CheckRandom(OpKind op, int rounds) {
  for (int n = 1; n <= 9; ++n) {
    for (int i = 0; i < rounds; ++i) CheckProblem(RandomProblem(op, n));
  }
}

TEST(Psum) { CheckRandom(OpKind::kPsum, 60); }
TEST(PsumScatter) { CheckRandom(OpKind::kPsumScatter, 40); }
TEST(AllGather) { CheckRandom(OpKind::kAllGather, 40); }
TEST(Ppermute) { CheckRandom(OpKind::kPpermute, 60); }
TEST(Barrier) {
  for (int n = 1; n <= 9; ++n) {
    Problem p{
        .op = OpKind::kBarrier, .leaves = {}, .ranks = n, .permutation = {}};
    CheckProblem(p);
    CHECK_EQ(BuildPlan(p).sources.size(), n - 1u);
  }
}

// XLA may give an operand's memory to the result.  These plans allow it.
TEST(InPlace) {
  for (int n = 1; n <= 7; ++n) {
    for (int i = 0; i < 40; ++i) {
      Problem p = RandomProblem(i % 2 ? OpKind::kPsum : OpKind::kPpermute, n);
      p.transport = Transport::kStaged;
      CheckProblem(p, true);
      p = RandomProblem(OpKind::kPsum, n);
      p.transport = Transport::kDirect;
      p.algorithm = Algorithm::kTwoPhase;
      CheckProblem(p, true);
    }
  }
}

TEST(OnePieceIsTwoStages) {
  Problem p{.leaves = {F32(100)}, .ranks = 3, .me = 1, .permutation = {}};
  p.algorithm = Algorithm::kOneShot;
  for (int64_t chunk : {0, 400, 401}) {
    p.chunk_bytes = chunk;
    Plan plan = BuildPlan(p);
    CHECK_EQ(plan.algorithm, "staged_one_shot");
    CHECK_EQ(plan.stages.size(), 2u);
    CHECK(plan.stages[0].needs.empty());
    CHECK(plan.stages[1].needs == (std::vector<uint16_t>{0, 2}));
    CHECK_EQ(plan.window_bytes, 400);
  }
  p.chunk_bytes = 399;
  CHECK_EQ(BuildPlan(p).stages.size(), 2u);  // 399 is rounded up to 448
  p.chunk_bytes = 200;
  CHECK_EQ(BuildPlan(p).stages.size(), 3u);  // cuts at 256
}

TEST(AutoAlgorithm) {
  Problem p{.leaves = {F32(1 << 10)}, .ranks = 4, .permutation = {}};
  CHECK_EQ(BuildPlan(p).algorithm, "staged_one_shot");
  p.leaves = {F32(1 << 20)};
  CHECK_EQ(BuildPlan(p).algorithm, "staged_two_phase");
  p.ranks = 2;
  CHECK_EQ(BuildPlan(p).algorithm, "staged_one_shot");
  p.ranks = 64;
  p.transport = Transport::kDirect;
  CHECK_EQ(BuildPlan(p).algorithm, "direct_two_phase");
  p.leaves = {F32(1)};
  CHECK_EQ(BuildPlan(p).algorithm, "direct_two_phase");
}

TEST(NothingToMoveIsNothingToDo) {
  for (OpKind op : {OpKind::kPsum, OpKind::kPsumScatter, OpKind::kAllGather,
                    OpKind::kPpermute}) {
    Problem p{.op = op,
              .leaves = {F32(0), F32(0)},
              .ranks = 3,
              .permutation = {{0, 1}}};
    Plan plan = BuildPlan(p);
    CHECK(plan.stages.empty() && plan.sources.empty() && plan.readers.empty());
  }
}

TEST(PpermuteTouchesOnlyItsPartners) {
  Problem p{.op = OpKind::kPpermute,
            .leaves = {F32(8)},
            .ranks = 4,
            .permutation = {{0, 1}, {2, 2}}};
  Plan sender = BuildPlan(p);
  CHECK(sender.sources.empty());
  CHECK(sender.readers == std::vector<uint16_t>{1});
  p.me = 1;
  Plan receiver = BuildPlan(p);
  CHECK(receiver.sources == std::vector<uint16_t>{0});
  CHECK(receiver.readers.empty());
  CHECK_EQ(receiver.window_bytes, 0);
  for (int me : {2, 3}) {  // a self-send, and a rank that is not listed
    p.me = me;
    Plan plan = BuildPlan(p);
    CHECK_EQ(plan.algorithm, "local");
    CHECK_EQ(plan.stages.size(), 1u);
    CHECK(plan.stages[0].slices[0].src.space ==
          (me == 2 ? Space::kInput : Space::kZero));
  }
}

TEST(WindowLayoutAligns) {
  std::vector<Leaf> leaves = {{3, DType::kS8, 1},
                              {0, DType::kF32, 4},
                              {5, DType::kF32, 4},
                              {1, DType::kS8, 1}};
  CHECK(WindowLayout(leaves) == (std::vector<int64_t>{0, 16, 16, 48, 49}));
  CHECK(WindowLayout({}) == std::vector<int64_t>{0});
}

TEST(RefusesWhatCannotBe) {
  auto refuses = [](Problem p, const char* part) {
    CHECK_THROWS(BuildPlan(p), std::invalid_argument, part);
  };
  Problem good{.leaves = {F32(8)}, .ranks = 3, .permutation = {}};
  Problem p = good;
  p.ranks = 0;
  refuses(p, "a group of 0 ranks");
  p = good;
  p.me = 3;
  refuses(p, "position 3 is not in a group of 3 ranks");
  p = good;
  p.leaves[0].count = -1;
  refuses(p, "-1 elements");
  p.leaves[0].count = int64_t{1} << 62;
  refuses(p, "too large");
  p = good;
  p.leaves[0].dtype = static_cast<DType>(19);
  p.leaves[0].element_bytes = 1;
  refuses(p, "no reduction is defined");
  p.op = OpKind::kAllGather;
  BuildPlan(p);  // moving it is fine
  p = good;
  p.leaves[0].element_bytes = 8;
  refuses(p, "8 bytes an element");
  p = good;
  p.op = OpKind::kPsumScatter;
  refuses(p, "8 elements, which 3 ranks cannot share evenly");
  p = good;
  p.chunk_bytes = -1;
  refuses(p, "chunk size -1");
  p = good;
  p.op = OpKind::kBarrier;
  refuses(p, "carries no data");
  p = good;
  p.op = OpKind::kPpermute;
  p.permutation = {{0, 1}, {0, 2}};
  refuses(p, "position 0 send twice");
  p.permutation = {{0, 1}, {2, 1}};
  refuses(p, "position 1 receive twice");
  p.permutation = {{0, 3}};
  refuses(p, "outside the group");
}

TEST(DescribeShowsEverything) {
  Problem p{.leaves = {F32(8)}, .ranks = 2, .permutation = {}};
  CHECK_EQ(Describe(BuildPlan(p)),
           "staged_one_shot: 2 stages, window 32 B, reads {1}, read by {1}\n"
           "stage 0\n"
           "  copy   r0.input[0]+0 -> r0.window+0, 32 B\n"
           "stage 1, after stage 0 of {1}\n"
           "  sum    8 f32: r0.input[0]+0, r1.window+0 -> r0.output[0]+0\n");
  p.op = OpKind::kPpermute;
  p.permutation = {{0, 1}};
  p.transport = Transport::kDirect;
  CHECK_EQ(Describe(BuildPlan(p)),
           "direct_pull: 1 stage, window 0 B, reads {}, read by {1}\n"
           "stage 0\n"
           "  zero   zeros -> r0.output[0]+0, 32 B\n");
}

}  // namespace
}  // namespace strata
