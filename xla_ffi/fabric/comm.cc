#include "fabric/comm.h"

#include <cstring>

namespace strata {

// FNV-1a, then a finisher: equal on every host and in every version of the
// standard library, as a key that crosses processes must be.
uint64_t HashBytes(const void* data, size_t bytes, uint64_t seed) {
  uint64_t h = 0xcbf29ce484222325u ^ (seed * 0x9e3779b97f4a7c15u);
  const unsigned char* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) h = (h ^ p[i]) * 0x100000001b3u;
  h ^= h >> 32;
  h *= 0xd6e8feb86659fd93u;
  h ^= h >> 32;
  return h == 0 ? 1 : h;
}

Comm::Comm(World* world, std::vector<int> members, int me)
    : world_(world), members_(std::move(members)), me_(me) {
  std::vector<int64_t> ids;
  for (int m : members_) {
    ids.push_back(world->rank(m).device_id);
    member_mask_ |= RankBit(m);
    one_process_ = one_process_ && world->rank(m).process == self().process;
  }
  hash_ = HashBytes(ids.data(), ids.size() * sizeof(ids[0]), 7);
  peer_entries_ =
      std::make_unique<std::atomic<const CommEntry*>[]>(members_.size());
  run_id_.store(INT64_MIN, std::memory_order_relaxed);
  entry_ = Claim();
}

CommEntry* Comm::Claim() {
  CommEntry* table = self().rw->comms;
  for (int i = 0; i < kCommEntries; ++i) {
    CommEntry* e = &table[(hash_ + static_cast<uint64_t>(i)) % kCommEntries];
    const uint64_t h = e->hash.load(std::memory_order_relaxed);
    if (h == hash_) return e;
    if (h == 0) {
      // release: who finds the hash finds zeroes or later values beside it.
      e->hash.store(hash_, std::memory_order_release);
      return e;
    }
  }
  throw Error(ErrorKind::kResourceExhausted,
              "more than " + std::to_string(kCommEntries) +
                  " different groups on one rank");
}

const CommEntry* Comm::PeerEntry(int position) const {
  auto& cached = peer_entries_[static_cast<size_t>(position)];
  // Idempotent cache; acquire/release only so that it is a clean publication.
  const CommEntry* e = cached.load(std::memory_order_acquire);
  if (e != nullptr) return e;
  const CommEntry* table = rank(position).shadow->comms;
  for (int i = 0; i < kCommEntries; ++i) {
    const CommEntry* at =
        &table[(hash_ + static_cast<uint64_t>(i)) % kCommEntries];
    const uint64_t h = at->hash.load(std::memory_order_acquire);
    if (h == hash_) {
      cached.store(at, std::memory_order_release);
      return at;
    }
    if (h == 0) return nullptr;
  }
  return nullptr;
}

uint64_t Comm::BeginLaunch(int64_t run_id, Failure* failure) {
  if (run_id_.load(std::memory_order_acquire) == run_id &&
      entry_->broken.load(std::memory_order_relaxed) == 0) {
    const uint64_t ordinal = ordinal_.load(std::memory_order_relaxed);
    // acq_rel: a new launch that finds zero has these operations behind it.
    in_flight_.fetch_add(1, std::memory_order_acq_rel);
    if (run_id_.load(std::memory_order_acquire) == run_id) return ordinal;
    EndOperation();  // another launch cut in; it is found out below
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (entry_->broken.load(std::memory_order_acquire) != 0) {
    const Failure why = Why();
    *failure = {why.kind,
                "this communicator is broken since an earlier launch failed (" +
                    why.message +
                    "); call stratacl_jax.shutdown() and initialize() on all "
                    "ranks to go on"};
    return 0;
  }
  const uint64_t ordinal = ordinal_.load(std::memory_order_relaxed);
  if (run_id_.load(std::memory_order_relaxed) == run_id) {
    in_flight_.fetch_add(1, std::memory_order_acq_rel);
    return ordinal;
  }
  bool overlap = false;
  for (int i = 0; i < kRecent; ++i) {
    overlap = overlap || (recent_used_[i] && recent_[i] == run_id);
  }
  // Operations of the former launch in flight: it is still running. (An
  // aborted launch may have left some that are about to notice.)
  if (in_flight_.load(std::memory_order_acquire) > 0 && ordinal != 0 &&
      entry_->aborted.load(std::memory_order_relaxed) < ordinal) {
    overlap = true;
  }
  if (overlap) {
    *failure = {ErrorKind::kInvalidUsage,
                "two Python threads launch programs with collectives on the "
                "same group of devices at the same time, so ranks cannot agree "
                "on an order; launch them from one thread, or hold one lock "
                "from the call to block_until_ready()"};
    Break(*failure, self().world);
    return 0;
  }
  recent_[recent_next_] = run_id;
  recent_used_[recent_next_] = true;
  recent_next_ = (recent_next_ + 1) % kRecent;
  ordinal_.store(ordinal + 1, std::memory_order_relaxed);
  entry_->ordinal.store(ordinal + 1, std::memory_order_release);
  run_id_.store(run_id, std::memory_order_release);
  in_flight_.fetch_add(1, std::memory_order_acq_rel);
  return ordinal + 1;
}

void Comm::Explain(const Failure& why) {
  std::lock_guard<std::mutex> lock(why_mutex_);
  if (!why_ || entry_->broken.load(std::memory_order_relaxed) == 0) why_ = why;
}

Failure Comm::Why() const {
  std::lock_guard<std::mutex> lock(why_mutex_);
  return why_;
}

void Comm::AbortLaunch(uint64_t ordinal, const Failure& why, int culprit) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (entry_->aborted.load(std::memory_order_relaxed) >= ordinal) return;
  Explain(why);
  entry_->cause.store(
      static_cast<uint64_t>(why.kind) | static_cast<uint64_t>(culprit) << 8,
      std::memory_order_release);
  entry_->aborted.store(ordinal, std::memory_order_seq_cst);
}

void Comm::Break(const Failure& why, int culprit) {
  Explain(why);
  entry_->cause.store(
      static_cast<uint64_t>(why.kind) | static_cast<uint64_t>(culprit) << 8,
      std::memory_order_release);
  entry_->broken.store(1, std::memory_order_seq_cst);
  WakeGroup();
}

void Comm::WakeGroup() const {
  for (int p = 0; p < size(); ++p) WakeAll(rank(p).rw);
}

Comm* CommRegistry::Get(const std::vector<int>& members, int me) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& c : comms_) {
    if (c->me() == me && c->members() == members) return c.get();
  }
  comms_.push_back(std::make_unique<Comm>(world_, members, me));
  return comms_.back().get();
}

}  // namespace strata
