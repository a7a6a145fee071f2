// The shared words: the seqlock of a slot, acknowledgements, phases, and the
// doorbell, each with the threads that race for it in the engine.
#include "fabric/signals.h"

#include <sched.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "harness.h"

namespace strata {
namespace {

using harness::Deadline;
using harness::OneControl;
using harness::Random;
using harness::RunThreads;
using harness::Seeds;

// Sixteen keys that share their words, so that a torn read of two of them is a
// third one and would be noticed.
Key KeyOf(uint64_t gen) {
  return {1 + (gen & 1), 11 + (gen >> 1 & 1), 21 + (gen >> 2 & 1),
          31 + (gen >> 3 & 1)};
}

Description DescriptionOf(uint64_t gen) {
  Description d;
  d.op = static_cast<uint8_t>(gen % 5 + 1);
  d.reduce = static_cast<uint8_t>(gen % 3);
  d.dtype = static_cast<uint8_t>(gen % 17);
  d.dims_used = 4;
  d.leaves = static_cast<uint16_t>(gen);
  d.group_size = static_cast<uint16_t>(gen * 3);
  d.member_mask = gen * 5;
  for (int i = 0; i < kShapeDims; ++i) {
    d.dims[i] = gen * 7 + static_cast<uint64_t>(i);
  }
  return d;
}

void CheckDescription(const Description& d, uint64_t gen) {
  const Description want = DescriptionOf(gen);
  CHECK_EQ(d.op, want.op);
  CHECK_EQ(d.reduce, want.reduce);
  CHECK_EQ(d.dtype, want.dtype);
  CHECK_EQ(d.leaves, want.leaves);
  CHECK_EQ(d.group_size, want.group_size);
  CHECK_EQ(d.member_mask, want.member_mask);
  for (int i = 0; i < kShapeDims; ++i) CHECK_EQ(d.dims[i], want.dims[i]);
}

void Post(Slot* s, uint64_t gen) {
  Recycle(s);
  WriteKey(s, KeyOf(gen), DescriptionOf(gen));
  Publish(s, gen, gen * 2);
}

TEST(MatchFindsOnlyThePostedKey) {
  const OneControl control;
  Slot* s = &control->slots[3];
  CHECK_EQ(Match(*s, Key{}), 0u);  // all-zero is FREE, whatever the key
  Post(s, 1);
  CHECK_EQ(Match(*s, KeyOf(1)), 1u);
  CHECK_EQ(Match(*s, KeyOf(2)), 0u);
  CHECK_EQ(Progress(*s), 2u);
  Advance(s, 9);
  CHECK_EQ(Progress(*s), 9u);
  MarkDone(s);
  CHECK_EQ(Progress(*s), kDone);
  SetPhase(s, 1, Phase::kAbortReq);
  CHECK_EQ(Match(*s, KeyOf(1)), 1u);
  CHECK_EQ(StateOf(*s), MakeState(1, Phase::kAbortReq));
  SetPhase(s, 1, Phase::kAborted);
  CHECK_EQ(Match(*s, KeyOf(1)), 1u);
  Recycle(s);
  CHECK_EQ(Match(*s, KeyOf(1)), 0u);
  CHECK_EQ(GenOf(StateOf(*s)), 1u);
}

TEST(InspectReadsTheWholePost) {
  const OneControl control;
  Slot* s = &control->slots[0];
  Key key;
  Description d;
  uint64_t progress;
  Phase phase;
  CHECK(!Inspect(*s, &key, &d, &progress, &phase));
  Post(s, 12345);
  CHECK(Inspect(*s, &key, &d, &progress, &phase));
  CHECK(key == KeyOf(12345));
  CheckDescription(d, 12345);
  CHECK_EQ(progress, 24690u);
  CHECK(phase == Phase::kPosted);
}

// A reader that holds no acknowledgement looks at a slot that is recycled all
// the time: what it matches or inspects is one post, never parts of two.
TEST(SeqlockNeverMixesPosts) {
  const Deadline deadline("SeqlockNeverMixesPosts", 60);
  for (uint64_t seed : Seeds("SeqlockNeverMixesPosts")) {
    const OneControl control;
    Slot* s = &control->slots[0];
    std::atomic<bool> stop{false};
    std::atomic<uint64_t> matched{0}, inspected{0};
    RunThreads(4, [&](int me) {
      Random random(seed * 10 + static_cast<uint64_t>(me));
      if (me == 0) {
        for (uint64_t gen = 1; gen < 300000u / harness::kSlow; ++gen) {
          Post(s, gen);
          if (random.OneIn(4)) {
            SetPhase(s, gen, Phase::kAbortReq);
            SetPhase(s, gen, Phase::kPosted);
          }
          if (random.OneIn(300)) sched_yield();
        }
        stop.store(true);
        return;
      }
      uint64_t last = 0;
      while (!stop.load(std::memory_order_relaxed)) {
        const uint64_t want = random.Below(16);
        const uint64_t gen = Match(*s, KeyOf(want));
        if (gen != 0) {
          CHECK_EQ(gen & 15, want);
          CHECK(gen >= last);
          last = gen;
          matched.fetch_add(1, std::memory_order_relaxed);
        }
        Key key;
        Description d;
        uint64_t progress;
        Phase phase;
        if (Inspect(*s, &key, &d, &progress, &phase)) {
          const uint64_t is = d.member_mask / 5;
          CHECK(key == KeyOf(is));
          CheckDescription(d, is);
          CHECK_EQ(progress, is * 2);
          inspected.fetch_add(1, std::memory_order_relaxed);
        }
      }
    });
    CHECK(matched.load() > 0 && inspected.load() > 0);
  }
}

// The protocol of a slot as the engine runs it: the owner waits for every
// acknowledgement before it writes the payload again.  The payload is plain
// memory: ThreadSanitizer proves that the words order it.
TEST(AcknowledgementsOrderThePayload) {
  const Deadline deadline("AcknowledgementsOrderThePayload", 60);
  constexpr uint64_t kPosts = 4000;
  const int positions[] = {0, 5, kInlineAcks, 200};
  const OneControl control;
  Slot* s = &control->slots[7];
  RunThreads(5, [&](int me) {
    if (me == 4) {
      for (uint64_t gen = 1; gen <= kPosts; ++gen) {
        for (int p : positions) {
          while (!Acked(AckWord(control.get(), 7, p), gen - 1)) sched_yield();
        }
        Recycle(s);
        WriteKey(s, KeyOf(gen), DescriptionOf(gen));
        for (unsigned char& byte : s->inline_payload) {
          byte = static_cast<unsigned char>(gen);
        }
        Publish(s, gen, 1);
        sched_yield();
        s->dims[0].store(gen, std::memory_order_relaxed);
        Advance(s, 2);
      }
      return;
    }
    for (uint64_t gen = 1; gen <= kPosts; ++gen) {
      while (Match(*s, KeyOf(gen)) != gen) sched_yield();
      for (unsigned char byte : s->inline_payload) {
        CHECK_EQ(byte, static_cast<unsigned char>(gen));
      }
      while (Progress(*s) < 2) sched_yield();
      CHECK_EQ(s->dims[0].load(std::memory_order_relaxed), gen);
      Ack(AckWord(control.get(), 7, positions[me]), gen);
    }
  });
}

// Waits as the engine does; a wake-up that is lost shows as a sleep that ends
// by its timeout.
void Await(Control* own, uint64_t bits, const std::atomic<uint64_t>& word,
           uint64_t at_least) {
  constexpr uint64_t kSleepNs = 20'000'000'000u;
  while (word.load(std::memory_order_seq_cst) < at_least) {
    const uint32_t seen = Arm(own, bits);
    if (word.load(std::memory_order_seq_cst) >= at_least) return;
    const uint64_t before = NowNs();
    Sleep(own, seen, kSleepNs);
    CHECK_MSG(NowNs() - before < kSleepNs / 2, "a wake-up was lost");
  }
}

void Spin(uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) CpuRelax();
}

TEST(NoWakeUpIsLostInPingPong) {
  const Deadline deadline("NoWakeUpIsLostInPingPong", 60);
  for (uint64_t seed : Seeds("NoWakeUpIsLostInPingPong")) {
    const OneControl controls[2];
    std::atomic<uint64_t> words[2] = {};
    RunThreads(2, [&](int me) {
      Random random(seed * 10 + static_cast<uint64_t>(me));
      Control* own = controls[me].get();
      Control* peer = controls[1 - me].get();
      for (uint64_t round = 1; round <= 5000; ++round) {
        if (me == 1) Await(own, RankBit(0), words[0], round);
        Spin(random.OneIn(3) ? random.Below(400) : random.Below(8));
        words[me].store(round, std::memory_order_seq_cst);
        if (NeedsWake(peer, RankBit(me))) Wake(peer, RankBit(me));
        if (me == 0) Await(own, RankBit(1), words[1], round);
      }
    });
  }
}

// Several operations of one rank sleep on one bell, for several peers, two of
// which share a bit of the mask.
TEST(NoWakeUpIsLostAmongManyWaiters) {
  const Deadline deadline("NoWakeUpIsLostAmongManyWaiters", 60);
  const int ranks[] = {1, 2, 66};
  for (uint64_t seed : Seeds("NoWakeUpIsLostAmongManyWaiters")) {
    const OneControl control;
    std::atomic<uint64_t> asked[3] = {}, given[3] = {};
    constexpr uint64_t kRounds = 2000;
    RunThreads(6, [&](int me) {
      const int i = me % 3;
      Random random(seed * 10 + static_cast<uint64_t>(me));
      for (uint64_t round = 1; round <= kRounds; ++round) {
        if (me < 3) {
          asked[i].store(round, std::memory_order_release);
          Await(control.get(), RankBit(ranks[i]), given[i], round);
          continue;
        }
        while (asked[i].load(std::memory_order_acquire) < round) sched_yield();
        Spin(random.Below(200));
        given[i].store(round, std::memory_order_seq_cst);
        if (NeedsWake(control.get(), RankBit(ranks[i]))) {
          Wake(control.get(), RankBit(ranks[i]));
        }
      }
    });
  }
}

TEST(SleepEndsByItself) {
  const Deadline deadline("SleepEndsByItself", 20);
  const OneControl control;
  const uint64_t begin = NowNs();
  Sleep(control.get(), Arm(control.get(), RankBit(1)), 20'000'000);
  CHECK(NowNs() - begin >= 19'000'000);
  // A bell that has moved on does not let anybody sleep.
  const uint32_t seen = Arm(control.get(), RankBit(1));
  CHECK(NeedsWake(control.get(), RankBit(65)));
  CHECK(!NeedsWake(control.get(), RankBit(2)));
  Wake(control.get(), RankBit(1));
  CHECK(!NeedsWake(control.get(), RankBit(1)));
  const uint64_t again = NowNs();
  Sleep(control.get(), seen, 10'000'000'000u);
  CHECK(NowNs() - again < 5'000'000'000u);
}

}  // namespace
}  // namespace strata
