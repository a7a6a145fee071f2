// Claiming a slot: its credit, its window, and what of XLA's buffers peers can
// reach.
#include <algorithm>

#include "engine/kernels.h"
#include "engine/op.h"

namespace strata::detail {
// Whether group position `p` will not read this rank's operation `key` any
// more: it acknowledged, its process is dead or has left the fabric (which it
// does when it has nothing to read), its own part is aborted, or its
// launch is over or aborted and it has no part.  (An aborted launch may be
// followed by the next one while one of its operations still reads.)  Order of
// reads: entry before slots, so that a slot posted after the look belongs to a
// rank that sees its own abort before it reads.
bool ReaderDone(const Comm& comm, Control* control, int slot, uint64_t gen,
                const Key& key, int p) {
  if (Acked(AckWord(control, slot, p), gen)) return true;
  const int process = comm.rank(p).process;
  if (comm.world().Dead(process) || comm.world().Left(process)) return true;
  const CommEntry* e = comm.PeerEntry(p);
  if (e == nullptr) return false;
  if (e->ordinal.load(std::memory_order_acquire) <= key.launch &&
      e->aborted.load(std::memory_order_seq_cst) < key.launch &&
      e->broken.load(std::memory_order_seq_cst) == 0) {
    return false;
  }
  uint64_t theirs;
  const Slot* s = FindSlot(comm, p, key, slot % kWays, &theirs);
  return s == nullptr || StateOf(*s) == MakeState(theirs, Phase::kAborted);
}

namespace {

void GiveWindowBack(LocalSlot* local) {
  if (local->window == nullptr) return;
  local->comm->world().arena().Free(local->window);
  local->window = nullptr;
  local->window_bytes = 0;
}

// Takes the slot if its last operation is over for everybody.
bool TakeSlot(RankState* rank, int slot) {
  LocalSlot& local = rank->slots[static_cast<size_t>(slot)];
  uint32_t idle = 0;
  // acquire pairs with ReleaseSlot: the fields are those its thread left.
  if (local.claimed.load(std::memory_order_relaxed) != 0 ||
      !local.claimed.compare_exchange_strong(idle, 1,
                                             std::memory_order_acquire)) {
    return false;
  }
  if (local.comm != nullptr && !Drained(*rank, slot)) {
    local.claimed.store(0, std::memory_order_release);
    return false;
  }
  return true;
}

class TryLock {
 public:
  explicit TryLock(std::atomic<uint32_t>& l)
      : l_(l), held_(l.exchange(1, std::memory_order_acquire) == 0) {}
  ~TryLock() {
    if (held_) l_.store(0, std::memory_order_release);
  }
  bool held() const { return held_; }

