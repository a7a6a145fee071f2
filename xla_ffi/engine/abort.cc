// Everything that happens when an operation cannot go on as planned: deadline,
// dead peers, mismatched calls, aborts of others.  Slow path only.
#include <sched.h>

#include <cstdio>

#include "engine/fault.h"
#include "engine/op.h"

namespace strata::detail {
namespace {

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kStallNs = 2000 * kMs;  // idle rule of mismatch detection

std::string Seconds(uint64_t ns) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", static_cast<double>(ns) * 1e-9);
  return text;
}

std::string Where(const Op& op) {
  const Comm& comm = op.comm();
  return comm.world().Name(comm.self().world) + ", " +
         op.binding->instance->Describe() + ", launch " +
         std::to_string(op.key.launch) + ", execution " +
         std::to_string(op.key.instance & ((uint64_t{1} << 40) - 1));
}

std::string DescribePost(const Description& d, const Key& k) {
  std::vector<int64_t> dims;
  for (int i = 0; i < d.dims_used; ++i) {
    dims.push_back(static_cast<int64_t>(d.dims[i]));
  }
  return DescribeCall(
             static_cast<OpKind>(d.op), static_cast<ReduceOp>(d.reduce),
             static_cast<DType>(d.dtype), dims, d.leaves, d.group_size) +
         " (launch " + std::to_string(k.launch) + ")";
}

// Ranks the op still waits for, from its cursor on.
std::vector<int> MissingRanks(const Op& op) {
  std::vector<int> missing;
  if (op.at == Op::At::kClaim) return LateReaders(op);
  if (op.at != Op::At::kStages) {
    if (Missing(op) >= 0) missing.push_back(op.comm().rank(Missing(op)).world);
    return missing;
  }
  const Stage& s = op.binding->plan.stages[static_cast<size_t>(op.stage)];
  for (size_t i = op.cursor; i < s.needs.size(); ++i) {
    const int p = s.needs[i];
    PeerPost post;
    const bool there = op.found[p].slot != nullptr || Find(op, p, &post);
    const Slot* slot = op.found[p].slot ? op.found[p].slot : post.slot;
    if (!there || Progress(*slot) < static_cast<uint64_t>(op.stage)) {
      missing.push_back(op.comm().rank(p).world);
    }
  }
  return missing;
}

std::string Names(const World& world, const std::vector<int>& ranks) {
  std::string s;
  for (size_t i = 0; i < ranks.size(); ++i) {
    s += (i ? ", " : "") + world.Name(ranks[i]);
  }
  return s.empty() ? "nobody" : s;
}

// What the other rank called instead, if it stands in its posting table; over
// or not, for one that only sends is done at once.
bool DifferentPost(const Op& op, int position, Key* key, Description* d) {
  const Control* c = op.comm().rank(position).shadow;
  for (int i = 0; i < kSlots; ++i) {
    uint64_t progress;
    Phase phase;
    if (Inspect(c->slots[i], key, d, &progress, &phase) &&
        key->comm == op.key.comm && key->launch == op.key.launch &&
        !Sites::Known(key->site)) {
      return true;
    }
  }
  return false;
}

bool HaveOwn(const Op& op, const Key& key) {
  for (int i = 0; i < kSlots; ++i) {
    if (Match(op.state->control->slots[i], key) != 0) return true;
  }
  return false;
}

// As DifferentPost, but for when it is known already that the ranks differ: any
// post of this launch that I have no counterpart for, known site or not.
bool OtherPost(const Op& op, int position, Key* key, Description* d) {
  const Control* c = op.comm().rank(position).shadow;
  for (int i = 0; i < kSlots; ++i) {
    uint64_t progress;
    Phase phase;
    if (Inspect(c->slots[i], key, d, &progress, &phase) &&
        key->comm == op.key.comm && key->launch == op.key.launch &&
        progress != kDone && !HaveOwn(op, *key)) {
      return true;
    }
  }
  return false;
}

// A post of the peer that counts on me and that I have no counterpart for.
bool OrphanAt(const Op& op, int position, Key* key, Description* d) {
  const Control* c = op.comm().rank(position).shadow;
  const uint64_t my_bit = RankBit(op.comm().self().world);
  for (int i = 0; i < kSlots; ++i) {
    uint64_t progress;
    Phase phase;
    if (Inspect(c->slots[i], key, d, &progress, &phase) &&
        phase == Phase::kPosted && progress != kDone &&
        (d->member_mask & my_bit) != 0 && !HaveOwn(op, *key)) {
      return true;
    }
  }
  return false;
}

Failure MismatchWith(const Op& op, int position, const std::string& theirs) {
  const Comm& comm = op.comm();
  return {ErrorKind::kMismatch,
          "ranks of one group called different collectives: " +
              comm.world().Name(comm.self().world) + " called " +
              op.binding->instance->Describe() + " (launch " +
              std::to_string(op.key.launch) + "), " +
              comm.world().Name(comm.rank(position).world) + " " + theirs +
              ". All ranks must run the same program with the same shapes and "
              "dtypes"};
}

// An abort that started at `position`, in this rank's words.
Failure Echo(const Op& op, int position, const CommEntry* entry) {
  const Comm& comm = op.comm();
  const uint64_t cause =
      entry != nullptr ? entry->cause.load(std::memory_order_acquire) : 0;
  const auto kind = static_cast<ErrorKind>(cause & 0xff);
  const int culprit = static_cast<int>(cause >> 8);
  const World& world = comm.world();
  const std::string who =
      culprit < world.size() ? world.Name(culprit) : "a rank";
  const std::string by = world.Name(comm.rank(position).world);
  switch (kind) {
    case ErrorKind::kMismatch: {
      // The aborter may have called what I called; then the rank that differs
      // is the one it blames.
      for (int q = 0; q < comm.size(); ++q) {
        Key key;
        Description d;
        const bool suspect = q == position || comm.rank(q).world == culprit;
        if (suspect && q != comm.me() &&
            (DifferentPost(op, q, &key, &d) || OtherPost(op, q, &key, &d))) {
          return MismatchWith(op, q, "called " + DescribePost(d, key));
        }
      }
      return MismatchWith(op, position, "called something else in this launch");
    }
    case ErrorKind::kPeerLost:
      return {kind, who + " died during " + op.binding->instance->Describe() +
                        " (found by " + by + "; " + Where(op) + ")"};
    case ErrorKind::kDeadlineExceeded:
      // The one that was missing may be the one that tells us.
      return {kind, (by == who ? "a rank of the group" : by) +
                        " gave up waiting for " + who + " (" + Where(op) +
                        "); the operation is aborted on all ranks"};
    default:
      return {kind == ErrorKind::kNone ? ErrorKind::kInvalidUsage : kind,
              by + " aborted the launch (" + Where(op) + ")"};
  }
}

// Peers may be storing to this rank's results: the memory does not go back to
// XLA's use before they are through.
void HoldResults(const Op& op) {
  std::vector<Quarantine::Range> ranges;
  const LocalSlot& local = op.local();
  Arena& arena = op.world().arena();
  for (size_t i = 0; i < local.out.size(); ++i) {
    const uint64_t begin = reinterpret_cast<uint64_t>(local.out[i]);
    const uint64_t bytes = op.binding->out_bytes[i];
    const bool staged =
        !local.results.empty() && local.results[i] != local.out[i];
    if (!staged && bytes > 0 && arena.Contains(local.out[i], bytes)) {
      ranges.push_back({begin, begin + bytes});
    }
  }
  if (ranges.empty()) return;
  RankState* rank = op.state;
  arena.quarantine().Hold(std::move(ranges),
                          [rank, slot = op.slot, gen = op.gen] {
                            return SlotOver(rank, slot, gen);
                          });
}

}  // namespace

