// Owns: every word that two ranks share, every atomic access to them, and every
// wait.  No other file touches shared memory except through these functions
// (payload bytes are copied by the engine, ordered by the words below).
//
// Invariant: a rank's control block is written by that rank alone, except for
// what peers write through their private writable alias: the `acks` of a slot,
// the doorbell (`bell`, `wait_mask`), and `state` in one single step, from
// ABORT_REQ back to POSTED (Help).  Everything lives in a zero-filled memfd;
// all-zero is the valid initial state.
//
// Which store pairs with which load (docs/protocol.md tells the same story in
// prose; tests/protocol checks it):
//
//   Publish: slot.state=POSTED  seq_cst   ->  Find: slot.state      seq_cst
//     carries key, description, payload and initial progress to the reader.
//     seq_cst because two store-load races hang on it: POSTED against the
//     peer's wait_mask (lost wake-up) and POSTED against a peer's ABORT_REQ.
//   Advance: slot.progress      seq_cst   ->  Progress()            seq_cst
//     carries the bytes of the finished stages; same two races.
//   Recycle: slot.state=FREE    release, then key words release  ->
//     Find: key words acquire, then slot.state acquire again.  A seqlock: a
//     key word of a later operation is seen only together with a state that
//     differs from the first one read.
//   Ack: slot.acks[reader]      release   ->  Acked()               acquire
//     the reader's loads of the payload happen before the owner reuses it.
//   Abort: state=ABORT_REQ seq_cst, then the condition is read again seq_cst,
//     then CommitAbort (CAS to ABORTED)  ->  the finisher's StateOf() seq_cst,
//     which follows its Find/Progress loads, and Help (CAS back to POSTED).
//     One of the two CAS wins: the operation is aborted or it goes on, for all.
//   Comm entry: ordinal, aborted release -> acquire; read on slow paths only.
//   AnnounceExtent: extent_end  release   ->  ExtentOf()            acquire
//     a hint: memory beyond it works as well, so no race matters.
//   Arm: bell is read, wait_mask |= bit, then the condition is read again, all
//     seq_cst  ->  Wake: (after the condition's seq_cst store) wait_mask
//     seq_cst, then bell+1.  The bell is read first: a ring for an older event
//     between the two would otherwise take the bit away unseen.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__SANITIZE_THREAD__)
#define STRATACL_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define STRATACL_TSAN 1
#endif
#endif
#ifndef STRATACL_TSAN
#define STRATACL_TSAN 0
#endif

