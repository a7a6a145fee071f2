// Claiming a slot, posting, finding the peers' posts, running a stage.
#include <cstring>

#include "engine/kernels.h"
#include "engine/op.h"

namespace strata::detail {
namespace {

// Whether group position `p` will not read this rank's operation `key` any
// more: it acknowledged, its process is dead, its own part is aborted, or its
// launch is over or aborted and it has no part.  (An aborted launch may be
// followed by the next one while one of its operations still reads.)  Order of
// reads: entry before slots, so that a slot posted after the look belongs to a
// rank that sees its own abort before it reads.
bool ReaderDone(const Comm& comm, Control* control, int slot, uint64_t gen,
                const Key& key, int p) {
  if (Acked(AckWord(control, slot, p), gen)) return true;
  if (comm.world().Dead(comm.rank(p).process)) return true;
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

}  // namespace

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
    SweepWindows(rank);
    if (local.window_bytes < window_bytes) GiveWindowBack(&local);
    if (local.window == nullptr) {
      local.window = arena.Allocate(window_bytes);
      local.window_bytes = window_bytes;
      Count(op->world().counters().windows);
    }
    op->window = static_cast<unsigned char*>(local.window);
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
  op->in = local.in.data();
  op->out = local.out.data();
  return true;
}

void Post(Op* op) {
  Binding* b = op->binding;
  Slot* s = op->own();
  Counters& counters = op->world().counters();
  for (; op->stage < b->prologue; ++op->stage) {
    RunStage(*op, b->plan.stages[static_cast<size_t>(op->stage)]);
  }
  if (b->transport == Transport::kDirect) {
    Count(counters.direct_bytes, b->operand_bytes);
  } else if (static_cast<uint64_t>(b->plan.window_bytes) >
             op->world().arena().geometry().eager_bytes) {
    Count(counters.staged_bytes, b->operand_bytes);
  } else {
    Count(counters.eager_bytes, b->operand_bytes);
  }
  WriteKey(s, op->key, b->description);
  const LocalSlot& local = op->local();
  // Published by the state word; a window inside the slot needs no address.
  s->window.store(
      local.window == op->window ? reinterpret_cast<uint64_t>(op->window) : 0,
      std::memory_order_relaxed);
  s->inputs.store(reinterpret_cast<uint64_t>(local.in.data()),
                  std::memory_order_relaxed);
  s->outputs.store(reinterpret_cast<uint64_t>(local.out.data()),
                   std::memory_order_relaxed);
  Publish(s, op->gen, static_cast<uint64_t>(op->stage));
  WakeReaders(*op);
}

const Slot* FindSlot(const Comm& comm, int position, const Key& key, int likely,
                     uint64_t* gen) {
  const Control* c = comm.rank(position).shadow;
  const int home = HomeBucket(key);
  for (int w = 0; w < kWays; ++w) {
    const Slot* s = &c->slots[home * kWays + (likely ^ w)];
    if ((*gen = Match(*s, key)) != 0) return s;
  }
  if (c->displaced.load(std::memory_order_seq_cst) != 0) {
    for (const Slot& s : c->slots) {
      if ((*gen = Match(s, key)) != 0) return &s;
    }
  }
  return nullptr;
}

bool Find(const Op& op, int position, PeerPost* post) {
  const Comm& comm = op.comm();
  const Control* c = comm.rank(position).shadow;
  // Ranks advance alike, so the peer most likely used the way that we did.
  const int likely = op.slot >= 0 ? op.slot % kWays : 0;
  uint64_t gen;
  const Slot* s = FindSlot(comm, position, op.key, likely, &gen);
  if (s == nullptr) return false;
  post->slot = s;
  post->index = static_cast<int>(s - c->slots);
  post->gen = gen;
  const uint64_t window = s->window.load(std::memory_order_relaxed);
  // Of the source's window; this rank may have none of its own.
  const uint64_t bytes = op.binding->packed_bytes;
  post->window =
      window != 0 ? reinterpret_cast<const unsigned char*>(window)
      : bytes <= kInlineBytes
          ? s->inline_payload
          : op.world().arena().Payload(const_cast<Control*>(c), post->index);
  post->inputs = reinterpret_cast<const void* const*>(
      s->inputs.load(std::memory_order_relaxed));
  post->outputs = reinterpret_cast<void* const*>(
      s->outputs.load(std::memory_order_relaxed));
  return true;
}

int Ready(Op* op) {
  if (op->at == Op::At::kClaim) return TryClaim(op) ? 1 : 0;
  const Comm& comm = op->comm();
  if (op->at == Op::At::kExit) {
    // Exit rule: XLA may reuse operands and results once this op returns.
    const int n = comm.size();
    for (; op->cursor < static_cast<size_t>(n); ++op->cursor) {
      const int p = static_cast<int>(op->cursor);
      const bool reads = op->binding->all_read_me
                             ? p != comm.me()
                             : p == op->binding->one_reader;
      if (!reads ||
          ReaderDone(comm, op->state->control, op->slot, op->gen, op->key, p)) {
        continue;
      }
      if (!op->aborted) return 0;
      // Who has not posted will find this slot ABORTED before it reads.
      uint64_t gen;
      const Slot* s = FindSlot(comm, p, op->key, op->slot % kWays, &gen);
      if (s != nullptr && StateOf(*s) != MakeState(gen, Phase::kAborted)) {
        return 0;
      }
    }
    return 1;
  }
  const Stage& stage = op->binding->plan.stages[static_cast<size_t>(op->stage)];
  const uint64_t required = static_cast<uint64_t>(op->stage);
  for (; op->cursor < stage.needs.size(); ++op->cursor) {
    const int p = stage.needs[op->cursor];
    PeerPost& post = op->found[p];
    if (post.slot == nullptr && !Find(*op, p, &post)) return 0;
    // A request to abort is not an abort: Confirm decides.
    if (StateOf(*post.slot) == MakeState(post.gen, Phase::kAborted)) return -1;
    if (required > 0 && Progress(*post.slot) < required) return 0;
  }
  return 1;
}

int Missing(const Op& op) {
  switch (op.at) {
    case Op::At::kClaim:
      return -1;
    case Op::At::kExit:
      return op.cursor < static_cast<size_t>(op.comm().size())
                 ? static_cast<int>(op.cursor)
                 : -1;
    case Op::At::kStages:
      break;
  }
  const Stage& s = op.binding->plan.stages[static_cast<size_t>(op.stage)];
  return op.cursor < s.needs.size() ? s.needs[op.cursor] : -1;
}

void RunStage(const Op& op, const Stage& stage) {
  const int me = op.comm().me();
  auto read = [&](const Addr& a) -> const unsigned char* {
    const bool own = a.rank == me;
    switch (a.space) {
      case Space::kInput:
        return static_cast<const unsigned char*>(
                   own ? op.in[a.buffer] : op.found[a.rank].inputs[a.buffer]) +
               a.offset;
      case Space::kOutput:
        return static_cast<const unsigned char*>(
                   own ? op.out[a.buffer]
                       : op.found[a.rank].outputs[a.buffer]) +
               a.offset;
      case Space::kWindow:
        return (own ? op.window : op.found[a.rank].window) + a.offset;
      case Space::kZero:
        break;
    }
    return nullptr;
  };
  // Every stage so far writes its own rank's memory only.
  auto write = [&](const Addr& a) -> unsigned char* {
    return (a.space == Space::kWindow
                ? op.window
                : static_cast<unsigned char*>(op.out[a.buffer])) +
           a.offset;
  };
  for (const Slice& s : stage.slices) {
    if (s.src.space == Space::kZero) {
      ZeroBytes(write(s.dst), static_cast<size_t>(s.bytes));
    } else {
      CopyBytes(write(s.dst), read(s.src), static_cast<size_t>(s.bytes));
    }
  }
  const void* srcs[kMaxRanks];
  for (const Reduce& r : stage.reduces) {
    const int n = static_cast<int>(r.srcs.size());
    for (int i = 0; i < n; ++i) srcs[i] = read(r.srcs[static_cast<size_t>(i)]);
    ReduceN(srcs, n, write(r.dst), r.count, r.dtype, r.op);
  }
}

void WakeReaders(const Op& op) {
  const Comm& comm = op.comm();
  const uint64_t bit = RankBit(comm.self().world);
  for (int p : op.binding->plan.readers) {
    if (NeedsWake(comm.rank(p).shadow, bit)) {
      Wake(comm.rank(p).rw, bit);
      Count(comm.world().counters().wakes);
    }
  }
}

void AckSources(const Op& op, bool wake) {
  const Comm& comm = op.comm();
  const uint64_t bit = RankBit(comm.self().world);
  for (int p : op.binding->plan.sources) {
    const PeerPost& post = op.found[p];
    if (post.slot == nullptr) continue;
    Ack(AckWord(comm.rank(p).rw, post.index, comm.me()), post.gen);
  }
  if (!wake) return;
  AcksBeforeMasks();  // here the owner sleeps for them
  for (int p : op.binding->plan.sources) {
    if (NeedsWake(comm.rank(p).shadow, bit)) Wake(comm.rank(p).rw, bit);
  }
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
