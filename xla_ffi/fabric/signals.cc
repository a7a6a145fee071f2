#include "fabric/signals.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

namespace strata {

void Recycle(Slot* s) {
  const uint64_t gen = GenOf(s->state.load(std::memory_order_relaxed));
  s->state.store(MakeState(gen, Phase::kFree), std::memory_order_release);
}

void WriteKey(Slot* s, const Key& k, const Description& d) {
  // release on each word: none becomes visible before state=FREE did.
  s->comm.store(k.comm, std::memory_order_release);
  s->site.store(k.site, std::memory_order_release);
  s->launch.store(k.launch, std::memory_order_release);
  s->instance.store(k.instance, std::memory_order_release);
  s->what.store(uint64_t{d.op} | uint64_t{d.reduce} << 8 |
                    uint64_t{d.dtype} << 16 | uint64_t{d.dims_used} << 24 |
                    uint64_t{d.leaves} << 32 | uint64_t{d.group_size} << 48,
                std::memory_order_relaxed);
  s->member_mask.store(d.member_mask, std::memory_order_relaxed);
  for (int i = 0; i < kShapeDims; ++i) {
    s->dims[i].store(d.dims[i], std::memory_order_relaxed);
  }
}

void Publish(Slot* s, uint64_t gen, uint64_t progress) {
  s->progress.store(progress, std::memory_order_relaxed);
  s->state.store(MakeState(gen, Phase::kPosted), std::memory_order_seq_cst);
}

bool Inspect(const Slot& s, Key* k, Description* d, uint64_t* progress,
             Phase* phase) {
  const uint64_t state = s.state.load(std::memory_order_seq_cst);
  if (PhaseOf(state) == Phase::kFree) return false;
  k->comm = s.comm.load(std::memory_order_acquire);
  k->site = s.site.load(std::memory_order_acquire);
  k->launch = s.launch.load(std::memory_order_acquire);
  k->instance = s.instance.load(std::memory_order_acquire);
  const uint64_t what = s.what.load(std::memory_order_acquire);
  d->op = what & 0xff;
  d->reduce = what >> 8 & 0xff;
  d->dtype = what >> 16 & 0xff;
  d->dims_used = what >> 24 & 0xff;
  d->leaves = what >> 32 & 0xffff;
  d->group_size = what >> 48 & 0xffff;
  d->member_mask = s.member_mask.load(std::memory_order_acquire);
  for (int i = 0; i < kShapeDims; ++i) {
    d->dims[i] = s.dims[i].load(std::memory_order_acquire);
  }
  *progress = s.progress.load(std::memory_order_acquire);
  const uint64_t again = s.state.load(std::memory_order_acquire);
  *phase = PhaseOf(again);
  return GenOf(again) == GenOf(state) && *phase != Phase::kFree;
}

void Sleep(Control* own, uint32_t seen, uint64_t nanoseconds) {
  timespec t;
  t.tv_sec = static_cast<time_t>(nanoseconds / 1000000000u);
  t.tv_nsec = static_cast<long>(nanoseconds % 1000000000u);
  // Not FUTEX_PRIVATE: peers ring from other processes.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&own->bell), FUTEX_WAIT, seen,
          &t, nullptr, 0);
}

void Wake(Control* peer, uint64_t my_bit) {
  // Cleared before the bell, so that a waiter which arms after this wake is
  // not taken for one that was woken by it.
  peer->wait_mask.fetch_and(~my_bit, std::memory_order_seq_cst);
  WakeAll(peer);
}

void WakeAll(Control* rw) {
  rw->bell.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&rw->bell), FUTEX_WAKE,
          INT_MAX, nullptr, nullptr, 0);
}

void RingExtents(Control* rw) {
  rw->extent_bell.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&rw->extent_bell), FUTEX_WAKE,
          INT_MAX, nullptr, nullptr, 0);
}

bool SleepExtents(Control* own, uint32_t seen, uint64_t nanoseconds) {
  timespec t;
  t.tv_sec = static_cast<time_t>(nanoseconds / 1000000000u);
  t.tv_nsec = static_cast<long>(nanoseconds % 1000000000u);
  const long r =
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&own->extent_bell),
              FUTEX_WAIT, seen, &t, nullptr, 0);
  return r == 0 || errno != ETIMEDOUT;
}

uint64_t NowNs() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u +
         static_cast<uint64_t>(t.tv_nsec);
}

}  // namespace strata