namespace strata {

inline constexpr int kMaxRanks = 256;      // of one job
inline constexpr int kMaxLocalRanks = 64;  // devices of one process
inline constexpr int kBuckets = 512;
inline constexpr int kWays = 4;
inline constexpr int kSlots = kBuckets * kWays;
inline constexpr int kInlineAcks = 16;
inline constexpr int kInlineBytes = 64;  // payload inside the slot itself
inline constexpr int kCommEntries = 1024;
inline constexpr int kShapeDims = 4;

enum class Phase : uint64_t {
  kFree = 0,
  kPosted = 1,
  kAbortReq = 2,
  kAborted = 3
};

// state = generation << 2 | phase.  Generations start at 1 and never repeat.
constexpr uint64_t MakeState(uint64_t gen, Phase p) {
  return gen << 2 | static_cast<uint64_t>(p);
}
constexpr uint64_t GenOf(uint64_t state) { return state >> 2; }
constexpr Phase PhaseOf(uint64_t state) {
  return static_cast<Phase>(state & 3);
}

struct Key {
  uint64_t comm = 0;
  uint64_t site = 0;
  uint64_t launch = 0;
  uint64_t instance = 0;  // clone index:12 | clone count:12 | iteration:40
  bool operator==(const Key&) const = default;
};

// What an error message needs to name the other side's call; never matched on.
struct Description {
  uint8_t op = 0, reduce = 0, dtype = 0, dims_used = 0;
  uint16_t leaves = 0, group_size = 0;
  uint64_t needs_mask = 0;  // bit (rank & 63) of every rank it reads
  uint64_t dims[kShapeDims] = {};
};

inline constexpr uint64_t kDone = ~uint64_t{0};

// Values of Slot::window; any other is an address in the owner's arena.
inline constexpr uint64_t kWindowInline = 0;  // inside the slot
inline constexpr uint64_t kWindowPayload =
    1;  // the slot's room behind the table

struct alignas(64) Slot {
  // line 0: what a reader needs to match and to find the bytes
  std::atomic<uint64_t> state;
  std::atomic<uint64_t> comm, site, launch, instance;
  std::atomic<uint64_t> window;   // where the bytes are, see kWindow* below
  std::atomic<uint64_t> inputs;   // address of the owner's pointer table, for
  std::atomic<uint64_t> outputs;  //   peers in the same address space only
  // line 1: a payload of at most kInlineBytes
  alignas(64) unsigned char inline_payload[kInlineBytes];
  // line 2: progress, then cold words
  alignas(64) std::atomic<uint64_t> progress;
  std::atomic<uint64_t> what;  // Description packed
  std::atomic<uint64_t> needs_mask;
  std::atomic<uint64_t> dims[kShapeDims];
  // line 3: acknowledgements of group positions 0..15; the rest follow in
  // Control::more_acks
  alignas(64) std::atomic<uint32_t> acks[kInlineAcks];
};
static_assert(sizeof(Slot) == 256);

struct alignas(64) CommEntry {
  std::atomic<uint64_t> hash;     // 0 = unused; set last
  std::atomic<uint64_t> ordinal;  // launches that touched the communicator
  std::atomic<uint64_t> aborted;  // highest ordinal whose operations aborted
  std::atomic<uint64_t> cause;    // ErrorKind | culprit rank << 8
  std::atomic<uint64_t> broken;   // ordinals are out of step for good
};

struct Control {
  // identity, written once at bootstrap
  alignas(64) std::atomic<uint64_t> nonce;
  // once the process has left the fabric, with nothing to read and all it
  // posted read; stays when the rest of the table goes
  std::atomic<uint64_t> left;
  // the process's heartbeat, for the idle rule of mismatch detection
  alignas(64) std::atomic<uint64_t> beat_ns;
  std::atomic<uint64_t> cpu_ns;
  alignas(64) std::atomic<uint64_t> wait_mask;
  std::atomic<uint32_t> bell;
  // how many bytes of the process's heap are present (first rank only), and
  // the bell of its registrar
  alignas(64) std::atomic<uint64_t> extent_end;
  std::atomic<uint32_t> extent_bell;
  alignas(64) std::atomic<uint64_t> displaced;  // posts that live outside their
                                                // home bucket
  Slot slots[kSlots];
  CommEntry comms[kCommEntries];
  std::atomic<uint32_t> more_acks[kSlots][kMaxRanks - kInlineAcks];
  // payloads of kInlineBytes < n <= eager bytes follow the struct
};

inline std::atomic<uint32_t>& AckWord(Control* c, int slot, int position) {
  return position < kInlineAcks ? c->slots[slot].acks[position]
                                : c->more_acks[slot][position - kInlineAcks];
}

// Owner.  Between Recycle and Publish the slot belongs to nobody.
void Recycle(Slot* s);
void WriteKey(Slot* s, const Key& k, const Description& d);
void Publish(Slot* s, uint64_t gen, uint64_t progress);
inline void Advance(Slot* s, uint64_t progress) {
  s->progress.store(progress, std::memory_order_seq_cst);
}
// Not awaited by anybody, so no store-load race: tells onlookers (mismatch
// detection) that the operation is over on this rank.
inline void MarkDone(Slot* s) {
  s->progress.store(kDone, std::memory_order_release);
}

// Reader.  Generation of the post with this key, or 0; stable until the
// reader acknowledges.
inline uint64_t Match(const Slot& s, const Key& k) {
  const uint64_t state = s.state.load(std::memory_order_seq_cst);
  if (PhaseOf(state) == Phase::kFree) return 0;
  if (s.launch.load(std::memory_order_acquire) != k.launch ||
      s.instance.load(std::memory_order_acquire) != k.instance ||
      s.site.load(std::memory_order_acquire) != k.site ||
      s.comm.load(std::memory_order_acquire) != k.comm) {
    return 0;
  }
  const uint64_t again = s.state.load(std::memory_order_acquire);
  // The phase may move on (POSTED <-> ABORT_REQ); the generation may not, and
  // FREE of the same generation means that the key words are the next ones.
  return GenOf(again) == GenOf(state) && PhaseOf(again) != Phase::kFree
             ? GenOf(state)
             : 0;
}
inline uint64_t Progress(const Slot& s) {
  return s.progress.load(std::memory_order_seq_cst);
}
inline uint64_t StateOf(const Slot& s) {
  return s.state.load(std::memory_order_seq_cst);
}
#if STRATACL_TSAN
// ThreadSanitizer knows no fences.  Here every acknowledgement is seq_cst by
// itself: the same guarantee, for a full barrier each instead of one for all.
inline constexpr std::memory_order kAckOrder = std::memory_order_seq_cst;
inline void AcksBeforeMasks() {}
#else
inline constexpr std::memory_order kAckOrder = std::memory_order_release;
// Between the acknowledgements of an operation and the loads of the owners'
// wait masks, where owners sleep for them: one half of a store-load race, the
// other half is Arm.
inline void AcksBeforeMasks() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}
#endif
inline void Ack(std::atomic<uint32_t>& word, uint64_t gen) {
  word.store(static_cast<uint32_t>(gen), kAckOrder);
}
inline bool Acked(const std::atomic<uint32_t>& word, uint64_t gen) {
  return word.load(std::memory_order_acquire) == static_cast<uint32_t>(gen);
}
// Reads key and description of whatever stands in the slot, for messages and
// mismatch detection; false if it is free or changed meanwhile.
bool Inspect(const Slot& s, Key* k, Description* d, uint64_t* progress,
             Phase* phase);

