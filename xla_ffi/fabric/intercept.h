// Owns: which memory XLA gets.  jaxlib's calls of posix_memalign, free and
// realloc, and nobody else's, are led through this file by changing its import
// table (GOT).  Invariants: a block of an arena goes back to that arena, from
// any thread and at any time, so `free` is never restored; whatever the arena
// cannot serve comes from libc; a child made by fork() neither takes from an
// arena nor gives back to one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "fabric/arena.h"

namespace strata {

class Interception {
 public:
  // Blocks of at least `threshold` bytes come from `arena` from now on.
  // Returns why that is impossible, or an empty string.
  static std::string Arm(Arena* arena, size_t threshold);
  // New blocks come from libc.  The arena that was armed must stay until
  // DropEmpty has let go of it.
  static void Disarm();
  // Unmaps arenas that were detached and have no block left.  The objects
  // remain: a thread may be about to ask one for a block.
  static void DropEmpty();

  struct Counts {
    uint64_t blocks = 0;          // served from the arena armed last
    uint64_t fallback_bytes = 0;  // large enough, but it was full
  };
  static Counts counts();
};

}  // namespace strata
