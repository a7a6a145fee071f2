// The engine between processes: every operator, and ranks that are killed or
// stopped at points of the protocol or at any moment.
#include <chrono>
#include <thread>

#include "engine/fault.h"
#include "fleet.h"
#include "forked.h"

namespace strata {
namespace {

using fleet::AllOf;
using fleet::CheckFailure;
using fleet::CheckFine;
using fleet::Floats;
using fleet::Ints;
using fleet::kMs;
using fleet::Mix;
using fleet::Node;
using forked::Board;
using forked::Job;
using harness::Deadline;
using harness::kSpan;
using harness::Random;
using harness::RunThreads;
using harness::Seeds;

// The process as a member of the fabric; uses rounds 1 to 3 of the board.
std::unique_ptr<Node> Enter(int me, int n, int devices, uint64_t base,
                            Board* board, const Settings& settings) {
  auto node = std::make_unique<Node>(forked::MeetInArenas(me, n, base, board),
                                     devices, settings);
  for (int p = 0; p < n; ++p) {
    const int pid = board->pid[p].load();
    if (p != me) node->world().Watch(p, forked::OpenPidfd(pid), pid);
  }
  node->Start();
  board->Meet(n, 3);
  return node;
}

uint64_t BaseFor(int processes) {
  return harness::FreeBase(static_cast<size_t>(processes) * kSpan);
}

void SleepUs(uint64_t us) {
  std::this_thread::sleep_for(std::chrono::microseconds(us));
}

Settings Pipelined(uint64_t timeout_ns = 100'000 * kMs) {
  Settings s;
  s.timeout_ns = timeout_ns;
  s.chunk_bytes = 1024;
  return s;
}

TEST(EveryCallInEveryLayout) {
  const Deadline deadline("EveryCallInEveryLayout", 150);
  const std::pair<int, int> layouts[] = {{2, 1}, {3, 1}, {2, 2}, {5, 1}};
  for (const auto& [processes, devices] : layouts) {
    for (int algorithm : {1, 2}) {
      Settings s = Pipelined();
      s.algorithm = algorithm;
      s.inplace_ns = algorithm == 1 ? 0 : 300'000;
      const int n = processes * devices;
      const uint64_t base = BaseFor(processes);
      const std::pair<int, int> layout = {processes, devices};
      Job job(processes, 100, [&, layout](int me, Board* board) {
        const auto [count, local] = layout;
        const auto node = Enter(me, count, local, base, board, s);
        std::vector<Instance*> calls;
        for (const Spec& spec : fleet::EveryCall(AllOf(n))) {
          calls.push_back(node->Compile(spec));
        }
        RunThreads(local, [&, first = me * local](int d) {
          const int rank = first + d;
          Random random(static_cast<uint64_t>(rank));
          for (int64_t launch = 1; launch <= 4; ++launch) {
            for (size_t c = 0; c < calls.size(); ++c) {
              if (random.OneIn(20)) SleepUs(random.Below(300));
              CheckFine(
                  node->RunChecked(calls[c], rank, launch,
                                   Mix(static_cast<uint64_t>(launch), c)));
            }
          }
        });
        // Whoever leaves first would be lost to the others.
        board->Meet(count, 4);
        CHECK_EQ(node->world().counters().aborts.load(), 0u);
      });
      job.Join();
    }
  }
}

// More ranks than a wait mask has bits.
TEST(MoreRanksThanMaskBits) {
  const Deadline deadline("MoreRanksThanMaskBits", 150);
  constexpr int kDevices = 33;
  const uint64_t base = BaseFor(2);
  Job job(2, 120, [base](int me, Board* board) {
    const auto node = Enter(me, 2, kDevices, base, board, Pipelined());
    Instance* sum = node->Compile(fleet::Psum(AllOf(2 * kDevices), 40));
    RunThreads(kDevices, [&](int d) {
      for (uint64_t salt = 0; salt < 4; ++salt) {
        CheckFine(node->RunChecked(sum, me * kDevices + d, 1, salt));
      }
    });
    board->Meet(2, 4);
  });
  job.Join();
}

// A call of three ranks, and what becomes of it if one of them is killed.
struct Killing {
  Spec spec;
  FaultPoint last_fatal;  // dying up to here fails the survivors' call
};

std::vector<Killing> Killings() {
  const std::vector<int> all = AllOf(3);
  return {
      {fleet::Psum(all, 8), FaultPoint::kBeforePost},
      {fleet::Psum(all, 200), FaultPoint::kBeforePost},
      // Stages follow that need the victim.
      {fleet::Psum(all, 3000), FaultPoint::kAfterPost},
      {fleet::Call(OpKind::kAllGather, all, {Floats(1000)}),
       FaultPoint::kAfterPost},
      {fleet::Barrier(all), FaultPoint::kBeforePost},
      {fleet::Ppermute(all, 20, {{0, 1}, {1, 2}, {2, 0}}),
       FaultPoint::kBeforePost},
  };
}

void SurviveAKill(const Killing& killing, FaultPoint point, int victim) {
  const uint64_t base = BaseFor(3);
  const bool mesh = killing.spec.op != OpKind::kPpermute;
  const bool fatal = point <= killing.last_fatal;
  Job job(3, 60, [&](int me, Board* board) {
    Settings s = Pipelined();
    s.algorithm = static_cast<int>(Algorithm::kTwoPhase);
    const auto node = Enter(me, 3, 1, base, board, s);
    Instance* call = node->Compile(killing.spec);
    node->NextModule();
    std::vector<int> living;
    for (int r = 0; r < 3; ++r) {
      if (r != victim) living.push_back(r);
    }
    Instance* among_living = node->Compile(fleet::Psum(living, 3000));
    for (int64_t launch = 1; launch <= 3; ++launch) {
      CheckFine(node->RunChecked(call, me, launch, 1));
    }
    if (me == victim) {
      fault.point.store(static_cast<int>(point));
      (void)node->RunChecked(call, me, 4, 2);
      CHECK(false);  // it should not have lived to see this
    }
    const uint64_t begin = NowNs();
    const Failure struck = node->RunChecked(call, me, 4, 2);
    board->outcome[4][me].store(struck ? 2 : 1);
    const std::string name = "rank " + std::to_string(victim) + " (pid " +
                             std::to_string(board->pid[victim].load()) + ")";
    if (struck) {
      CheckFailure(struck, ErrorKind::kPeerLost, {name.c_str(), "died"});
    }
    if (mesh) CHECK_EQ(!struck, !fatal);
    // What needs the dead fails from now on; what does not goes on.
    for (int64_t launch = 5; launch < 10; ++launch) {
      const Failure next = node->RunChecked(call, me, launch, 3);
      const std::vector<uint16_t>& sources = node->Of(call, me)->plan.sources;
      if (next || std::count(sources.begin(), sources.end(), victim) != 0) {
        CheckFailure(next, ErrorKind::kPeerLost, {name.c_str()});
      }
    }
    CHECK(NowNs() - begin < 20'000 * kMs);
    for (int64_t launch = 11; launch <= 13; ++launch) {
      CheckFine(node->RunChecked(among_living, me, launch,
                                 static_cast<uint64_t>(launch)));
    }
    // Leaving is a death to the others.
    board->words[0].fetch_add(1);
    while (board->words[0].load() < 2) sched_yield();
  });
  job.Join({victim});
}

TEST(AnyRankMayDieAnywhere) {
  const Deadline deadline("AnyRankMayDieAnywhere", 250);
  for (const Killing& killing : Killings()) {
    for (FaultPoint point : {FaultPoint::kBeforePost, FaultPoint::kAfterPost,
                             FaultPoint::kMidStages, FaultPoint::kBeforeAck,
                             FaultPoint::kAfterAck}) {
      for (int victim : {0, 2}) SurviveAKill(killing, point, victim);
    }
  }
}

// Rank 0 dies having asked to abort.  Nobody waits for it to decide: its
// operand is there, so those that have all they need succeed.
TEST(ARequestOfTheDeadCountsAsPosted) {
  const Deadline deadline("ARequestOfTheDeadCountsAsPosted", 60);
  const uint64_t base = BaseFor(3);
  Job job(3, 50, [base](int me, Board* board) {
    const auto node = Enter(me, 3, 1, base, board,
                            Pipelined((me == 0 ? 100 : 100'000) * kMs));
    Instance* call = node->Compile(fleet::Psum(AllOf(3), 200));
    if (me == 0)
      fault.point.store(static_cast<int>(FaultPoint::kAbortRequested));
    if (me == 2) {
      while (!node->world().Dead(0)) sched_yield();
      SleepUs(100'000);  // rank 1 has noticed, too
    }
    CheckFine(node->RunChecked(call, me, 1, 1));
    board->words[0].fetch_add(1);
    while (board->words[0].load() < 2) sched_yield();
  });
  job.Join({0});
}

// A rank that is killed at any moment of a stream of launches: the survivors
// agree on every launch, and have exact values up to the last.
TEST(DeathAtAnyMoment) {
  const Deadline deadline("DeathAtAnyMoment", 200);
  for (uint64_t seed : Seeds("DeathAtAnyMoment", 8)) {
    constexpr int kRanks = 4;
    Random setup(seed);
    const int victim = static_cast<int>(setup.Below(kRanks));
    const uint64_t after_us = setup.Below(20'000);
    const int64_t count = seed % 2 ? 100 : 3000;
    const uint64_t base = BaseFor(kRanks);
    Job job(kRanks, 100, [&](int me, Board* board) {
      Settings s = Pipelined();
      s.algorithm = seed % 4 < 2 ? 1 : 2;
      const auto node = Enter(me, kRanks, 1, base, board, s);
      Instance* call = node->Compile(fleet::Psum(AllOf(kRanks), count));
      std::thread killer;
      if (me == victim) {
        killer = std::thread([&] {
          SleepUs(after_us);
          kill(getpid(), SIGKILL);
        });
      }
      int64_t launch = 0;
      Failure failure;
      while (!failure) {
        ++launch;
        failure =
            node->RunChecked(call, me, launch, static_cast<uint64_t>(launch));
      }
      if (me == victim) killer.join();
      CheckFailure(failure, ErrorKind::kPeerLost,
                   {("rank " + std::to_string(victim)).c_str()});
      board->words[me].store(static_cast<uint64_t>(launch));
      board->words[60].fetch_add(1);
      while (board->words[60].load() < kRanks - 1) sched_yield();
    });
    job.Join({victim});
    const uint64_t ended = job.board()->words[victim == 0 ? 1 : 0].load();
    for (int r = 0; r < kRanks; ++r) {
      if (r != victim) CHECK_EQ(job.board()->words[r].load(), ended);
    }
  }
}

// A rank is stopped past the others' deadline and wakes up.
void Stopped(const Spec& spec, FaultPoint point) {
  const uint64_t base = BaseFor(3);
  constexpr int kVictim = 1;
  Job job(3, 60, [&](int me, Board* board) {
    Settings s = Pipelined((me == kVictim ? 100'000 : 300) * kMs);
    s.algorithm = static_cast<int>(Algorithm::kTwoPhase);
    const auto node = Enter(me, 3, 1, base, board, s);
    Instance* call = node->Compile(spec);
    CheckFine(node->RunChecked(call, me, 1, 1));
    if (me == kVictim) {
      fault.signal.store(SIGSTOP);
      fault.point.store(static_cast<int>(point));
    }
    const Failure f = node->RunChecked(call, me, 2, 2);
    CheckFailure(f, ErrorKind::kDeadlineExceeded, {"rank 1"});
    // What belongs to the survivors stays theirs when the other wakes.
    const fleet::Data canary = fleet::DataOf(spec, 77, me);
    fault.point.store(0);
    board->words[0].fetch_add(1);
    while (board->words[0].load() < 3) SleepUs(1000);
    CHECK(canary.in[0] == fleet::Operand(spec, 77, me, 0));
    node->world().mutable_settings().timeout_ns = 100'000 * kMs;
    for (int64_t launch = 3; launch <= 8; ++launch) {
      CheckFine(
          node->RunChecked(call, me, launch, static_cast<uint64_t>(launch)));
    }
    board->Meet(3, 4);
  });
  job.WaitStopped(kVictim);
  while (job.board()->words[0].load() < 2) SleepUs(1000);
  kill(job.pid(kVictim), SIGCONT);
  job.Join();
}

TEST(AStoppedRankWakesTooLate) {
  const Deadline deadline("AStoppedRankWakesTooLate", 120);
  const std::vector<int> all = AllOf(3);
  Stopped(fleet::Psum(all, 8), FaultPoint::kBeforePost);
  Stopped(fleet::Psum(all, 3000), FaultPoint::kBeforePost);
  Stopped(fleet::Psum(all, 3000), FaultPoint::kAfterPost);
  Stopped(fleet::Call(OpKind::kAllGather, all, {Ints(2000)}),
          FaultPoint::kAfterPost);
}

// Stopped with all its posts made: the others never waited for it.
TEST(AStoppedRankThatIsNotNeeded) {
  const Deadline deadline("AStoppedRankThatIsNotNeeded", 60);
  const uint64_t base = BaseFor(2);
  Job job(2, 50, [base](int me, Board* board) {
    const auto node = Enter(me, 2, 1, base, board, Pipelined(300 * kMs));
    Instance* call = node->Compile(fleet::Psum({0, 1}, 100));
    if (me == 1) {
      fault.signal.store(SIGSTOP);
      fault.point.store(static_cast<int>(FaultPoint::kMidStages));
    }
    CheckFine(node->RunChecked(call, me, 1, 1));
    fault.point.store(0);
    board->words[0].fetch_add(1);
    while (board->words[0].load() < 2) SleepUs(1000);
    for (int64_t launch = 2; launch <= 8; ++launch) {
      node->world().mutable_settings().timeout_ns = 100'000 * kMs;
      CheckFine(
          node->RunChecked(call, me, launch, static_cast<uint64_t>(launch)));
    }
    board->Meet(2, 4);
  });
  job.WaitStopped(1);
  while (job.board()->words[0].load() < 1) SleepUs(1000);
  kill(job.pid(1), SIGCONT);
  job.Join();
}

// Rank 2 calls something else; everybody is told, and what the two called.
TEST(DifferentCallsAreAMismatch) {
  const Deadline deadline("DifferentCallsAreAMismatch", 120);
  const std::vector<int> all = AllOf(3);
  const Spec usual = fleet::Psum(all, 64);
  const std::pair<Spec, const char*> others[] = {
      {fleet::Psum(all, 65), "psum of float32[65]"},
      {fleet::Psum(all, 5000), "psum of float32[5000]"},
      {fleet::Call(OpKind::kPsum, all, {Ints(64)}), "psum of int32[64]"},
      {fleet::Call(OpKind::kAllGather, all, {Floats(64)}),
       "all_gather of float32[64]"},
      {fleet::Call(OpKind::kPsum, all, {Floats(64), Ints(1)}),
       "and 1 more arrays"},
      {fleet::Barrier(all), "barrier over 3 ranks"},
  };
  for (const auto& [other, text] : others) {
    const uint64_t base = BaseFor(3);
    const std::pair<Spec, const char*> theirs = {other, text};
    Job job(3, 60, [&, theirs](int me, Board* board) {
      const auto node = Enter(me, 3, 1, base, board, Pipelined());
      const Spec both = fleet::Psum(AllOf(3), 7, 9);
      Instance* call = node->Compile(me == 2 ? theirs.first : usual);
      Instance* same = node->Compile(both);
      CheckFine(node->RunChecked(same, me, 1, 1));
      const uint64_t begin = NowNs();
      CheckFailure(
          node->RunChecked(call, me, 2, 1), ErrorKind::kMismatch,
          {"psum of float32[64] over 3 ranks", theirs.second, "rank 2"});
      CHECK(NowNs() - begin < 20'000 * kMs);
      // Ordinals still agree.
      for (int64_t launch = 3; launch <= 6; ++launch) {
        CheckFine(
            node->RunChecked(same, me, launch, static_cast<uint64_t>(launch)));
      }
      board->Meet(3, 4);
    });
    job.Join();
  }
}

// A child that a rank forks is no rank, and its end is nobody's death.
TEST(AForkedChildDisturbsNobody) {
  const Deadline deadline("AForkedChildDisturbsNobody", 60);
  const uint64_t base = BaseFor(2);
  Job job(2, 50, [base](int me, Board* board) {
    const auto node = Enter(me, 2, 1, base, board, Pipelined());
    Instance* call = node->Compile(fleet::Psum({0, 1}, 3000));
    for (int64_t launch = 1; launch <= 5; ++launch) {
      CHECK(!InForkedChild());
      const int child = me == 0 ? fork() : -1;
      if (child == 0) _exit(InForkedChild() ? 33 : 34);
      CheckFine(node->RunChecked(call, me, launch, 1));
      if (child < 0) continue;
      int status = 0;
      CHECK_EQ(waitpid(child, &status, 0), child);
      CHECK_EQ(WEXITSTATUS(status), 33);
    }
    CHECK(!node->world().Dead(1 - me));
    board->Meet(2, 4);
  });
  job.Join();
}

// The parent stops processes for a moment, again and again, while deadlines of
// the same order strike.
TEST(VerdictsAgreeThoughRanksAreStopped) {
  const Deadline deadline("VerdictsAgreeThoughRanksAreStopped", 200);
  uint64_t fine = 0, failed = 0;
  for (uint64_t seed : Seeds("VerdictsAgreeThoughRanksAreStopped", 6)) {
    constexpr int kRanks = 3, kLaunches = 200;
    const uint64_t base = BaseFor(kRanks);
    Job job(kRanks, 120, [&](int me, Board* board) {
      Random random(seed * 10 + static_cast<uint64_t>(me));
      Settings s = Pipelined(500'000 + 500'000 * random.Below(4));
      s.algorithm = seed % 4 < 2 ? 1 : 2;
      const auto node = Enter(me, kRanks, 1, base, board, s);
      Instance* call =
          node->Compile(fleet::Psum(AllOf(kRanks), seed % 2 ? 100 : 3000));
      for (int64_t launch = 1; launch <= kLaunches; ++launch) {
        if (random.OneIn(10)) SleepUs(random.Below(1000));
        const Failure f =
            node->RunChecked(call, me, launch, static_cast<uint64_t>(launch));
        if (f) CheckFailure(f, ErrorKind::kDeadlineExceeded);
        board->outcome[launch][me].store(f ? 2 : 1);
      }
      board->words[60].fetch_add(1);
      while (board->words[60].load() < kRanks) SleepUs(100);
    });
    Random random(seed);
    while (job.board()->words[60].load() < kRanks) {
      const int pid = job.pid(static_cast<int>(random.Below(kRanks)));
      kill(pid, SIGSTOP);
      SleepUs(random.Below(3000));
      kill(pid, SIGCONT);
      SleepUs(random.Below(3000));
    }
    job.Join();
    for (int launch = 1; launch <= kLaunches; ++launch) {
      const int verdict = job.board()->outcome[launch][0].load();
      CHECK(verdict != 0);
      (verdict == 1 ? fine : failed) += 1;
      for (int r = 1; r < kRanks; ++r) {
        CHECK_MSG(job.board()->outcome[launch][r].load() == verdict,
                  "launch " + std::to_string(launch) + ", seed " +
                      std::to_string(seed));
      }
    }
  }
  CHECK_MSG(fine > 0 && failed > 0, std::to_string(fine) + " fine, " +
                                        std::to_string(failed) + " failed");
}

}  // namespace
}  // namespace strata