 private:
  std::atomic<uint32_t>& l_;
  bool held_;
};

// Large windows go back to the arena as soon as their readers are done, not
// when their slot is next used: the next operation then finds them warm.
void SweepWindows(RankState* rank) {
  const TryLock lock(rank->windows_lock);
  if (!lock.held()) return;
  size_t keep = 0;
  for (int slot : rank->windows) {
    LocalSlot& local = rank->slots[static_cast<size_t>(slot)];
    if (TakeSlot(rank, slot)) {
      GiveWindowBack(&local);
      local.queued = false;
      local.claimed.store(0, std::memory_order_release);
    } else {
      rank->windows[keep++] = slot;
    }
  }
  rank->windows.resize(keep);
}

// Room of `bytes` for the operation's slot, as its window.
void TakeWindow(Op* op, uint64_t bytes) {
  LocalSlot& local = op->local();
  Arena& arena = op->world().arena();
  SweepWindows(op->state);
  if (local.window_bytes < bytes) GiveWindowBack(&local);
  if (local.window == nullptr) {
    local.window = arena.Allocate(bytes);
    local.window_bytes = bytes;
    Count(op->world().counters().windows);
  }
  op->window = static_cast<unsigned char*>(local.window);
  op->no_room = op->window == nullptr;
}

constexpr uint64_t kStagedAlign = 64;

// Fills the table of addresses that peers go by.  What they cannot reach gets
// room in the arena: an operand is copied there before the post, a result is
// put together there and copied out at the end.
void Expose(Op* op) {
  const Binding& b = *op->binding;
  LocalSlot& local = op->local();
  Arena& arena = op->world().arena();
  const size_t leaves = local.in.size();
  const bool anywhere = b.comm->one_process();
  const bool read = !b.plan.readers.empty();
  const auto inside = [&](const void* p, uint64_t bytes) {
    return anywhere || bytes == 0 || arena.Contains(p, bytes);
  };
  const uint64_t table_bytes = 2 * leaves * sizeof(void*);
  uint64_t need = 0;
  const auto reserve = [&need](uint64_t bytes) {
    need += (bytes + kStagedAlign - 1) / kStagedAlign * kStagedAlign;
  };
  if (table_bytes <= kInlineBytes) {
    op->table = reinterpret_cast<const void**>(op->own()->inline_payload);
  } else if (table_bytes <= arena.geometry().eager_bytes) {
    op->table = reinterpret_cast<const void**>(
        arena.Payload(op->state->control, op->slot));
  } else {
    op->table = nullptr;
    reserve(table_bytes);
  }
  for (size_t i = 0; i < leaves; ++i) {
    if (read && !inside(local.in[i], b.in_bytes[i])) reserve(b.in_bytes[i]);
    if (b.stored_to && !inside(local.out[i], b.out_bytes[i])) {
      reserve(b.out_bytes[i]);
    }
  }
  if (need > 0) {
    TakeWindow(op, need);
    if (op->no_room) return;
  }
  unsigned char* at = op->window;
  const auto take = [&at](uint64_t bytes) {
    unsigned char* p = at;
    at += (bytes + kStagedAlign - 1) / kStagedAlign * kStagedAlign;
    return p;
  };
  if (op->table == nullptr) {
    op->table = reinterpret_cast<const void**>(take(table_bytes));
  }
  for (size_t i = 0; i < leaves; ++i) {
    const bool here = !read || inside(local.in[i], b.in_bytes[i]);
    op->table[i] = here ? local.in[i] : take(b.in_bytes[i]);
  }
  for (size_t i = 0; i < leaves; ++i) {
    if (b.stored_to && !inside(local.out[i], b.out_bytes[i])) {
      if (local.results.empty()) local.results = local.out;
      local.out[i] = take(b.out_bytes[i]);
    }
    op->table[leaves + i] = local.out[i];
  }
}

}  // namespace

void StageOutsiders(Op* op) {
  const Binding& b = *op->binding;
  const LocalSlot& local = op->local();
  Counters& counters = op->world().counters();
  uint64_t staged = 0, late = 0;
  for (size_t i = 0; i < local.in.size(); ++i) {
    if (op->table[i] == local.in[i]) {
      op->world().registrar().FirstUse(local.in[i]);
    } else {
      CopyBytes(const_cast<void*>(op->table[i]), local.in[i], b.in_bytes[i]);
      staged += b.in_bytes[i];
    }
    if (!local.results.empty() && local.results[i] != local.out[i]) {
      late += b.out_bytes[i];
    }
  }
  Count(counters.direct_bytes, b.operand_bytes - staged);
  if (staged + late == 0) return;
  Count(counters.staged_bytes, staged + late);
  Count(counters.outside_bytes, staged);
  Count(counters.outside_result_bytes, late);
}

void DeliverResults(const Op& op) {
  const LocalSlot& local = op.local();
  for (size_t i = 0; i < local.results.size(); ++i) {
    CopyBytes(local.results[i], local.out[i], op.binding->out_bytes[i]);
  }
}

bool Drained(const RankState& rank, int slot) {
  const LocalSlot& local = rank.slots[static_cast<size_t>(slot)];
  const uint64_t gen = local.gen.load(std::memory_order_relaxed);
  auto done = [&](int p) {
    return ReaderDone(*local.comm, rank.control, slot, gen, local.key, p);
  };
  if (!local.all_read) return local.one_reader < 0 || done(local.one_reader);
  const int n = local.comm->size();
  for (int p = 0; p < n; ++p) {
    if (p != local.comm->me() && !done(p)) return false;
  }
  return true;
}

std::vector<int> LateReaders(const Op& op) {
  const Binding* b = op.binding;
  RankState* rank = op.state;
  std::vector<int> late;
  auto look = [&](int slot) {
    LocalSlot& local = rank->slots[static_cast<size_t>(slot)];
    uint32_t idle = 0;
    // Held while it is looked at, so that nobody rewrites it meanwhile.
    if (!local.claimed.compare_exchange_strong(idle, 1,
                                               std::memory_order_acquire)) {
      return;
    }
    if (const Comm* comm = local.comm; comm != nullptr) {
      const uint64_t gen = local.gen.load(std::memory_order_relaxed);
      for (int p = 0; p < comm->size(); ++p) {
        const bool reads =
            local.all_read ? p != comm->me() : p == local.one_reader;
        const int world = comm->rank(p).world;
        if (reads && std::find(late.begin(), late.end(), world) == late.end() &&
            !ReaderDone(*comm, rank->control, slot, gen, local.key, p)) {
          late.push_back(world);
        }
      }
    }
    local.claimed.store(0, std::memory_order_release);
  };
  // The execution whose credit is due, else (the table is full) every slot.
  const uint64_t n = b->count.load(std::memory_order_relaxed);
  const int due = b->past[n % kWays].slot.load(std::memory_order_relaxed);
  if (due >= 0) look(due);
  for (int s = 0; s < kSlots && late.empty(); ++s) look(s);
  return late;
}

bool AllDrained(RankState* rank) {
  for (int slot = 0; slot < kSlots; ++slot) {
    // Who still reads for an aborted operation will not use it.
    const uint64_t state = StateOf(rank->control->slots[slot]);
    if (state == MakeState(GenOf(state), Phase::kAborted)) continue;
    if (!TakeSlot(rank, slot)) return false;
    rank->slots[static_cast<size_t>(slot)].claimed.store(
        0, std::memory_order_release);
  }
  return true;
}

bool TryClaim(Op* op) {
  Binding* b = op->binding;
  RankState* rank = op->state;
  const uint64_t n = b->count.load(std::memory_order_relaxed);
  // Credit: at most kWays operations of one instance await their readers.
  auto& past = b->past[n % kWays];
  const int before = past.slot.load(std::memory_order_relaxed);
  if (before >= 0) {
    LocalSlot& old = rank->slots[static_cast<size_t>(before)];
    if (old.gen.load(std::memory_order_acquire) ==
        past.gen.load(std::memory_order_relaxed)) {
      if (!TakeSlot(rank, before)) {
        // Another binding may hold it by now; then its operation was drained.
        if (old.gen.load(std::memory_order_acquire) ==
            past.gen.load(std::memory_order_relaxed)) {
          return false;
        }
      } else {
        old.claimed.store(0, std::memory_order_release);
      }
    }
  }
  const int home = HomeBucket(op->key);
  const int first = static_cast<int>(n & 1);
  const int order[kWays] = {first, first ^ 1, 2, 3};
  int slot = -1;
  bool displaced = false;
  for (int w = 0; w < kWays && slot < 0; ++w) {
    if (TakeSlot(rank, home * kWays + order[w])) slot = home * kWays + order[w];
  }
  for (int d = 1; d < kBuckets && slot < 0; ++d) {
    for (int w = 0; w < kWays && slot < 0; ++w) {
      const int s = (home + d) % kBuckets * kWays + w;
      if (TakeSlot(rank, s)) {
        slot = s;
        displaced = true;
      }
    }
  }
  if (slot < 0) return false;
  LocalSlot& local = rank->slots[static_cast<size_t>(slot)];
  Recycle(&rank->control->slots[slot]);
  if (displaced != local.displaced) {
    // seq_cst: a reader that misses the post in its home bucket and then reads
    // a zero here would have to be ordered before this, hence before Publish.
    if (displaced) {
      rank->control->displaced.fetch_add(1, std::memory_order_seq_cst);
    } else {
      rank->control->displaced.fetch_sub(1, std::memory_order_seq_cst);
    }
    local.displaced = displaced;
  }
  const uint64_t window_bytes = static_cast<uint64_t>(b->plan.window_bytes);
  Arena& arena = op->world().arena();
  if (!local.queued) GiveWindowBack(&local);
  if (window_bytes == 0) {
    op->window = nullptr;
  } else if (window_bytes <= kInlineBytes) {
    op->window = rank->control->slots[slot].inline_payload;
  } else if (window_bytes <= arena.geometry().eager_bytes) {
    op->window = arena.Payload(rank->control, slot);
  } else {
    op->slot = slot;
    TakeWindow(op, window_bytes);
  }
  op->slot = slot;
  op->gen = local.gen.load(std::memory_order_relaxed) + 1;
  local.gen.store(op->gen, std::memory_order_release);
  past.slot.store(slot, std::memory_order_relaxed);
  past.gen.store(op->gen, std::memory_order_relaxed);
  b->count.store(n + 1, std::memory_order_relaxed);
  local.comm = b->comm;
  local.key = op->key;
  local.all_read = b->all_read_me;
  local.one_reader = b->one_reader;
  const size_t leaves = b->instance->spec().leaves.size();
  local.in.assign(op->in, op->in + leaves);
  local.out.assign(op->out, op->out + leaves);
  local.results.clear();
  op->in = local.in.data();
  op->out = local.out.data();
  if (b->transport == Transport::kDirect) Expose(op);
  return true;
}

bool SlotOver(RankState* rank, int slot, uint64_t gen) {
  LocalSlot& local = rank->slots[static_cast<size_t>(slot)];
  if (local.gen.load(std::memory_order_acquire) != gen) return true;
  if (!TakeSlot(rank, slot)) return false;
  local.claimed.store(0, std::memory_order_release);
  return true;
}

void DropWindow(RankState* rank, int slot) {
  LocalSlot& local = rank->slots[static_cast<size_t>(slot)];
  if (local.window == nullptr || !TakeSlot(rank, slot)) return;
  GiveWindowBack(&local);
  local.claimed.store(0, std::memory_order_release);
}

void ReleaseSlot(Op* op) {
  LocalSlot& local = op->local();
  const bool large = local.window != nullptr && !local.queued;
  if (large) local.queued = true;
  const int slot = op->slot;
  RankState* rank = op->state;
  local.claimed.store(0, std::memory_order_release);
  if (!large) return;
  for (;;) {
    const TryLock lock(rank->windows_lock);
    if (lock.held()) {
      rank->windows.push_back(slot);
      return;
    }
    CpuRelax();
  }
}

}  // namespace strata::detail
