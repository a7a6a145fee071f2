// The reductions.  Every one of them sums an element in the order of the
// group, x_r0 + x_r1 + ..., in one Reduce: a partial sum never travels.
#include <string>

#include "plan/builders.h"

namespace strata {
namespace {

bool Staged(const Problem& problem) {
  return problem.transport == Transport::kStaged;
}

// Where rank r's operand can be read.  Our own is read where XLA left it, so
// bytes that nobody else reads need not be staged.
Addr Contribution(const Problem& problem, int r, const Piece& piece) {
  return r == problem.me || !Staged(problem) ? InputAt(r, piece)
                                             : WindowAt(r, piece);
}

void AddReduce(const Problem& problem, Stage& stage, const Piece& from,
               Addr dst) {
  const Leaf& leaf = problem.leaves[from.leaf];
  Reduce& reduce = stage.reduces.emplace_back();
  reduce.srcs.reserve(problem.ranks);
  for (int r = 0; r < problem.ranks; ++r) {
    reduce.srcs.push_back(Contribution(problem, r, from));
  }
  reduce.dst = dst;
  reduce.count = from.bytes / leaf.element_bytes;
  reduce.dtype = leaf.dtype;
  reduce.op = problem.reduce;
}

void Publish(const Problem& problem, const Packing& packing, Stage& stage,
             Range range) {
  packing.ForEach(range, [&](const Piece& piece) {
    AddLoad(stage, problem.me, InputAt(problem.me, piece),
            WindowAt(problem.me, piece), piece.bytes);
  });
}

void ReduceToOutput(const Problem& problem, const Packing& packing,
                    Stage& stage, Range range) {
  packing.ForEach(range, [&](const Piece& piece) {
    AddReduce(problem, stage, piece, OutputAt(problem.me, piece));
  });
}

// Chunk k is published in stage k and reduced in stage k + 1.
void OneShot(const Problem& problem, const Packing& packing, Plan& plan) {
  if (!Staged(problem)) {
    Stage& stage = plan.stages.emplace_back();
    stage.needs = plan.readers;
    ReduceToOutput(problem, packing, stage, packing.all());
    return;
  }
  plan.window_bytes = packing.total();
  Chunks chunks(packing.total(), problem.chunk_bytes);
  plan.stages.resize(chunks.count() + 1);
  for (int64_t k = 0; k <= chunks.count(); ++k) {
    Stage& stage = plan.stages[k];
    if (k > 0) stage.needs = plan.readers;
    Publish(problem, packing, stage, chunks[k]);
    ReduceToOutput(problem, packing, stage, chunks[k - 1]);
  }
}

// Chunk k is published in stage k; in stage k + 1 each rank reduces its part
// of it into its own window, over bytes that no other rank reads; in stage
// k + 2 everybody fetches the parts from their owners.
void StagedTwoPhase(const Problem& problem, const Packing& packing,
                    Plan& plan) {
  const int n = problem.ranks, me = problem.me;
  plan.window_bytes = packing.total();
  Chunks chunks(packing.total(), problem.chunk_bytes);
  plan.stages.resize(chunks.count() + 2);
  for (int64_t k = 0; k < chunks.count() + 2; ++k) {
    Stage& stage = plan.stages[k];
    if (k > 0) stage.needs = plan.readers;

    Range fresh = chunks[k];
    Range mine = PartOf(fresh, me, n);
    Publish(problem, packing, stage, {fresh.begin, mine.begin});
    Publish(problem, packing, stage, {mine.end, fresh.end});

    packing.ForEach(PartOf(chunks[k - 1], me, n), [&](const Piece& piece) {
      AddReduce(problem, stage, piece, WindowAt(me, piece));
    });

    // Start behind ourselves so that the ranks do not all read one window.
    for (int d = 0; d < n; ++d) {
      int r = (me + d) % n;
      packing.ForEach(PartOf(chunks[k - 2], r, n), [&](const Piece& piece) {
        AddLoad(stage, r, WindowAt(r, piece), OutputAt(me, piece), piece.bytes);
      });
    }
  }
}

// Each rank reduces its part and stores it to everybody: a byte crosses once,
// while it is in the cache.  Stage 1 moves nothing; its needs say that all
// parts have arrived and that nobody reads the operand any more.  Safe where a
// rank's output is its input: a part is overwritten by its only reader.
void DirectTwoPhase(const Problem& problem, const Packing& packing,
                    Plan& plan) {
  const int n = problem.ranks, me = problem.me;
  plan.stages.resize(2);
  for (Stage& stage : plan.stages) stage.needs = plan.readers;
  packing.ForEach(PartOf(packing.all(), me, n), [&](const Piece& piece) {
    AddReduce(problem, plan.stages[0], piece, OutputAt(me, piece));
    // Starting behind ourselves, so that the ranks do not all store to one.
    for (int d = 1; d < n; ++d) {
      plan.stages[0].reduces.back().copies.push_back(
          OutputAt((me + d) % n, piece));
    }
  });
}

}  // namespace

Plan BuildPsum(const Problem& problem) {
  Packing packing = PackingOf(problem.leaves);
  Plan plan;
  plan.sources = plan.readers = Others(problem);
  bool one_shot = SelectAlgorithm(problem) == Algorithm::kOneShot;
  plan.algorithm = std::string(Staged(problem) ? "staged_" : "direct_") +
                   (one_shot ? "one_shot" : "two_phase");
  if (one_shot) {
    OneShot(problem, packing, plan);
  } else if (Staged(problem)) {
    StagedTwoPhase(problem, packing, plan);
  } else {
    DirectTwoPhase(problem, packing, plan);
  }
  return plan;
}

// Leaf i consists of one block a rank.  What is cut into chunks is the packed
// range of one block of every leaf, so chunk k holds the same bytes of every
// block and each rank has work in each stage.
Plan BuildPsumScatter(const Problem& problem) {
  const int n = problem.ranks, me = problem.me;
  Packing packing = PackingOf(problem.leaves);
  std::vector<int64_t> block_bytes;
  for (size_t i = 0; i < problem.leaves.size(); ++i) {
    block_bytes.push_back(packing.bytes(i) / n);
  }
  Packing blocks(block_bytes);
  // A piece of everybody's block -> that piece of rank r's block, in the leaf.
  auto in_block = [&](const Piece& piece, int r) {
    int64_t offset = r * block_bytes[piece.leaf] + piece.offset;
    return Piece{.leaf = piece.leaf,
                 .offset = offset,
                 .packed = packing.start(piece.leaf) + offset,
                 .bytes = piece.bytes};
  };
  auto reduce = [&](Stage& stage, Range range) {
    blocks.ForEach(range, [&](const Piece& piece) {
      AddReduce(problem, stage, in_block(piece, me), OutputAt(me, piece));
    });
  };

  Plan plan;
  plan.sources = plan.readers = Others(problem);
  if (!Staged(problem)) {
    plan.algorithm = "direct_one_shot";
    Stage& stage = plan.stages.emplace_back();
    stage.needs = plan.readers;
    reduce(stage, blocks.all());
    return plan;
  }
  plan.algorithm = "staged_one_shot";
  plan.window_bytes = packing.total();
  int64_t chunk =
      problem.chunk_bytes == 0 || problem.chunk_bytes >= packing.total()
          ? 0
          : (problem.chunk_bytes - 1) / n + 1;
  Chunks chunks(blocks.total(), chunk);
  plan.stages.resize(chunks.count() + 1);
  for (int64_t k = 0; k <= chunks.count(); ++k) {
    Stage& stage = plan.stages[k];
    if (k > 0) stage.needs = plan.readers;
    blocks.ForEach(chunks[k], [&](const Piece& piece) {
      for (int r = 0; r < n; ++r) {
        if (r == me) continue;
        Piece from = in_block(piece, r);
        AddLoad(stage, me, InputAt(me, from), WindowAt(me, from), from.bytes);
      }
    });
    reduce(stage, chunks[k - 1]);
  }
  return plan;
}

}  // namespace strata
