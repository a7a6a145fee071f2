// The native module `stratacl_jax._native`.  Not public: the Python package is.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <thread>

#include "engine/fault.h"
#include "fabric/intercept.h"
#include "ffi/handlers.h"
#include "ffi/plan_binding.h"
#include "ffi/runtime.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace strata {
namespace {

// A runtime whose arena exists but whose ranks do not yet.
std::unique_ptr<Runtime> prepared;
bool armed = false;  // whether the arena of the runtime serves XLA

Runtime& Prepared() {
  if (prepared == nullptr) {
    throw Error(ErrorKind::kInvalidUsage, "no runtime is being prepared");
  }
  return *prepared;
}

int Prepare(int process, int processes, uint64_t base, uint64_t span,
            uint64_t eager_bytes, nb::dict settings) {
  Settings s;
  auto ns = [&](const char* key, double unit) {
    return static_cast<uint64_t>(nb::cast<double>(settings[key]) * unit);
  };
  s.timeout_ns = ns("timeout_s", 1e9);
  s.warn_after_ns = ns("warn_after_s", 1e9);
  s.spin_ns = ns("spin_us", 1e3);
  s.yield_ns = ns("yield_us", 1e3);
  s.inplace_ns = ns("inplace_us", 1e3);
  s.chunk_bytes = nb::cast<size_t>(settings["chunk_bytes"]);
  s.algorithm = nb::cast<int>(settings["algorithm"]);
  s.registration =
      static_cast<Registration>(nb::cast<int>(settings["registration"]));
  auto arena = std::make_unique<Arena>(process, processes, base, span,
                                       ControlGeometry(eager_bytes));
  const int fd = arena->memfd();
  prepared = std::make_unique<Runtime>();
  prepared->world = std::make_unique<World>(std::move(arena), s);
  return fd;
}

void Start(const std::vector<std::pair<int, int64_t>>& ranks, bool divergent) {
  Runtime& rt = Prepared();
  rt.world->Start(ranks, divergent);
  rt.comms = std::make_unique<CommRegistry>(rt.world.get());
  rt.engine = std::make_unique<Engine>(rt.world.get());
  rt.open.store(true, std::memory_order_release);
  CurrentRuntime().store(prepared.release(), std::memory_order_release);
}

// Closes the runtime.  Returns false if operations are still pending after
// `grace_s`; their memory then stays mapped.
bool Shutdown(double grace_s) {
  Interception::Disarm();
  if (armed && prepared != nullptr)
    prepared->world->TakeArena(/*unread=*/false).release();
  prepared.reset();
  Runtime* rt = CurrentRuntime().exchange(nullptr, std::memory_order_acq_rel);
  if (rt == nullptr) return true;
  rt->open.store(false, std::memory_order_release);
  nb::gil_scoped_release release;
  const uint64_t end = NowNs() + static_cast<uint64_t>(grace_s * 1e9);
  while (rt->pool.pending() > 0 && NowNs() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (rt->pool.pending() > 0) {
    armed = false;  // everything stays as it is
    return false;
  }
  // A peer that has what it needs may still be on its way to it.
  bool unread = rt->engine->Drained();
  while (!unread && NowNs() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    unread = rt->engine->Drained();
  }
  rt->engine->GiveWindowsBack();
  std::unique_ptr<Arena> arena = rt->world->TakeArena(unread);
  rt->engine.reset();
  rt->world.reset();  // instances only look at `open` from now on
  // XLA's arrays live in it: an armed arena stays as long as the process.
  if (armed) arena.release();
  armed = false;
  return true;
}

nb::dict Ledger() {
  nb::dict d;
  Runtime* rt = CurrentRuntime().load(std::memory_order_acquire);
  if (rt == nullptr) return d;
  const Counters& c = rt->world->counters();
  auto put = [&d](const char* name, const std::atomic<uint64_t>& v) {
    d[name] = v.load(std::memory_order_relaxed);
  };
  put("operations", c.operations);
  put("completed_in_place", c.inplace);
  put("deferred", c.deferred);
  put("eager_bytes", c.eager_bytes);
  put("staged_bytes", c.staged_bytes);
  put("direct_bytes", c.direct_bytes);
  put("sleeps", c.sleeps);
  put("wakes", c.wakes);
  put("aborts", c.aborts);
  put("windows_allocated", c.windows);
  put("outside_bytes", c.outside_bytes);
  put("outside_result_bytes", c.outside_result_bytes);
  const Registrar::Counts& r = rt->world->registrar().counts();
  put("warm_bytes", r.warm_bytes);
  put("warm_ns", r.warm_ns);
  put("populated_bytes", r.populated_bytes);
  put("populate_ns", r.populate_ns);
  put("jit_bytes", r.jit_bytes);
  put("jit_ns", r.jit_ns);
  put("extents", r.extents);
  put("remaps", r.remaps);
  put("trims", r.trims);
  put("found_ready", r.found_ready);
  put("found_unready", r.found_unready);
  put("gaps", r.gaps);
  put("gap_min_ns", r.gap_min_ns);
  nb::list gaps;
  for (const auto& n : r.gap_log2_us) {
    gaps.append(n.load(std::memory_order_relaxed));
  }
  d["gap_log2_us"] = gaps;
  d["quarantined_bytes"] = rt->world->arena().quarantine().bytes();
  d["fallback_bytes"] = Interception::counts().fallback_bytes;
  const Allocator& a = rt->world->arena().allocator();
  d["arena_used_bytes"] = a.used();
  d["arena_high_water_bytes"] = a.high_water();
  d["pending"] = rt->pool.pending();
  d["pool_threads"] = rt->pool.threads();
  return d;
}

}  // namespace
}  // namespace strata

