// The operators that move bytes and compute nothing.
#include <optional>

#include "plan/builders.h"

namespace strata {
namespace {

// Where rank r's operand can be read by rank `me`.
Addr OperandAt(const Problem& problem, int r, const Piece& piece) {
  return r == problem.me || problem.transport == Transport::kDirect
             ? InputAt(r, piece)
             : WindowAt(r, piece);
}

void Publish(const Problem& problem, const Packing& packing, Stage& stage,
             Range range) {
  packing.ForEach(range, [&](const Piece& piece) {
    AddLoad(stage, problem.me, InputAt(problem.me, piece),
            WindowAt(problem.me, piece), piece.bytes);
  });
}

}  // namespace

Plan BuildAllGather(const Problem& problem) {
  const int n = problem.ranks, me = problem.me;
  Packing packing = PackingOf(problem.leaves);
  // Own block first, then the peers starting behind ourselves, so that the
  // ranks do not all read one operand.
  auto gather = [&](Stage& stage, Range range) {
    for (int d = 0; d < n; ++d) {
      int r = (me + d) % n;
      packing.ForEach(range, [&](const Piece& piece) {
        Piece block = piece;
        block.offset += r * packing.bytes(piece.leaf);
        AddLoad(stage, r, OperandAt(problem, r, piece), OutputAt(me, block),
                piece.bytes);
      });
    }
  };

  Plan plan;
  plan.sources = plan.readers = Others(problem);
  if (problem.transport == Transport::kDirect) {
    plan.algorithm = "direct_full_mesh";
    Stage& stage = plan.stages.emplace_back();
    stage.needs = plan.readers;
    gather(stage, packing.all());
    return plan;
  }
  plan.algorithm = "staged_full_mesh";
  plan.window_bytes = packing.total();
  Chunks chunks(packing.total(), problem.chunk_bytes);
  plan.stages.resize(chunks.count() + 1);
  for (int64_t k = 0; k <= chunks.count(); ++k) {
    Stage& stage = plan.stages[k];
    if (k > 0) stage.needs = plan.readers;
    Publish(problem, packing, stage, chunks[k]);
    gather(stage, chunks[k - 1]);
  }
  return plan;
}

Plan BuildPpermute(const Problem& problem) {
  const int me = problem.me;
  Packing packing = PackingOf(problem.leaves);
  std::optional<int> source, destination;
  for (auto [from, to] : problem.permutation) {
    if (to == me) source = from;
    if (from == me) destination = to;
  }

  Plan plan;
  if (source && *source != me) {
    plan.sources = {static_cast<uint16_t>(*source)};
  }
  if (destination && *destination != me) {
    plan.readers = {static_cast<uint16_t>(*destination)};
  }
  auto receive = [&](Stage& stage, Range range) {
    stage.needs = plan.sources;
    packing.ForEach(range, [&](const Piece& piece) {
      AddLoad(stage, source.value_or(me),
              source ? OperandAt(problem, *source, piece) : Addr{Space::kZero},
              OutputAt(me, piece), piece.bytes);
    });
  };

  const bool staged = problem.transport == Transport::kStaged;
  const bool alone = plan.sources.empty() && plan.readers.empty();
  plan.algorithm = alone ? "local" : staged ? "staged_pull" : "direct_pull";
  if (!staged || alone) {
    receive(plan.stages.emplace_back(), packing.all());
    return plan;
  }
  // Chunk k is published in stage k and fetched in stage k + 1, so a rank that
  // is read by nobody still has a stage 0, if an empty one.
  Chunks chunks(packing.total(), problem.chunk_bytes);
  plan.stages.resize(chunks.count() + 1);
  if (!plan.readers.empty()) {
    plan.window_bytes = packing.total();
    for (int64_t k = 0; k < chunks.count(); ++k) {
      Publish(problem, packing, plan.stages[k], chunks[k]);
    }
  }
  if (plan.sources.empty()) {
    // Zeros or our own bytes wait for nobody; serve the reader first.
    receive(plan.stages.back(), packing.all());
  } else {
    for (int64_t k = 0; k < chunks.count(); ++k) {
      receive(plan.stages[k + 1], chunks[k]);
    }
  }
  return plan;
}

Plan BuildBarrier(const Problem& problem) {
  Plan plan;
  plan.algorithm = problem.ranks == 1 ? "empty" : "rendezvous";
  if (problem.ranks == 1) return plan;
  plan.sources = plan.readers = Others(problem);
  plan.stages.emplace_back().needs = plan.readers;
  return plan;
}

}  // namespace strata
