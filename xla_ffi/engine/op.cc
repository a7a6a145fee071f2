#include "engine/op.h"

#include <sched.h>

#include <cstring>

#include "engine/fault.h"
#include "engine/kernels.h"

namespace strata {

namespace {

constexpr uint64_t kForever = ~uint64_t{0};
constexpr uint64_t kCheckEveryNs = 50'000'000;  // slow checks while asleep
// Acknowledgements do not ring, so credit is polled for: often while the reader
// is likely to be just behind, then seldom, for it may be stopped.
constexpr uint64_t kCreditPollNs = 100'000;
constexpr uint64_t kLongCreditPollNs = 1'000'000;
constexpr uint64_t kLongCreditWaitNs = 10'000'000;

uint64_t Min(uint64_t a, uint64_t b) { return a < b ? a : b; }

enum class Waited { kReady, kBudget, kFailed };

Waited Wait(Op* op, uint64_t budget_ns, Failure* failure) {
  using detail::Ready;
  World& world = op->world();
  Control* own = op->state->control;
  for (int i = 0; i < 128; ++i) {
    const int r = Ready(op);
    if (r > 0) return Waited::kReady;
    if (r < 0) break;
    CpuRelax();
  }
  const Settings& set = world.settings();
  const uint64_t begin = NowNs();
  if (op->start_ns == 0) op->start_ns = begin;
  uint64_t now = begin;
  const uint64_t spin_end = begin + Min(set.spin_ns, budget_ns);
  const uint64_t yield_end = begin + Min(set.spin_ns + set.yield_ns, budget_ns);
  while (now < yield_end) {
    int r = 0;
    for (int i = 0; i < 32 && r == 0; ++i) {
      r = Ready(op);
      if (now < spin_end) {
        CpuRelax();
      } else {
        break;
      }
    }
    if (r > 0) return Waited::kReady;
    if (r < 0) break;
    if (now >= spin_end) sched_yield();
    now = NowNs();
  }
  for (;;) {
    int r = Ready(op);
    if (r > 0) return Waited::kReady;
    now = NowNs();
    if (r < 0 || now >= op->check_ns) {
      if (detail::SlowCheck(op, now, failure)) return Waited::kFailed;
      op->check_ns = now + kCheckEveryNs;
      const uint64_t deadline = op->start_ns + set.timeout_ns;
      if (now < deadline) op->check_ns = Min(op->check_ns, deadline);
      r = Ready(op);
      if (r > 0) return Waited::kReady;
    }
    if (now - begin >= budget_ns) return Waited::kBudget;
    uint64_t slice = Min(op->check_ns - now, budget_ns - (now - begin));
    if (op->at == Op::At::kClaim) {
      const bool lasts = now - begin >= kLongCreditWaitNs;
      slice = Min(slice, lasts ? kLongCreditPollNs : kCreditPollNs);
    }
    const int missing = detail::Missing(*op);
    const uint64_t bits =
        missing < 0 ? 0 : RankBit(op->comm().rank(missing).world);
    const uint32_t seen = Arm(own, bits);
    r = Ready(op);
    if (r > 0) return Waited::kReady;
    if (r < 0) continue;
    Count(world.counters().sleeps);
    Sleep(own, seen, slice);
  }
}

Outcome Finish(Op* op) {
  op->comm().EndOperation();
  return Outcome::kDone;
}

}  // namespace

Engine::Engine(World* world) : world_(world), ranks_(kMaxLocalRanks) {
  for (int r = 0; r < world->size(); ++r) {
    const Rank& rank = world->rank(r);
    if (!rank.mine) continue;
    RankState& state = ranks_[static_cast<size_t>(rank.local)];
    state.control = rank.rw;
    state.slots = std::make_unique<LocalSlot[]>(kSlots);
    state.windows.reserve(kSlots);
  }
}

void Engine::GiveWindowsBack() {
  for (RankState& rank : ranks_) {
    if (rank.slots == nullptr) continue;
    for (int s = 0; s < kSlots; ++s) detail::DropWindow(&rank, s);
  }
}

Outcome Engine::Start(Binding* b, int64_t run_id, const void* const* in,
                      void* const* out, std::unique_ptr<Op>* pending,
                      Failure* failure) {
  Op op;  // on the stack: the steady path allocates nothing
  op.binding = b;
  Comm& comm = *b->comm;
  op.state = &ranks_[static_cast<size_t>(comm.self().local)];
  op.run_id = run_id;
  op.in = in;
  op.out = out;
  const Plan& plan = b->plan;
  const bool alone = plan.sources.empty() && plan.readers.empty();
  // A rank outside a permutation meets nobody, but its launch counts: the
  // ordinals of all ranks of the communicator stay in step.
  uint64_t launch = 0;
  if (comm.size() > 1) {
    launch = comm.BeginLaunch(run_id, failure);
    if (launch == 0) return Outcome::kFailed;
  }
  if (alone) {
    const FloatMode mode;
    for (const Stage& s : plan.stages) detail::RunStage(op, s);
    if (comm.size() > 1) comm.EndOperation();
    return Outcome::kDone;
  }
  if (b->run_id.load(std::memory_order_relaxed) != run_id) {
    b->run_id.store(run_id, std::memory_order_relaxed);
    b->iteration.store(0, std::memory_order_relaxed);
  }
  const uint64_t iteration = b->iteration.load(std::memory_order_relaxed);
  b->iteration.store(iteration + 1, std::memory_order_relaxed);
  op.key = {comm.hash(), b->site, launch, b->instance->Clone() | iteration};
  if (comm.Aborted(launch)) {
    *failure = comm.Why();
    comm.EndOperation();
    return Outcome::kFailed;
  }
  Count(world_->counters().operations);
  const Outcome o = Continue(&op, world_->settings().inplace_ns, failure);
  if (o != Outcome::kPending) {
    Count(world_->counters().inplace);
    return o;
  }
  Count(world_->counters().deferred);
  *pending = std::make_unique<Op>();
  Op* kept = pending->get();
  *kept = op;
  if (kept->slot < 0) {
    const size_t n = b->instance->spec().leaves.size();
    kept->kept_in.assign(in, in + n);
    kept->kept_out.assign(out, out + n);
    kept->in = kept->kept_in.data();
    kept->out = kept->kept_out.data();
  }
  return Outcome::kPending;
}

bool Engine::Drained() {
  for (RankState& rank : ranks_) {
    if (rank.slots != nullptr && !detail::AllDrained(&rank)) return false;
  }
  return true;
}

void Engine::Refuse(Binding* b, int64_t run_id, Failure* failure) {
  Comm& comm = *b->comm;
  if (comm.size() == 1) return;
  Op op;
  op.binding = b;
  op.state = &ranks_[static_cast<size_t>(comm.self().local)];
  op.run_id = run_id;
  const Failure why = *failure;
  op.key.launch = comm.BeginLaunch(run_id, failure);
  if (op.key.launch == 0) return;
  detail::Abort(&op, why, comm.self().world);
  comm.EndOperation();
}

Outcome Engine::Continue(Op* op, uint64_t budget_ns, Failure* failure) {
  const FloatMode mode;
  Binding* b = op->binding;
  const Plan& plan = b->plan;
  const uint64_t begin = budget_ns == kForever ? 0 : NowNs();
  auto left = [&]() -> uint64_t {
    if (budget_ns == kForever) return kForever;
    const uint64_t spent = NowNs() - begin;
    return spent >= budget_ns ? 0 : budget_ns - spent;
  };
  // Waits for the current condition; true to go on, else *end says why not.
  auto await = [&](Outcome* end) {
    if (detail::Ready(op) > 0) return true;
    switch (Wait(op, left(), failure)) {
      case Waited::kReady:
        return true;
      case Waited::kBudget:
        *end = Outcome::kPending;
        return false;
      case Waited::kFailed:
        op->comm().EndOperation();
        *end = Outcome::kFailed;
        return false;
    }
    return false;
  };
  Outcome end = Outcome::kPending;
  if (op->at == Op::At::kClaim) {
    if (!await(&end)) return end;
    if (op->no_room) {
      *failure = {ErrorKind::kResourceExhausted,
                  "the arena has no " +
                      std::to_string(op->local().window_bytes) +
                      " bytes left for " + b->instance->Describe() +
                      "; raise STRATACL_ARENA_SPAN"};
      op->local().comm = nullptr;  // never published: nobody will read it
      detail::ReleaseSlot(op);
      detail::Abort(op, *failure, op->comm().self().world);
      op->comm().EndOperation();
      return Outcome::kFailed;
    }
    op->at = Op::At::kStages;
    op->cursor = 0;
    for (int p = 0; p < op->comm().size(); ++p) op->found[p].slot = nullptr;
    MaybeFault(FaultPoint::kBeforePost);
    detail::Post(op);
    MaybeFault(FaultPoint::kAfterPost);
    // A sibling may have aborted this launch meanwhile; a one-sided source then
    // takes this post for one that will not read.  Looked at after the post,
    // before any read.  (In a mesh operator no source is done without this
    // post, and one that is done by it counts on this rank.)
    const bool mesh = b->all_read_me && !plan.sources.empty();
    if (!mesh && op->comm().Aborted(op->key.launch)) {
      *failure = op->comm().Why();
      detail::Abort(op, *failure, op->comm().self().world, /*final=*/true);
      op->comm().EndOperation();
      return Outcome::kFailed;
    }
  }
  if (op->at == Op::At::kStages) {
    const int stages = static_cast<int>(plan.stages.size());
    while (op->stage < stages) {
      if (!await(&end)) return end;
      const Stage& stage = plan.stages[static_cast<size_t>(op->stage)];
      if (!stage.reduces.empty() && !stage.reduces[0].copies.empty()) {
        // The wait may have been long: a peer that gave up meanwhile is found
        // before a byte is stored to it.
        op->cursor = 0;
        if (!await(&end)) return end;
      }
      if (op->stage + 1 == stages) MaybeFault(FaultPoint::kMidStages);
      detail::RunStage(*op, stage);
      ++op->stage;
      op->cursor = 0;
      if (op->stage < stages) {
        Advance(op->own(), static_cast<uint64_t>(op->stage));
        detail::WakeReaders(*op);
      }
    }
    if (!detail::Confirm(op, failure)) {
      op->comm().EndOperation();
      return Outcome::kFailed;
    }
    detail::DeliverResults(*op);
    MaybeFault(FaultPoint::kBeforeAck);
    detail::AckSources(*op, b->awaits_readers);
    MarkDone(op->own());
    MaybeFault(FaultPoint::kAfterAck);
    if (b->awaits_readers) {
      op->at = Op::At::kExit;
      op->cursor = 0;
    } else {
      detail::ReleaseSlot(op);
      return Finish(op);
    }
  }
  if (!await(&end)) return end;
  if (!detail::Agreed(op, failure)) {
    op->comm().EndOperation();
    return Outcome::kFailed;
  }
  detail::ReleaseSlot(op);
  return Finish(op);
}

// ---------------------------------------------------------------------------

namespace {

#if defined(__x86_64__)
constexpr uint32_t kFlush = 1u << 15, kDenormalsAreZero = 1u << 6;
constexpr uint32_t kRounding = 3u << 13;
uint64_t GetMode() { return __builtin_ia32_stmxcsr(); }
void SetMode(uint64_t m) { __builtin_ia32_ldmxcsr(static_cast<uint32_t>(m)); }
uint64_t XlaMode(uint64_t m) {
  return (m & ~uint64_t{kRounding}) | kFlush | kDenormalsAreZero;
}
#elif defined(__aarch64__)
uint64_t GetMode() {
  uint64_t m;
  asm volatile("mrs %0, fpcr" : "=r"(m));
  return m;
}
void SetMode(uint64_t m) { asm volatile("msr fpcr, %0" ::"r"(m)); }
uint64_t XlaMode(uint64_t m) {
  return (m & ~(uint64_t{3} << 22)) | (uint64_t{1} << 24);
}
#else
uint64_t GetMode() { return 0; }
void SetMode(uint64_t) {}
uint64_t XlaMode(uint64_t m) { return m; }
#endif

}  // namespace

FloatMode::FloatMode() : saved_(GetMode()) {
  if (XlaMode(saved_) != saved_) SetMode(XlaMode(saved_));
}
FloatMode::~FloatMode() {
  if (XlaMode(saved_) != saved_) SetMode(saved_);
}
void FloatMode::SetForThread() { SetMode(XlaMode(GetMode())); }

}  // namespace strata