bool Abort(Op* op, const Failure& why, int culprit, bool final) {
  Comm& comm = op->comm();
  const bool posted = op->slot >= 0 && op->at != Op::At::kClaim;
  if (posted && final) {
    SetPhase(op->own(), op->gen, Phase::kAborted);
  } else if (posted) {
    SetPhase(op->own(), op->gen, Phase::kAbortReq);
    MaybeFault(FaultPoint::kAbortRequested);
    // The decisive look: whoever succeeded had seen every post before it could
    // see this request, so they are visible here, too.
    if (Ready(op) > 0 && Help(op->own(), op->gen)) return false;
    // Unless a finisher was quicker and took the request back.
    if (!CommitAbort(op->own(), op->gen)) return false;
  }
  Count(op->world().counters().aborts);
  comm.AbortLaunch(op->key.launch, why, culprit);
  // The launch ends here with an error, so this rank will not come to its
  // other communicators either: tell their members now.
  Module* module = op->binding->instance->module();
  std::vector<Comm*> others;
  {
    std::lock_guard<std::mutex> lock(module->mutex);
    others = module->comms;
  }
  for (Comm* c : others) {
    if (c == &comm || c->self().world != comm.self().world) continue;
    const uint64_t ordinal = c->OrdinalOf(op->run_id);
    if (ordinal != 0) {
      c->AbortLaunch(ordinal, why, culprit);
    } else {
      c->Break(why, culprit);
    }
    c->WakeGroup();
  }
  comm.WakeGroup();
  if (posted) {
    if (op->binding->transport == Transport::kDirect && comm.one_process()) {
      // Exit rule after an abort: readers are threads of this process; each
      // notices within one check and acknowledges.
      op->at = Op::At::kExit;
      op->aborted = true;
      op->cursor = 0;
      while (Ready(op) == 0) sched_yield();
    } else if (op->binding->stored_to) {
      HoldResults(*op);
    }
    ReleaseSlot(op);
  }
  return true;
}