// Abort.  The owner stores ABORT_REQ, reads its condition again, and commits;
// a finisher whose conditions all held takes the request back.
inline void SetPhase(Slot* s, uint64_t gen, Phase p) {
  s->state.store(MakeState(gen, p), std::memory_order_seq_cst);
}
inline bool CommitAbort(Slot* s, uint64_t gen) {
  uint64_t expected = MakeState(gen, Phase::kAbortReq);
  return s->state.compare_exchange_strong(
      expected, MakeState(gen, Phase::kAborted), std::memory_order_seq_cst);
}
// True if the post stands: it was POSTED, or it is again.
inline bool Help(Slot* s, uint64_t gen) {
  uint64_t expected = MakeState(gen, Phase::kAbortReq);
  return s->state.compare_exchange_strong(expected,
                                          MakeState(gen, Phase::kPosted),
                                          std::memory_order_seq_cst) ||
         expected == MakeState(gen, Phase::kPosted);
}

// Waiting.  A bit stands for all ranks r with the same r & 63: a spurious wake
// is harmless, a missed one is not possible.
inline uint64_t RankBit(int rank) { return uint64_t{1} << (rank & 63); }
inline uint32_t Arm(Control* own, uint64_t bits) {
  const uint32_t seen = own->bell.load(std::memory_order_seq_cst);
  own->wait_mask.fetch_or(bits, std::memory_order_seq_cst);
  return seen;
}
// Sleeps until the bell moves on from `seen` or the time is over.
void Sleep(Control* own, uint32_t seen, uint64_t nanoseconds);
// The caller's store to the awaited word was seq_cst.  True if a system call
// was made.
inline bool NeedsWake(const Control* peer, uint64_t my_bit) {
  return (peer->wait_mask.load(std::memory_order_seq_cst) & my_bit) != 0;
}
void Wake(Control* peer_rw, uint64_t my_bit);
// Wakes whoever sleeps on that rank, whatever it waits for.
void WakeAll(Control* rw);

// Registration.  The bell is read before the words it stands for are looked
// at, so a ring in between ends the next sleep at once.
inline void AnnounceExtent(Control* own, uint64_t end) {
  own->extent_end.store(end, std::memory_order_release);
}
inline uint64_t ExtentOf(const Control* c) {
  return c->extent_end.load(std::memory_order_acquire);
}
inline uint32_t ArmExtents(const Control* own) {
  return own->extent_bell.load(std::memory_order_seq_cst);
}
void RingExtents(Control* rw);
// False if the time was over first.
bool SleepExtents(Control* own, uint32_t seen, uint64_t nanoseconds);

uint64_t NowNs();

inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace strata
