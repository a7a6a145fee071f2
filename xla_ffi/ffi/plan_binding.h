// Owns: what Python sees of plans: build_plan and describe_plan, for tests,
// `stratacl plan` and the simulator.  Invariant: read-only views by value; no
// object of the engine is reachable from here.
#pragma once

#include <nanobind/nanobind.h>

namespace strata {

void BindPlan(nanobind::module_& m);

}  // namespace strata