bool Confirm(Op* op, Failure* failure) {
  Comm& comm = op->comm();
  // Needs no order with the loads of the payload: a source leaves its bytes
  // alone until this operation has acknowledged them or is ABORTED.
  for (int p : op->binding->plan.sources) {
    const PeerPost& post = op->found[p];
    const uint64_t state = StateOf(*post.slot);
    if (state == MakeState(post.gen, Phase::kPosted)) continue;
    if (GenOf(state) == post.gen) {
      // One-sided: copied bytes are right whatever becomes of the sender, and
      // so are XLA's own in this process, where the sender waits for us.
      const bool lasting =
          op->binding->transport == Transport::kStaged || comm.one_process();
      if (!op->binding->all_read_me && lasting) continue;
      // Everything that the requester waits for is there, for it was here.
      if (Help(&comm.rank(p).rw->slots[post.index], post.gen)) continue;
    }
    const CommEntry* entry = comm.PeerEntry(p);
    *failure = Echo(*op, p, entry);
    Abort(op, *failure, comm.rank(p).world, /*final=*/true);
    return false;
  }
  return true;
}

bool Agreed(Op* op, Failure* failure) {
  Comm& comm = op->comm();
  if (!op->binding->all_read_me || comm.one_process()) return true;
  for (int p : op->binding->plan.sources) {
    const PeerPost& post = op->found[p];
    if (StateOf(*post.slot) != MakeState(post.gen, Phase::kAborted)) continue;
    *failure = Echo(*op, p, comm.PeerEntry(p));
    Abort(op, *failure, comm.rank(p).world, /*final=*/true);
    return false;
  }
  return true;
}

bool FindMismatch(Op* op, uint64_t now, int position, Failure* failure) {
  Comm& comm = op->comm();
  const CommEntry* entry = comm.PeerEntry(position);
  const uint64_t ordinal =
      entry != nullptr ? entry->ordinal.load(std::memory_order_acquire) : 0;
  Key key;
  Description d;
  PeerPost post;
  // The peer's launch is over and it never made this call.
  if (ordinal > op->key.launch && !Find(*op, position, &post)) {
    *failure = MismatchWith(*op, position,
                            "finished its launch without it and is in launch " +
                                std::to_string(ordinal));
    return true;
  }
  // The peer made a call, in this very launch, that this process never
  // compiled.
  if (ordinal == op->key.launch && DifferentPost(*op, position, &key, &d)) {
    *failure = MismatchWith(*op, position, "called " + DescribePost(d, key));
    return true;
  }
  // Both wait for calls that the other has not made, and nobody computes.
  if (!OrphanAt(*op, position, &key, &d)) {
    op->idle_since_ns = 0;
    return false;
  }
  // All processes: in a chain of crossing calls two may rightly idle while a
  // third computes.
  uint64_t cpu = 0;
  bool stopped = false;
  const World& world = op->world();
  for (int q = 0; q < world.arena().processes(); ++q) {
    if (world.Dead(q)) continue;
    const Control* c = world.arena().Shadow(q, 0);
    const uint64_t beat = c->beat_ns.load(std::memory_order_acquire);
    stopped = stopped || (now > beat && now - beat > 1000 * kMs);
    cpu += c->cpu_ns.load(std::memory_order_relaxed);
  }
  const uint64_t idle_budget =
      100 * kMs * static_cast<uint64_t>(world.arena().processes());
  if (op->idle_since_ns == 0 || stopped || cpu - op->idle_cpu > idle_budget) {
    op->idle_since_ns = now;
    op->idle_cpu = cpu;
    return false;
  }
  if (now - op->idle_since_ns < kStallNs) return false;
  *failure = MismatchWith(*op, position,
                          "waits in " + DescribePost(d, key) + " instead");
  return true;
}

