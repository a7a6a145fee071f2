// Owns: the two records every collective is made of, and the builder that
// turns one operator call into stages of them.  Invariant: pure data and pure
// functions; no I/O, no threads, no pointers into anybody's memory.  The
// engine runs a Plan, the tests prove it, the simulator times it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plan/types.h"

namespace strata {

// Where a byte lives, before anybody knows the pointers: buffer `buffer` (the
// leaf of the pytree) of rank `rank` (its position in the listed group).
enum class Space : uint8_t {
  kInput,   // the operand XLA handed to that rank
  kOutput,  // the result XLA handed to that rank
  kWindow,  // that rank's staging window in the arena (one buffer, leaves
            // packed)
  kZero,    // an endless source of zero bytes; rank, buffer, offset are 0
};

struct Addr {
  Space space = Space::kInput;
  uint16_t rank = 0;
  uint16_t buffer = 0;
  int64_t offset = 0;  // bytes
};

enum class Action : uint8_t {
  kLoad,   // the executing rank reads `peer` and writes itself
  kStore,  // the executing rank reads itself and writes `peer`
};

struct Slice {
  uint16_t peer = 0;  // == own position for a local copy
  Addr src;
  Addr dst;
  int64_t bytes = 0;
  Action action = Action::kLoad;
};

// dst[i] = (((srcs[0][i] + srcs[1][i]) + srcs[2][i]) + ...), accumulated in the
// accumulation type and rounded once.  dst may equal one of the srcs exactly;
// it never overlaps one in part.  `copies` are stores to peers: they get the
// bytes of dst, element by element after all srcs of the element were read.
struct Reduce {
  std::vector<Addr> srcs;
  Addr dst;
  std::vector<Addr> copies;
  int64_t count = 0;  // elements
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
};

// Stage k may start once every position p in `needs` has posted and finished
// its first k stages (progress(p) >= k).  A stage that touches no peer has no
// needs.  Slices and reduces of one stage (over all ranks that can be in that
// stage together) are independent of each other.
struct Stage {
  std::vector<Slice> slices;
  std::vector<Reduce> reduces;
  std::vector<uint16_t> needs;
};

// No stages: nothing to move, so nobody to wait for (all leaves are empty, or
// a barrier of one).  Every output byte, and every window byte, is written
// once.  Output may be input (same leaf, same address) in staged psum and
// ppermute plans, in direct two-phase ones and in local ones; elsewhere a peer
// may still read the operand that would be overwritten.
struct Plan {
  std::string algorithm;  // for people; see Describe in plan/describe.h
  std::vector<Stage> stages;
  int64_t window_bytes = 0;  // size of this rank's staging window; 0 = none
  std::vector<uint16_t> sources;  // peers this rank reads: union of needs
  std::vector<uint16_t> readers;  // peers that read this rank: p is in
                                  // readers(me) iff me is in sources(p)
};

struct Leaf {
  int64_t count = 0;  // elements of the INPUT leaf
  DType dtype = DType::kF32;
  int64_t element_bytes = 0;  // == SizeOf(dtype), or the element size of a
                              // type that is only moved, never reduced
};

// How a peer reaches an operand.
enum class Transport : uint8_t {
  kStaged,  // operands are copied to the window, peers read the window
  kDirect,  // peers read Space::kInput of each other and store to kOutput
};

// For psum; the other operators have one algorithm each and ignore this.
enum class Algorithm : uint8_t {
  kAuto,
  kOneShot,   // every rank reads every operand whole
  kTwoPhase,  // full-mesh reduce-scatter, then full-mesh all-gather; if
              // direct, each rank stores its part to all
};

struct Problem {
  OpKind op = OpKind::kPsum;
  ReduceOp reduce = ReduceOp::kSum;
  std::vector<Leaf> leaves;  // none for a barrier
  int ranks = 1;
  int me = 0;
  // ppermute: (source, destination) positions; sources and destinations unique.
  std::vector<std::pair<int, int>> permutation;
  Transport transport = Transport::kStaged;
  // Staged operands larger than this, leaves together, are cut into chunks of
  // this size (rounded up to 64) and pipelined; 0 = one piece.
  int64_t chunk_bytes = 0;
  Algorithm algorithm = Algorithm::kAuto;
};

// Throws std::invalid_argument with a sentence a user can act on.
Plan BuildPlan(const Problem& problem);

// Offset of each leaf in a packed window (each aligned to 16 bytes), then the
// total, so the result has leaves + 1 entries.
std::vector<int64_t> WindowLayout(const std::vector<Leaf>& leaves);

}  // namespace strata
