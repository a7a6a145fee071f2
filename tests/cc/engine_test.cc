// The engine on ranks that are threads of one process: every operator over
// every transport against its definition, calls in any order, operations that
// run ahead, and the limits of tables, credit and memory.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <map>
#include <thread>

#include "engine/pool.h"
#include "fleet.h"

namespace strata {
namespace {

using fleet::AllOf;
using fleet::CheckFailure;
using fleet::CheckFine;
using fleet::Data;
using fleet::Floats;
using fleet::Ints;
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

Settings Stepping() {
  Settings s;
  s.inplace_ns = 0;
  return s;
}

void Doze(Random& random, uint64_t one_in, uint64_t at_most_us) {
  if (!random.OneIn(one_in)) return;
  std::this_thread::sleep_for(
      std::chrono::microseconds(random.Below(at_most_us)));
}

void RunEveryCall(int n, const Settings& settings, int launches,
                  uint64_t seed) {
  Node node(n, settings);
  std::vector<Instance*> calls;
  for (const Spec& s : fleet::EveryCall(AllOf(n)))
    calls.push_back(node.Compile(s));
  RunThreads(n, [&](int rank) {
    Random random(seed * 100 + static_cast<uint64_t>(rank));
    for (int launch = 1; launch <= launches; ++launch) {
      for (int iteration = 0; iteration < 3; ++iteration) {
        for (size_t c = 0; c < calls.size(); ++c) {
          Doze(random, 40, 300);
          const auto salt =
              Mix(static_cast<uint64_t>(launch * 8 + iteration), c);
          CheckFine(node.RunChecked(calls[c], rank, launch, salt));
        }
      }
    }
  });
  CHECK_EQ(node.world().counters().aborts.load(), 0u);
}

TEST(EveryCallOnEveryTransport) {
  const Deadline deadline("EveryCallOnEveryTransport", 100);
  for (uint64_t seed : Seeds("EveryCallOnEveryTransport", 1)) {
    Random random(seed);
    for (int n : {2, 3, 5}) {
      for (bool direct : {true, false}) {
        for (int algorithm : {1, 2}) {
          Settings s;
          s.direct = direct;
          s.algorithm = algorithm;
          s.chunk_bytes = size_t{1} << (8 + 2 * random.Below(4));
          s.inplace_ns = random.OneIn(2) ? 0 : 50'000;
          s.spin_ns = random.OneIn(2) ? 0 : 5'000;
          s.yield_ns = random.OneIn(2) ? 0 : 10'000;
          RunEveryCall(n, s, 2, seed);
        }
      }
    }
  }
}

// Who sleeps is woken by the post it waits for, not by its next look.
TEST(PostsEndSleeps) {
  const Deadline deadline("PostsEndSleeps", 100);
  Settings s;
  s.inplace_ns = 100'000 * fleet::kMs;
  Node node(2, s);
  Instance* i = node.Compile(fleet::Psum({0, 1}, 8));
  std::atomic<uint64_t> posting{0};
  std::vector<uint64_t> late;
  RunThreads(2, [&](int rank) {
    for (uint64_t salt = 0; salt < 41; ++salt) {
      if (rank == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        posting.store(NowNs());
      }
      CheckFine(node.RunChecked(i, rank, 1, salt));
      if (rank == 0) late.push_back(NowNs() - posting.load());
    }
  });
  std::sort(late.begin(), late.end());
  CHECK(node.world().counters().sleeps.load() > 0);
  // The next look would come up to 50 ms later, 25 ms on average.
  CHECK_MSG(late[20] < 15 * fleet::kMs, std::to_string(late[20]) + " ns");
}

// More ranks than a slot has acknowledgement words.
TEST(ManyRanks) {
  const Deadline deadline("ManyRanks", 60);
  for (bool direct : {true, false}) {
    Settings s;
    s.direct = direct;
    s.chunk_bytes = 2048;
    s.algorithm = direct ? 1 : 2;
    Node node(20, s);
    Instance* sum = node.Compile(fleet::Psum(AllOf(20), 1201));
    Instance* gather =
        node.Compile(fleet::Call(OpKind::kAllGather, AllOf(20), {Ints(17)}));
    RunThreads(20, [&](int rank) {
      for (uint64_t salt = 0; salt < 6; ++salt) {
        CheckFine(node.RunChecked(sum, rank, 1, salt));
        CheckFine(node.RunChecked(gather, rank, 1, salt));
      }
    });
  }
}

// Independent calls, copies of one call among them: each rank starts them in an
// order of its own and leaves what does not end at once to the pool.
TEST(CallsInAnyOrder) {
  const Deadline deadline("CallsInAnyOrder", 100);
  for (uint64_t seed : Seeds("CallsInAnyOrder", 4)) {
    constexpr int kRanks = 4;
    Settings s;
    s.inplace_ns = seed % 2 ? 0 : 20'000;
    s.direct = seed / 2 % 2;
    s.chunk_bytes = 1024;
    Node node(kRanks, s);
    std::vector<Instance*> calls;
    for (const Spec& spec : fleet::EveryCall(AllOf(kRanks))) {
      calls.push_back(node.Compile(spec));
      calls.push_back(node.Compile(spec));
    }
    RunThreads(kRanks, [&](int rank) {
      Random random(seed * 100 + static_cast<uint64_t>(rank));
      for (int launch = 1; launch <= 4; ++launch) {
        std::vector<size_t> order;
        std::vector<Data> data;
        for (size_t c = 0; c < calls.size(); ++c) {
          order.push_back(c);
          data.push_back(fleet::DataOf(
              calls[c]->spec(), Mix(static_cast<uint64_t>(launch), c), rank));
        }
        random.Shuffle(order);
        std::latch ended(static_cast<std::ptrdiff_t>(calls.size()));
        std::vector<Failure> failures(calls.size());
        for (size_t c : order) {
          Doze(random, 20, 300);
          std::unique_ptr<Op> pending;
          const Outcome o = node.Begin(calls[c], rank, launch, data[c],
                                       &pending, &failures[c]);
          if (o != Outcome::kPending) {
            ended.count_down();
            continue;
          }
          Pool().Submit(std::move(pending), [&, c](Outcome, const Failure& f) {
            failures[c] = f;
            ended.count_down();
          });
        }
        ended.wait();
        for (size_t c = 0; c < calls.size(); ++c) {
          CheckFine(failures[c]);
          fleet::CheckResult(calls[c]->spec(),
                             Mix(static_cast<uint64_t>(launch), c), rank,
                             data[c]);
        }
      }
    });
    CHECK_EQ(Pool().pending(), 0);
  }
}

// Several groups of one call, one of them a single rank, and groups that share
// ranks: each communicator counts its own launches.
TEST(GroupsCountTheirOwnLaunches) {
  const Deadline deadline("GroupsCountTheirOwnLaunches", 60);
  Node node(5, Settings{});
  const std::vector<std::vector<int>> halves = {{3, 0}, {1, 4}, {2}};
  Spec split = fleet::Psum(halves[0], 400);
  split.groups.clear();
  for (const auto& half : halves) {
    split.groups.emplace_back();
    for (int r : half) split.groups.back().push_back(fleet::DeviceOf(r));
  }
  Instance* in_halves = node.Compile(split);
  node.NextModule();
  Instance* in_all = node.Compile(fleet::Psum(AllOf(5), 33));
  RunThreads(5, [&](int rank) {
    int64_t run_id = 0;
    for (uint64_t salt = 1; salt <= 10; ++salt) {
      const Comm& half = *node.Of(in_halves, rank)->comm;
      const Data d =
          fleet::DataOf(fleet::Psum(half.members(), 400), salt, half.me());
      CheckFine(node.Run(in_halves, rank, ++run_id, d));
      fleet::CheckResult(fleet::Psum(half.members(), 400), salt, half.me(), d);
      if (salt % 3 == 0) {
        CheckFine(node.RunChecked(in_all, rank, ++run_id, salt));
      }
    }
    const Comm& all = *node.Of(in_all, rank)->comm;
    CHECK_EQ(all.OrdinalOf(run_id), 0u);  // the last launch was of a half
    CHECK(all.PeerEntry((rank + 1) % 5) != nullptr);
    CHECK_EQ(all.PeerEntry((rank + 1) % 5)->aborted.load(), 0u);
  });
  CHECK_EQ(node.Of(in_all, 0)->comm->PeerEntry(1)->ordinal.load(), 3u);
}

// A source is done before its reader comes, up to four executions of one call;
// then it waits for an acknowledgement.
TEST(OneSidedRunsAheadUpToItsCredit) {
  const Deadline deadline("OneSidedRunsAheadUpToItsCredit", 60);
  for (int64_t count : {4, 100, 5000}) {
    Settings s = Stepping();
    s.direct = false;
    s.chunk_bytes = 4096;
    Node node(2, s);
    Instance* i = node.Compile(fleet::Ppermute({0, 1}, count, {{0, 1}}));
    constexpr uint64_t kAhead = kWays;
    for (uint64_t salt = 0; salt < kAhead; ++salt) {
      CHECK(Stepped(&node, i, 0, 1, salt).done());
    }
    for (uint64_t salt = kAhead; salt < 20; ++salt) {
      Stepped source(&node, i, 0, 1, salt);
      CHECK(source.pending());
      CHECK(source.Step(200'000) == Outcome::kPending);
      CHECK(Stepped(&node, i, 1, 1, salt - kAhead).done());
      CHECK(source.Step() == Outcome::kDone);
    }
    for (uint64_t salt = 20 - kAhead; salt < 20; ++salt) {
      CHECK(Stepped(&node, i, 1, 1, salt).done());
    }
    // A reader that comes first waits.
    Stepped reader(&node, i, 1, 1, 20);
    CHECK(reader.pending());
    CHECK(Stepped(&node, i, 0, 1, 20).done());
    CHECK(reader.Step() == Outcome::kDone);
  }
}

// Under direct transport the reader reads XLA's memory: no running ahead.
TEST(DirectSourceStaysUntilItIsRead) {
  const Deadline deadline("DirectSourceStaysUntilItIsRead", 60);
  Node node(2, Stepping());
  Instance* i = node.Compile(fleet::Ppermute({0, 1}, 5000, {{0, 1}}));
  CHECK(node.Of(i, 0)->transport == Transport::kDirect);
  for (uint64_t salt = 0; salt < 10; ++salt) {
    Stepped source(&node, i, 0, 1, salt);
    CHECK(source.pending());
    Stepped reader(&node, i, 1, 1, salt);
    CHECK(reader.done());
    CHECK(source.Step() == Outcome::kDone);
  }
}

// More posts of one home bucket than it has slots.
TEST(DisplacedPostsAreFound) {
  const Deadline deadline("DisplacedPostsAreFound", 60);
  Node node(2, Stepping());
  std::map<int, std::vector<Spec>> by_bucket;
  std::vector<Spec> crowd;
  for (int64_t channel = 0; crowd.empty(); ++channel) {
    const Spec s = fleet::Ppermute({0, 1}, 100, {{0, 1}}, channel);
    Key key;
    key.comm = 99;  // the same for all: it only turns the buckets
    key.site = SiteOf(s);
    std::vector<Spec>& same = by_bucket[detail::HomeBucket(key)];
    same.push_back(s);
    if (same.size() == 7) crowd = same;
  }
  std::vector<Instance*> calls;
  for (const Spec& s : crowd) calls.push_back(node.Compile(s));
  const Control& source = *node.world().rank(0).shadow;
  uint64_t salt = 0;
  for (int round = 0; round < 3; ++round) {
    for (uint64_t ahead = 0; ahead < kWays; ++ahead) {
      for (Instance* i : calls) {
        CHECK(Stepped(&node, i, 0, 1, salt + ahead).done());
      }
    }
    CHECK(source.displaced.load() > 0);
    for (uint64_t ahead = 0; ahead < kWays; ++ahead) {
      for (Instance* i : calls) {
        CHECK(Stepped(&node, i, 1, 1, salt + ahead).done());
      }
    }
    salt += kWays;
  }
}

TEST(LargeWindowsComeBack) {
  const Deadline deadline("LargeWindowsComeBack", 60);
  Settings s;
  s.direct = false;
  Node node(2, s);
  constexpr int64_t kCount = 300'000;
  // Many calls: if each kept its windows, they would need 40 of 1.2 MB a rank.
  std::vector<Instance*> calls;
  for (int64_t c = 0; c < 20; ++c) {
    calls.push_back(node.Compile(fleet::Psum({0, 1}, kCount, c)));
  }
  RunThreads(2, [&](int rank) {
    const Data d = fleet::DataOf(calls[0]->spec(), 1, rank);
    for (int round = 0; round < 2; ++round) {
      for (Instance* i : calls) CheckFine(node.Run(i, rank, 1, d));
    }
    fleet::CheckResult(calls[0]->spec(), 1, rank, d);
  });
  CHECK(node.world().arena().allocator().high_water() < 16u << 20);
  node.world().arena().allocator().CheckInvariants();
}

TEST(NoRoomForAWindow) {
  const Deadline deadline("NoRoomForAWindow", 60);
  Settings s = Stepping();
  s.direct = false;
  Node node(2, s);
  Instance* huge = node.Compile(fleet::Psum({0, 1}, int64_t{1} << 30));
  Instance* small = node.Compile(fleet::Psum({0, 1}, 500));
  // Nothing is read before there is a window, so one element will do.
  const Data d = fleet::DataOf(fleet::Psum({0, 1}, 1), 1, 0);
  CheckFailure(node.Run(huge, 0, 1, d), ErrorKind::kResourceExhausted,
               {"4294967296 bytes", "psum of float32[1073741824]",
                "STRATACL_ARENA_SPAN"});
  CheckFailure(node.Run(huge, 1, 1, d), ErrorKind::kResourceExhausted);
  // The next launch is not harmed, and nothing was lost.
  RunThreads(2,
             [&](int rank) { CheckFine(node.RunChecked(small, rank, 2, 5)); });
  node.world().arena().allocator().CheckInvariants();
  CHECK(node.world().arena().allocator().used() <= 2 * 4096u);
}

TEST(LaunchesOfTwoThreadsAreRefused) {
  const Deadline deadline("LaunchesOfTwoThreadsAreRefused", 60);
  Node node(2, Stepping());
  Instance* a = node.Compile(fleet::Psum({0, 1}, 50));
  Stepped first(&node, a, 0, 1, 1);
  CHECK(first.pending());
  Stepped second(&node, a, 0, 2, 2);  // the first has not ended
  CheckFailure(second.failure(), ErrorKind::kInvalidUsage,
               {"two Python threads", "same group"});
  CHECK(first.Step(2 * 60 * 1000 * fleet::kMs) == Outcome::kFailed);
  CheckFailure(first.failure(), ErrorKind::kInvalidUsage);
  // The communicator is of no use any more, on the other rank neither.
  Stepped other(&node, a, 1, 1, 1);
  CHECK(other.Step(2 * 60 * 1000 * fleet::kMs) == Outcome::kFailed);
  CheckFailure(other.failure(), ErrorKind::kInvalidUsage);
  CheckFailure(Stepped(&node, a, 0, 3, 3).failure(), ErrorKind::kInvalidUsage,
               {"broken", "initialize()"});
}

TEST(AReturningRunIdIsRefused) {
  const Deadline deadline("AReturningRunIdIsRefused", 60);
  Node node(2, Settings{});
  Instance* a = node.Compile(fleet::Psum({0, 1}, 50));
  RunThreads(2, [&](int rank) {
    CheckFine(node.RunChecked(a, rank, 1, 1));
    CheckFine(node.RunChecked(a, rank, 2, 2));
  });
  CheckFailure(node.RunChecked(a, 0, 1, 3), ErrorKind::kInvalidUsage,
               {"two Python threads"});
}

// XLA flushes denormals; whoever completes an operation must do so, too, and
// must leave its own mode as it was.
TEST(FloatModeIsXlasOnEveryThread) {
  const Deadline deadline("FloatModeIsXlasOnEveryThread", 60);
  const Spec spec = fleet::Psum({0, 1}, 64);
  for (uint64_t inplace : {uint64_t{0}, 60'000 * fleet::kMs}) {
    Settings s;
    s.inplace_ns = inplace;
    Node node(2, s);
    Instance* i = node.Compile(spec);
    RunThreads(2, [&](int rank) {
      volatile float tiny = 1e-40f;
      Data d = fleet::DataOf(spec, 0, rank);
      for (size_t at = 0; at < d.in[0].size(); at += sizeof(float)) {
        const float value = tiny;
        std::memcpy(d.in[0].data() + at, &value, sizeof(value));
      }
      CHECK(tiny + tiny > 0.0f);  // this thread keeps denormals
      CheckFine(node.Run(i, rank, 1, d));
      CHECK(tiny + tiny > 0.0f);
      CHECK_EQ(std::count(d.out[0].begin(), d.out[0].end(), 0),
               static_cast<std::ptrdiff_t>(d.out[0].size()));
    });
  }
}

// One thread for each operation that waits, used again afterwards.
TEST(PoolHasAThreadForEachPendingOperation) {
  const Deadline deadline("PoolHasAThreadForEachPendingOperation", 60);
  Node node(2, Stepping());
  std::vector<Instance*> calls;
  for (int64_t c = 0; c < 12; ++c) {
    calls.push_back(node.Compile(fleet::Psum({0, 1}, 9, c)));
  }
  for (int launch = 1; launch <= 3; ++launch) {
    std::vector<Data> data;
    for (size_t c = 0; c < calls.size(); ++c) {
      data.push_back(fleet::DataOf(calls[c]->spec(), c, 0));
    }
    std::atomic<int> running{0};
    std::latch ended(static_cast<std::ptrdiff_t>(calls.size()));
    for (size_t c = 0; c < calls.size(); ++c) {
      std::unique_ptr<Op> pending;
      Failure failure;
      CHECK(node.Begin(calls[c], 0, launch, data[c], &pending, &failure) ==
            Outcome::kPending);
      Pool().Submit(std::move(pending), [&](Outcome o, const Failure&) {
        // What runs behind a completion may block on the others' completions.
        running.fetch_add(o == Outcome::kDone ? 1 : 0);
        while (running.load() < 12) sched_yield();
        ended.count_down();
      });
    }
    for (size_t c = calls.size(); c-- > 0;) {
      CheckFine(node.RunChecked(calls[c], 1, launch, c));
    }
    ended.wait();
    for (size_t c = 0; c < calls.size(); ++c) {
      fleet::CheckResult(calls[c]->spec(), c, 0, data[c]);
    }
  }
  CHECK(Pool().threads() >= 12);
}

}  // namespace
}  // namespace strata