bool SlowCheck(Op* op, uint64_t now, Failure* failure) {
  Comm& comm = op->comm();
  World& world = op->world();
  const uint64_t launch = op->key.launch;
  auto fail = [&](Failure why, int culprit) {
    if (!Abort(op, why, culprit)) return false;
    *failure = std::move(why);
    return true;
  };
  const uint64_t waited = now - op->start_ns;
  const bool late = waited >= world.settings().timeout_ns;
  if (op->at == Op::At::kExit) {
    // The result is there.  Readers in this process end by themselves; one in
    // another may be stopped, and then finds the operation aborted when it
    // looks whether what it read was still right.
    if (!late || comm.one_process()) return false;
  } else if (comm.Aborted(launch)) {
    return fail(comm.Why(), comm.self().world);
  }
  if (op->at == Op::At::kStages) {
    const Stage& s = op->binding->plan.stages[static_cast<size_t>(op->stage)];
    for (size_t i = op->cursor; i < s.needs.size(); ++i) {
      const int p = s.needs[i];
      PeerPost& post = op->found[p];
      const bool dead = world.Dead(comm.rank(p).process);
      const CommEntry* entry = comm.PeerEntry(p);
      const bool entry_aborted =
          entry != nullptr &&
          (entry->aborted.load(std::memory_order_seq_cst) >= launch ||
           entry->broken.load(std::memory_order_seq_cst) != 0);
      const int culprit =
          entry != nullptr
              ? static_cast<int>(entry->cause.load(std::memory_order_acquire) >>
                                 8)
              : comm.rank(p).world;
      // If the peer has a slot for this operation, its phase decides.
      if (post.slot != nullptr || Find(*op, p, &post)) {
        if (StateOf(*post.slot) == MakeState(post.gen, Phase::kAborted)) {
          Failure why = Echo(*op, p, entry);
          Abort(op, why, culprit, /*final=*/true);
          *failure = std::move(why);
          return true;
        }
      } else if (entry_aborted) {
        return fail(Echo(*op, p, entry), culprit);
      }
      if (dead && (post.slot == nullptr ||
                   Progress(*post.slot) < static_cast<uint64_t>(op->stage))) {
        return fail(
            {ErrorKind::kPeerLost, world.Name(comm.rank(p).world) + " died; " +
                                       Where(*op) + " cannot complete"},
            comm.rank(p).world);
      }
    }
    if (waited > 100 * kMs) {
      for (size_t i = op->cursor; i < s.needs.size(); ++i) {
        const int p = s.needs[i];
        Failure why;
        if (op->found[p].slot == nullptr && FindMismatch(op, now, p, &why)) {
          return fail(why, comm.rank(p).world);
        }
      }
    }
  }
  if (late) {
    const std::vector<int> missing = MissingRanks(*op);
    const std::string what =
        (op->at == Op::At::kClaim
             ? "no posting slot became free, for earlier posts still await "
         : op->at == Op::At::kExit ? "still reading: "
                                   : "still missing: ") +
        Names(world, missing);
    return fail({ErrorKind::kDeadlineExceeded, "waited " + Seconds(waited) +
                                                   " (STRATACL_TIMEOUT); " +
                                                   what + "; " + Where(*op)},
                missing.empty() ? comm.self().world : missing[0]);
  }
  if (!op->warned && waited >= world.settings().warn_after_ns) {
    op->warned = true;
    std::fprintf(stderr, "stratacl: warn: %s has waited %s for %s\n",
                 Where(*op).c_str(), Seconds(waited).c_str(),
                 Names(world, MissingRanks(*op)).c_str());
  }
  return false;
}

}  // namespace strata::detail