NB_MODULE(_native, m) {
  using namespace strata;
  m.doc() = "Native half of stratacl_jax; not a public interface.";

  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& e) {
      nb::object module = nb::module_::import_("stratacl_jax.runtime.errors");
      nb::object cls = module.attr(NameOf(e.kind()));
      PyErr_SetString(cls.ptr(), e.what());
    }
  });

  m.def(
      "candidate_bases",
      [] {
        Interception::DropEmpty();  // whose addresses can serve again
        return CandidateBases();
      },
      "Addresses that an arena may start at, in order of preference.");
  m.def("range_is_free", &RangeIsFree, "base"_a, "bytes"_a);
  m.def("prepare", &Prepare, "process"_a, "processes"_a, "base"_a, "span"_a,
        "eager_bytes"_a, "settings"_a,
        "Creates this process's arena; returns its memfd (-1 if private).");
  m.def("attach",
        [](int p, int fd) { Prepared().world->arena().Attach(p, fd); });
  m.def("watch", [](int p, int pidfd, int64_t pid) {
    Prepared().world->Watch(p, pidfd, pid);
  });
  m.def(
      "arm",
      [](uint64_t threshold, uint64_t limit) {
        Arena& a = Prepared().world->arena();
        a.set_limit(limit);
        const std::string why = Interception::Arm(&a, threshold);
        armed = armed || why.empty();
        return why;
      },
      "threshold"_a, "limit"_a,
      "Makes the arena the source of XLA's blocks from `threshold` bytes on; "
      "returns why it cannot, or nothing.");
  m.def(
      "in_arena",
      [](uint64_t address, uint64_t bytes) {
        Runtime* rt = CurrentRuntime().load(std::memory_order_acquire);
        const Arena& a =
            rt != nullptr ? rt->world->arena() : Prepared().world->arena();
        return a.Contains(reinterpret_cast<const void*>(address), bytes);
      },
      "address"_a, "bytes"_a,
      "Whether the range lies in this process's arena.");
  m.def("set_nonce", [](uint64_t nonce) {
    Arena& a = Prepared().world->arena();
    a.Writable(a.process(), 0)->nonce.store(nonce, std::memory_order_release);
  });
  m.def("read_nonce", [](int p) {
    return Prepared().world->arena().Shadow(p, 0)->nonce.load(
        std::memory_order_acquire);
  });
  m.def("start", &Start, "ranks"_a, "divergent"_a);
  m.def("shutdown", &Shutdown, "grace_s"_a);
  m.def("ledger", &Ledger);
  m.def("begin_module", &ModuleScope::Begin);
  m.def("end_module", &ModuleScope::End);
  m.def("max_ranks", [] { return kMaxRanks; });
  m.def(
      "set_fault",
      [](int point, int64_t countdown, int signal) {
        fault.signal.store(signal, std::memory_order_relaxed);
        fault.countdown.store(countdown, std::memory_order_relaxed);
        fault.point.store(point, std::memory_order_relaxed);
      },
      "point"_a, "countdown"_a, "signal"_a,
      "For tests: send this process `signal` at a point of the protocol "
      "(engine/fault.h), after `countdown` passes; point 0 is off.");
  m.def("ffi_types", [] {
    nb::dict d;
    d["type_id"] = nb::capsule(StateTypeId());
    d["type_info"] = nb::capsule(StateTypeInfo());
    return d;
  });
  m.def("ffi_targets", [] {
    nb::dict d;
    d["instantiate"] = nb::capsule(InstantiateHandler());
    d["execute"] = nb::capsule(ExecuteHandler());
    return d;
  });
  BindPlan(m);
}
