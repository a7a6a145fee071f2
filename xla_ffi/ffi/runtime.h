// Owns: the one runtime of the process, from prepare to shutdown.  Invariant:
// a Runtime is never freed (compiled programs point to it); shutdown closes it
// and gives its memory back.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "engine/op.h"
#include "engine/pool.h"
#include "fabric/comm.h"
#include "fabric/world.h"

namespace strata {

struct Runtime {
  std::unique_ptr<World> world;
  std::unique_ptr<CommRegistry> comms;
  std::unique_ptr<Engine> engine;
  PendingPool pool;
  std::atomic<bool> open{false};
  std::atomic<int> running{0};
};

// The runtime in force; nullptr before initialize() and after shutdown().
std::atomic<Runtime*>& CurrentRuntime();

// The module whose instances XLA makes right now; nullptr outside a compile.
class ModuleScope {
 public:
  static void Begin();
  static void End();
  static std::shared_ptr<Module> Current();
};

}  // namespace strata
