// The engine when an operation cannot end well: deadlines, one verdict for all
// ranks, launches after an abort, calls that differ.  Ranks are threads of one
// process, or all are taken step by step by one thread, in a chosen order.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <thread>

#include "engine/pool.h"
#include "fleet.h"

namespace strata {
namespace {

using fleet::AllOf;
using fleet::CheckFailure;
using fleet::CheckFine;
using fleet::Data;
using fleet::kMs;
using fleet::Mix;
using fleet::Node;
using fleet::Stepped;
using harness::Deadline;
using harness::Random;
using harness::RunThreads;
using harness::Seeds;

// Never destroyed: its idle threads stay for a while.
PendingPool& Pool() {
  static auto* pool = new PendingPool();
  return *pool;
}

void SleepUs(uint64_t us) {
  std::this_thread::sleep_for(std::chrono::microseconds(us));
}

Settings Short(uint64_t timeout_ns, bool direct = true) {
  Settings s;
  s.inplace_ns = 0;
  s.timeout_ns = timeout_ns;
  s.direct = direct;
  s.chunk_bytes = 1024;
  return s;
}

// Steps a call until it ends, without ever blocking for long.
void Finish(Stepped* call) {
  while (call->pending()) call->Step(1 * kMs);
}

TEST(ADeadlineNamesTheMissingAndTheNextLaunchIsClean) {
  const Deadline deadline("ADeadlineNamesTheMissing", 60);
  for (int64_t count : {4, 100, 4000}) {
    for (bool direct : {true, false}) {
      Node node(3, Short(30 * kMs, direct));
      Instance* i = node.Compile(fleet::Psum(AllOf(3), count));
      Failure failures[2];
      RunThreads(2, [&](int rank) {
        failures[rank] = node.RunChecked(i, rank, 1, 1);
        CheckFailure(failures[rank], ErrorKind::kDeadlineExceeded,
                     {"rank 2", "psum of float32", "launch 1", "over 3 ranks"});
      });
      // One of them has told the other.
      const std::string all = failures[0].message + failures[1].message;
      CHECK(all.find("still missing: rank 2; rank ") != std::string::npos);
      CHECK(all.find("STRATACL_TIMEOUT") != std::string::npos);
      // Who comes late raises at once and reads nothing.
      const uint64_t begin = NowNs();
      Stepped late(&node, i, 2, 1, 1);
      Finish(&late);
      CheckFailure(late.failure(), ErrorKind::kDeadlineExceeded, {"gave up"});
      CHECK(NowNs() - begin < 20'000 * kMs);
      node.world().mutable_settings().timeout_ns = 100'000 * kMs;
      RunThreads(3, [&](int rank) {
        for (uint64_t salt = 2; salt < 12; ++salt) {
          CheckFine(node.RunChecked(i, rank, static_cast<int64_t>(salt), salt));
        }
      });
    }
  }
}

// That a test has met both ends, or it has shown nothing.
struct Verdicts {
  std::atomic<int> fine{0}, failed{0};
  void Add(bool good) { (good ? fine : failed) += 1; }
  void CheckBoth() const {
    const std::string text = std::to_string(fine.load()) + " fine, " +
                             std::to_string(failed.load()) + " failed";
    std::printf("  %s\n", text.c_str());
    CHECK_MSG(fine.load() > 0 && failed.load() > 0, text);
  }
};

// Deadlines that strike while posts arrive: whatever happens, all ranks agree
// on each call, and results of calls that succeed are right.
void AgreeOnVerdicts(uint64_t seed, Spec spec, int ranks, bool direct,
                     int algorithm, Verdicts* verdicts) {
  constexpr int kLaunches = 60;
  Random setup(seed);
  Settings s = Short(200'000 + setup.Below(1'500'000), direct);
  s.algorithm = algorithm;
  s.inplace_ns = setup.OneIn(2) ? 0 : 100'000;
  Node node(ranks, s);
  Instance* i = node.Compile(spec);
  std::vector<std::vector<int>> good(kLaunches, std::vector<int>(ranks, -1));
  RunThreads(ranks, [&](int rank) {
    Random random(seed * 1000 + static_cast<uint64_t>(rank));
    for (int launch = 0; launch < kLaunches; ++launch) {
      if (random.OneIn(3)) SleepUs(random.Below(1500));
      const Failure f =
          node.RunChecked(i, rank, launch + 1, static_cast<uint64_t>(launch));
      if (f) CheckFailure(f, ErrorKind::kDeadlineExceeded);
      good[static_cast<size_t>(launch)][static_cast<size_t>(rank)] = !f;
    }
  });
  for (int launch = 0; launch < kLaunches; ++launch) {
    for (int verdict : good[static_cast<size_t>(launch)]) {
      CHECK_MSG(verdict == good[static_cast<size_t>(launch)][0],
                "launch " + std::to_string(launch + 1) + " of seed " +
                    std::to_string(seed));
    }
    verdicts->Add(good[static_cast<size_t>(launch)][0] == 1);
  }
}

TEST(VerdictsAgree) {
  const Deadline deadline("VerdictsAgree", 200);
  Verdicts verdicts;
  for (uint64_t seed : Seeds("VerdictsAgree", 6)) {
    const int n = seed % 2 ? 2 : 4;
    const std::vector<int> group = AllOf(n);
    AgreeOnVerdicts(seed, fleet::Psum(group, 10), n, true, 0, &verdicts);
    AgreeOnVerdicts(seed, fleet::Psum(group, 3000), n, true, 2, &verdicts);
    AgreeOnVerdicts(seed, fleet::Psum(group, 3000), n, false, 2, &verdicts);
    AgreeOnVerdicts(seed, fleet::Barrier(group), n, true, 0, &verdicts);
  }
  verdicts.CheckBoth();
}

// Permutations agree on nothing, but a value that arrives is right, nothing
// hangs, and launches stay in step.
TEST(PermutationsUnderDeadlines) {
  const Deadline deadline("PermutationsUnderDeadlines", 120);
  Verdicts verdicts;
  for (uint64_t seed : Seeds("PermutationsUnderDeadlines", 4)) {
    for (int64_t count : {8, 3000}) {
      Random setup(seed);
      const Settings s = Short(200'000 + setup.Below(1'500'000), seed % 2);
      Node node(3, s);
      Instance* i = node.Compile(
          fleet::Ppermute(AllOf(3), count, {{0, 1}, {1, 2}, {2, 0}}));
      RunThreads(3, [&](int rank) {
        Random random(seed * 1000 + static_cast<uint64_t>(rank));
        for (int launch = 1; launch <= 60; ++launch) {
          if (random.OneIn(3)) SleepUs(random.Below(1500));
          const Failure f =
              node.RunChecked(i, rank, launch, static_cast<uint64_t>(launch));
          if (f) CheckFailure(f, ErrorKind::kDeadlineExceeded);
          verdicts.Add(!f);
        }
      });
      node.world().mutable_settings().timeout_ns = 100'000 * kMs;
      RunThreads(3, [&](int rank) {
        for (int launch = 61; launch <= 70; ++launch) {
          CheckFine(
              node.RunChecked(i, rank, launch, static_cast<uint64_t>(launch)));
        }
      });
    }
  }
  verdicts.CheckBoth();
}

// Several calls a launch in flight at once; one of them gives up while others
// are anywhere.  Then all ranks begin the next launch.
TEST(SiblingsOfAnAbortedCall) {
  const Deadline deadline("SiblingsOfAnAbortedCall", 120);
  Verdicts seen;
  for (uint64_t seed : Seeds("SiblingsOfAnAbortedCall", 4)) {
    constexpr int kRanks = 3;
    Node node(kRanks, Short(2 * kMs, seed % 2));
    std::vector<Instance*> calls;
    for (int64_t c = 0; c < 6; ++c) {
      calls.push_back(
          node.Compile(fleet::Psum(AllOf(kRanks), c % 2 ? 20 : 2000, c)));
    }
    std::atomic<int> verdicts[40][6][kRanks] = {};
    RunThreads(kRanks, [&](int rank) {
      Random random(seed * 1000 + static_cast<uint64_t>(rank));
      for (int launch = 0; launch < 40; ++launch) {
        std::vector<Data> data;
        std::vector<size_t> order;
        for (size_t c = 0; c < calls.size(); ++c) {
          order.push_back(c);
          data.push_back(fleet::DataOf(
              calls[c]->spec(), Mix(static_cast<uint64_t>(launch), c), rank));
        }
        random.Shuffle(order);
        std::latch ended(static_cast<std::ptrdiff_t>(calls.size()));
        bool failed = false;
        for (size_t c : order) {
          // As XLA does: after a failure it starts no more of the program.
          if (failed) {
            ended.count_down();
            continue;
          }
          if (random.OneIn(10)) SleepUs(random.Below(3000));
          std::unique_ptr<Op> pending;
          Failure failure;
          const Outcome o = node.Begin(calls[c], rank, launch + 1, data[c],
                                       &pending, &failure);
          if (o == Outcome::kPending) {
            Pool().Submit(
                std::move(pending), [&, c](Outcome end, const Failure&) {
                  verdicts[launch][c][rank] = end == Outcome::kDone ? 1 : 2;
                  ended.count_down();
                });
            continue;
          }
          verdicts[launch][c][rank] = o == Outcome::kDone ? 1 : 2;
          failed = o == Outcome::kFailed;
          ended.count_down();
        }
        ended.wait();
        for (size_t c = 0; c < calls.size(); ++c) {
          if (verdicts[launch][c][rank] != 1) continue;
          fleet::CheckResult(calls[c]->spec(),
                             Mix(static_cast<uint64_t>(launch), c), rank,
                             data[c]);
        }
      }
    });
    for (auto& launch : verdicts) {
      for (auto& call : launch) {
        int good = 0, bad = 0;
        for (auto& verdict : call) {
          good += verdict == 1;
          bad += verdict != 1;
        }
        CHECK(good == 0 || bad == 0);
        seen.Add(good != 0);
      }
    }
  }
  seen.CheckBoth();
}

// A launch that fails in one communicator before it came to another leaves the
// other's ordinals in doubt; those it had touched stay good.
TEST(UntouchedCommunicatorsBreakAndTouchedOnesDoNot) {
  const Deadline deadline("UntouchedCommunicatorsBreak", 60);
  Node node(3, Short(20 * kMs));
  Instance* touched = node.Compile(fleet::Psum({0, 1}, 10));
  Instance* failing = node.Compile(fleet::Psum({0, 1, 2}, 10));
  Instance* untouched = node.Compile(fleet::Psum({1, 0}, 10));
  RunThreads(2, [&](int rank) {
    CheckFine(node.RunChecked(touched, rank, 1, 1));
    const Failure f = node.RunChecked(failing, rank, 1, 1);
    CheckFailure(f, ErrorKind::kDeadlineExceeded, {"rank 2"});
  });
  RunThreads(2, [&](int rank) {
    CheckFine(node.RunChecked(touched, rank, 2, 2));
    CheckFailure(node.RunChecked(untouched, rank, 3, 3),
                 ErrorKind::kDeadlineExceeded,
                 {"broken", "shutdown()", "initialize()"});
  });
  // Rank 2 counts the failed launch when it comes to it, and is in step again.
  CheckFailure(node.RunChecked(failing, 2, 1, 1), ErrorKind::kDeadlineExceeded);
  node.world().mutable_settings().timeout_ns = 100'000 * kMs;
  RunThreads(
      3, [&](int rank) { CheckFine(node.RunChecked(failing, rank, 4, 4)); });
}

// A peer that has broken the communicator ends waits on it at once.
TEST(ABrokenPeerEndsTheWait) {
  const Deadline deadline("ABrokenPeerEndsTheWait", 60);
  Node node(2, Short(100'000 * kMs));
  Instance* i = node.Compile(fleet::Psum({0, 1}, 10));
  Stepped waiting(&node, i, 0, 1, 1);
  CHECK(waiting.pending());
  node.Of(i, 1)->comm->Break({ErrorKind::kInvalidUsage, "for a test"}, 1);
  Finish(&waiting);
  CheckFailure(waiting.failure(), ErrorKind::kInvalidUsage, {"rank 1"});
}

// A full credit names the readers that are late.
TEST(ACreditDeadlineNamesTheReader) {
  const Deadline deadline("ACreditDeadlineNamesTheReader", 60);
  Node node(2, Short(20 * kMs, false));
  Instance* i = node.Compile(fleet::Ppermute({0, 1}, 3000, {{0, 1}}));
  for (uint64_t salt = 0; salt < kWays; ++salt) {
    CHECK(Stepped(&node, i, 0, 1, salt).done());
  }
  Stepped more(&node, i, 0, 1, kWays);
  Finish(&more);
  CheckFailure(more.failure(), ErrorKind::kDeadlineExceeded,
               {"no posting slot", "rank 1"});
  // The reader that comes now has missed the launch.
  Stepped late(&node, i, 1, 1, 0);
  Finish(&late);
  CHECK(late.done() || late.failed());
  node.world().mutable_settings().timeout_ns = 100'000 * kMs;
  for (uint64_t salt = 0; salt < 10; ++salt) {
    CHECK(Stepped(&node, i, 0, 2, salt).done());
    CHECK(Stepped(&node, i, 1, 2, salt).done());
  }
}

// Rule 1: a peer's launch is over and the call never came.
TEST(AProgramWithoutTheCallIsAMismatch) {
  const Deadline deadline("AProgramWithoutTheCallIsAMismatch", 60);
  Node node(2, Short(100'000 * kMs));
  Instance* with = node.Compile(fleet::Psum({0, 1}, 10, 1));
  Instance* to_be = node.Compile(fleet::Ppermute({0, 1}, 10, {{1, 0}}, 2));
  RunThreads(2, [&](int rank) {
    if (rank == 1) {
      // Sends and is done, twice: two launches without the psum.
      CheckFine(node.RunChecked(to_be, 1, 1, 1));
      CheckFine(node.RunChecked(to_be, 1, 2, 1));
      return;
    }
    CheckFailure(node.RunChecked(with, 0, 1, 1), ErrorKind::kMismatch,
                 {"psum of float32[10] over 2 ranks",
                  "rank 1 finished its launch without it"});
  });
}

// Rule 3: each waits for what the other has not called, and nobody computes.
TEST(CrossedCallsAreAMismatch) {
  const Deadline deadline("CrossedCallsAreAMismatch", 60);
  Node node(2, Short(100'000 * kMs));
  Instance* a = node.Compile(fleet::Psum({0, 1}, 10, 1));
  Instance* b = node.Compile(fleet::Psum({0, 1}, 20, 2));
  RunThreads(2, [&](int rank) {
    CheckFailure(node.RunChecked(rank == 0 ? a : b, rank, 1, 1),
                 ErrorKind::kMismatch,
                 {"float32[10]", "float32[20]", "same program"});
  });
  // A clean launch afterwards.
  RunThreads(2, [&](int rank) {
    CheckFine(node.RunChecked(a, rank, 2, 2));
    CheckFine(node.RunChecked(b, rank, 2, 2));
  });
}

// A rank that computes for long is no mismatch.
TEST(ASlowRankIsNoMismatch) {
  const Deadline deadline("ASlowRankIsNoMismatch", 60);
  Node node(2, Short(100'000 * kMs));
  Instance* i = node.Compile(fleet::Psum({0, 1}, 10));
  RunThreads(2, [&](int rank) {
    if (rank == 1) SleepUs(400'000);
    CheckFine(node.RunChecked(i, rank, 1, 1));
  });
  CHECK(node.world().counters().sleeps.load() > 0);
}

}  // namespace
}  // namespace strata
