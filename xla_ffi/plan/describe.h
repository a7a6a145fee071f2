// Owns: plans, and the words they are made of, as text.  Invariant: the
// listing shows every slice, reduce and need of the plan, so two plans with
// one listing do the same.
#pragma once

#include <string>

#include "plan/plan.h"

namespace strata {

// "psum", "f32", "sum"; "unknown" for a code without a name.
const char* NameOf(OpKind op);
const char* NameOf(DType dtype);
const char* NameOf(ReduceOp op);

// Several lines, each ended by a newline; ranks are positions in the group:
//   staged_one_shot: 2 stages, window 4096 B, reads {1}, read by {1}
//   stage 0
//     copy   r0.input[0]+0 -> r0.window+0, 4096 B
//   stage 1, after stage 0 of {1}
//     sum    1024 f32: r0.input[0]+0, r1.window+0 -> r0.output[0]+0
std::string Describe(const Plan& plan);

}  // namespace strata
