// Owns: what the operator builders share.  Private to xla_ffi/plan.
// Invariant: a builder sees a problem that build.cc has checked, so it cannot
// fail, and cuts depend on leaves and settings only, never on `me`: chunk k
// means the same bytes on every rank.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "plan/pieces.h"
#include "plan/plan.h"

namespace strata {

// The one place that chooses between one-shot and two-phase.
Algorithm SelectAlgorithm(const Problem& problem);

inline Packing PackingOf(const std::vector<Leaf>& leaves) {
  std::vector<int64_t> bytes;
  bytes.reserve(leaves.size());
  for (const Leaf& leaf : leaves) {
    bytes.push_back(leaf.count * leaf.element_bytes);
  }
  return Packing(std::move(bytes));
}

inline Addr At(Space space, int rank, int buffer, int64_t offset) {
  return {.space = space,
          .rank = static_cast<uint16_t>(rank),
          .buffer = static_cast<uint16_t>(buffer),
          .offset = offset};
}

inline Addr InputAt(int rank, const Piece& piece) {
  return At(Space::kInput, rank, piece.leaf, piece.offset);
}

inline Addr OutputAt(int rank, const Piece& piece) {
  return At(Space::kOutput, rank, piece.leaf, piece.offset);
}

inline Addr WindowAt(int rank, const Piece& piece) {
  return At(Space::kWindow, rank, 0, piece.packed);
}

// All positions but `me`, ascending.
std::vector<uint16_t> Others(const Problem& problem);

// Adds a load of `peer`'s bytes (a local copy when peer is the executing
// rank), joined to the slice before it where both sides continue.
void AddLoad(Stage& stage, int peer, Addr src, Addr dst, int64_t bytes);

Plan BuildPsum(const Problem& problem);
Plan BuildPsumScatter(const Problem& problem);
Plan BuildAllGather(const Problem& problem);
Plan BuildPpermute(const Problem& problem);
Plan BuildBarrier(const Problem& problem);

}  // namespace strata
