#include <limits>
#include <stdexcept>
#include <string>

#include "plan/builders.h"
#include "plan/describe.h"

namespace strata {
namespace {

// A one-shot psum reads n operands a rank, a two-phase one two.  Up to this
// many extra bytes cost less than the second rendezvous.
constexpr int64_t kOneShotExtraBytes = 256 * 1024;

[[noreturn]] void Refuse(const Problem& problem, const std::string& why) {
  throw std::invalid_argument(std::string(NameOf(problem.op)) + ": " + why);
}

bool IsReduction(OpKind op) {
  return op == OpKind::kPsum || op == OpKind::kPsumScatter;
}

void CheckLeaf(const Problem& problem, size_t index) {
  const Leaf& leaf = problem.leaves[index];
  std::string name = "leaf " + std::to_string(index);
  if (leaf.count < 0 || leaf.element_bytes <= 0) {
    Refuse(problem, name + " has " + std::to_string(leaf.count) +
                        " elements of " + std::to_string(leaf.element_bytes) +
                        " bytes; counts start at 0 and sizes at 1");
  }
  // Room for an all_gather's result and for the padding between leaves.
  int64_t bytes = 0;
  if (__builtin_mul_overflow(leaf.count, leaf.element_bytes, &bytes) ||
      bytes > std::numeric_limits<int64_t>::max() / 4 / problem.ranks) {
    Refuse(problem, name + " is too large: its bytes times " +
                        std::to_string(problem.ranks) +
                        " ranks do not fit 64 bits");
  }
  if (!IsReduction(problem.op)) return;
  auto size = static_cast<int64_t>(SizeOf(leaf.dtype));
  std::string type =
      "type code " + std::to_string(static_cast<int>(leaf.dtype));
  if (size == 0) {
    Refuse(problem, name + " has " + type +
                        ", for which no reduction is defined; convert it to "
                        "a wider type first");
  }
  if (size != leaf.element_bytes) {
    Refuse(problem, name + " says " + std::to_string(leaf.element_bytes) +
                        " bytes an element, but " + type + " has " +
                        std::to_string(size));
  }
  if (problem.op == OpKind::kPsumScatter && leaf.count % problem.ranks != 0) {
    Refuse(problem, name + " has " + std::to_string(leaf.count) +
                        " elements, which " + std::to_string(problem.ranks) +
                        " ranks cannot share evenly; pad the scattered "
                        "dimension to a multiple of the group's size");
  }
}

void CheckPermutation(const Problem& problem) {
  std::vector<bool> sends(problem.ranks), receives(problem.ranks);
  for (auto [source, destination] : problem.permutation) {
    std::string pair = "pair (" + std::to_string(source) + ", " +
                       std::to_string(destination) + ")";
    if (source < 0 || source >= problem.ranks || destination < 0 ||
        destination >= problem.ranks) {
      Refuse(problem, pair +
                          " is outside the group, whose positions are 0 to " +
                          std::to_string(problem.ranks - 1));
    }
    if (sends[source]) {
      Refuse(problem, pair + " makes position " + std::to_string(source) +
                          " send twice; sources must be unique");
    }
    if (receives[destination]) {
      Refuse(problem, pair + " makes position " + std::to_string(destination) +
                          " receive twice; destinations must be unique");
    }
    sends[source] = receives[destination] = true;
  }
}

void Check(const Problem& problem) {
  constexpr int kMaxIndex = std::numeric_limits<uint16_t>::max();
  if (problem.ranks < 1 || problem.ranks > kMaxIndex) {
    Refuse(problem, "a group of " + std::to_string(problem.ranks) +
                        " ranks; it must have 1 to " +
                        std::to_string(kMaxIndex));
  }
  if (problem.me < 0 || problem.me >= problem.ranks) {
    Refuse(problem, "position " + std::to_string(problem.me) +
                        " is not in a group of " +
                        std::to_string(problem.ranks) + " ranks");
  }
  if (problem.leaves.size() > static_cast<size_t>(kMaxIndex)) {
    Refuse(problem, std::to_string(problem.leaves.size()) +
                        " arrays in one call; at most " +
                        std::to_string(kMaxIndex) + " are possible");
  }
  if (problem.chunk_bytes < 0) {
    Refuse(problem, "chunk size " + std::to_string(problem.chunk_bytes) +
                        "; it must be 0 (do not cut) or positive");
  }
  for (size_t i = 0; i < problem.leaves.size(); ++i) CheckLeaf(problem, i);
  if (problem.op == OpKind::kPpermute) CheckPermutation(problem);
  if (problem.op == OpKind::kBarrier && !problem.leaves.empty()) {
    Refuse(problem, "it carries no data, but has " +
                        std::to_string(problem.leaves.size()) + " arrays");
  }
}

Plan Dispatch(const Problem& problem) {
  switch (problem.op) {
    case OpKind::kPsum:
      return BuildPsum(problem);
    case OpKind::kPsumScatter:
      return BuildPsumScatter(problem);
    case OpKind::kAllGather:
      return BuildAllGather(problem);
    case OpKind::kPpermute:
      return BuildPpermute(problem);
    case OpKind::kBarrier:
      return BuildBarrier(problem);
  }
  Refuse(problem, "code " + std::to_string(static_cast<int>(problem.op)) +
                      " names no operator");
}

// One rank, or not a byte to move: nobody to wait for.  (A ppermute of one
// rank may still have to write zeros, so it is not one of these.)
bool IsLocal(const Problem& problem, const Packing& packing) {
  if (problem.op == OpKind::kBarrier) return false;
  if (packing.total() == 0) return true;
  return problem.ranks == 1 && problem.op != OpKind::kPpermute;
}

Plan BuildLocal(const Problem& problem, const Packing& packing) {
  Plan plan;
  plan.algorithm = packing.total() == 0 ? "empty" : "local";
  if (packing.total() == 0) return plan;
  Stage& stage = plan.stages.emplace_back();
  packing.ForEach(packing.all(), [&](const Piece& piece) {
    AddLoad(stage, problem.me, InputAt(problem.me, piece),
            OutputAt(problem.me, piece), piece.bytes);
  });
  return plan;
}

}  // namespace

Algorithm SelectAlgorithm(const Problem& problem) {
  if (problem.op != OpKind::kPsum) return Algorithm::kOneShot;
  if (problem.algorithm != Algorithm::kAuto) return problem.algorithm;
  // Direct, both meet twice (one-shot at its exit), and two-phase moves less.
  if (problem.transport == Transport::kDirect) return Algorithm::kTwoPhase;
  // Two ranks read the same bytes either way, so one rendezvous less wins.
  int64_t bytes = 0;
  for (const Leaf& leaf : problem.leaves) {
    bytes += leaf.count * leaf.element_bytes;
  }
  int64_t limit = problem.ranks <= 2 ? std::numeric_limits<int64_t>::max()
                                     : kOneShotExtraBytes / (problem.ranks - 2);
  return bytes <= limit ? Algorithm::kOneShot : Algorithm::kTwoPhase;
}

std::vector<uint16_t> Others(const Problem& problem) {
  std::vector<uint16_t> others;
  others.reserve(problem.ranks - 1);
  for (int r = 0; r < problem.ranks; ++r) {
    if (r != problem.me) others.push_back(static_cast<uint16_t>(r));
  }
  return others;
}

void AddLoad(Stage& stage, int peer, Addr src, Addr dst, int64_t bytes) {
  if (!stage.slices.empty()) {
    Slice& last = stage.slices.back();
    auto continues = [&](const Addr& before, const Addr& after) {
      int64_t step = before.space == Space::kZero ? 0 : last.bytes;
      return before.space == after.space && before.rank == after.rank &&
             before.buffer == after.buffer &&
             before.offset + step == after.offset;
    };
    if (last.peer == peer && continues(last.src, src) &&
        continues(last.dst, dst)) {
      last.bytes += bytes;
      return;
    }
  }
  stage.slices.push_back({.peer = static_cast<uint16_t>(peer),
                          .src = src,
                          .dst = dst,
                          .bytes = bytes,
                          .action = Action::kLoad});
}

std::vector<int64_t> WindowLayout(const std::vector<Leaf>& leaves) {
  Packing packing = PackingOf(leaves);
  std::vector<int64_t> layout;
  layout.reserve(leaves.size() + 1);
  for (size_t i = 0; i < leaves.size(); ++i) layout.push_back(packing.start(i));
  layout.push_back(packing.total());
  return layout;
}

Plan BuildPlan(const Problem& problem) {
  Check(problem);
  Packing packing = PackingOf(problem.leaves);
  return IsLocal(problem, packing) ? BuildLocal(problem, packing)
                                   : Dispatch(problem);
}

}  // namespace strata
