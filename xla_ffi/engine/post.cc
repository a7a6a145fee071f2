// Posting, finding the peers' posts, running a stage.
#include "engine/fault.h"
#include "engine/kernels.h"
#include "engine/op.h"

namespace strata::detail {
void Post(Op* op) {
  Binding* b = op->binding;
  Slot* s = op->own();
  Counters& counters = op->world().counters();
  for (; op->stage < b->prologue; ++op->stage) {
    RunStage(*op, b->plan.stages[static_cast<size_t>(op->stage)]);
  }
  if (b->transport == Transport::kDirect) {
    StageOutsiders(op);
  } else if (static_cast<uint64_t>(b->plan.window_bytes) >
             op->world().arena().geometry().eager_bytes) {
    Count(counters.staged_bytes, b->operand_bytes);
  } else {
    Count(counters.eager_bytes, b->operand_bytes);
  }
  WriteKey(s, op->key, b->description);
  const LocalSlot& local = op->local();
  // Published by the state word.  The post itself says where its bytes are: a
  // reader that nobody reads has a plan without a window and cannot know.
  uint64_t window = kWindowInline;
  if (op->window != nullptr && op->window == local.window) {
    window = reinterpret_cast<uint64_t>(op->window);
  } else if (static_cast<uint64_t>(b->plan.window_bytes) > kInlineBytes) {
    window = kWindowPayload;
  }
  s->window.store(window, std::memory_order_relaxed);
  s->inputs.store(reinterpret_cast<uint64_t>(op->table),
                  std::memory_order_relaxed);
  s->outputs.store(op->table == nullptr ? 0
                                        : reinterpret_cast<uint64_t>(
                                              op->table + local.in.size()),
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
  post->window =
      window == kWindowInline ? s->inline_payload
      : window == kWindowPayload
          ? op.world().arena().Payload(const_cast<Control*>(c), post->index)
          : reinterpret_cast<const unsigned char*>(window);
  post->inputs = reinterpret_cast<const void* const*>(
      s->inputs.load(std::memory_order_relaxed));
  post->outputs = reinterpret_cast<const void* const*>(
      s->outputs.load(std::memory_order_relaxed));
  return true;
}

namespace {

// Tells the registrar which memory of a peer is about to be used.
void Reach(const Op& op, int position) {
  const Rank& rank = op.comm().rank(position);
  const Binding& b = *op.binding;
  const PeerPost& post = op.found[position];
  if (rank.process == op.comm().self().process) return;
  Registrar& registrar = op.world().registrar();
  for (size_t i = 0; i < b.in_bytes.size(); ++i) {
    registrar.Use(rank.process, post.inputs[i], b.in_bytes[i]);
    if (b.stored_to) {
      registrar.Use(rank.process, post.outputs[i], b.out_bytes[i]);
    }
  }
}

}  // namespace

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
    if (post.slot == nullptr) {
      if (!Find(*op, p, &post)) return 0;
      if (op->binding->transport == Transport::kDirect) Reach(*op, p);
    }
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
  auto write = [&](const Addr& a) -> unsigned char* {
    return (a.space == Space::kWindow
                ? op.window
                : static_cast<unsigned char*>(op.out[a.buffer])) +
           a.offset;
  };
  // A peer's result is written through the engine's own view of its memory.
  auto store = [&](const Addr& a) -> unsigned char* {
    void* at = const_cast<void*>(op.found[a.rank].outputs[a.buffer]);
    return static_cast<unsigned char*>(op.world().arena().WritableAt(
               op.comm().rank(a.rank).process, at)) +
           a.offset;
  };
  for (const Slice& s : stage.slices) {
    if (s.src.space == Space::kZero) {
      ZeroBytes(write(s.dst), static_cast<size_t>(s.bytes));
    } else {
      const auto bytes = static_cast<size_t>(s.bytes);
      if (s.dst.space == Space::kOutput) {
        CopyResult(write(s.dst), read(s.src), bytes);
      } else {
        CopyBytes(write(s.dst), read(s.src), bytes);
      }
    }
  }
  const void* srcs[kMaxRanks];
  void* dsts[kMaxRanks];
  for (const Reduce& r : stage.reduces) {
    const int n = static_cast<int>(r.srcs.size());
    for (int i = 0; i < n; ++i) srcs[i] = read(r.srcs[static_cast<size_t>(i)]);
    dsts[0] = write(r.dst);
    int copies = 1;
    for (const Addr& a : r.copies) dsts[copies++] = store(a);
    ReduceToAll(srcs, n, dsts, copies, r.count, r.dtype, r.op);
    if (copies > 1) MaybeFault(FaultPoint::kMidStores);
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

}  // namespace strata::detail
