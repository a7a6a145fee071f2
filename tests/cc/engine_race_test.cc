// The engine in interleavings that chance does not find: an operation is held
// at a point of the protocol (engine/fault.h) while other ranks go on.  Each
// test is a counterexample to a protocol with one step less.
#include <functional>
#include <map>

#include "engine/fault.h"
#include "fleet.h"

namespace strata {
namespace {

using fleet::CheckFailure;
using fleet::kMs;
using fleet::Node;
using fleet::Stepped;
using harness::Deadline;

// While it lives, the first operation to pass the point is held there until
// `then` has run; after that, the first to pass the next point, and so on.
class Hold {
 public:
  using Step = std::pair<FaultPoint, std::function<void()>>;

  Hold(FaultPoint at, std::function<void()> then)
      : Hold({Step(at, std::move(then))}) {}
  explicit Hold(std::vector<Step> steps) {
    steps_ = std::move(steps);
    next_ = 0;
    failure_ = nullptr;
    struct sigaction action = {};
    action.sa_flags = SA_NODEFER;
    action.sa_handler = [](int) { Strike(); };
    sigaction(SIGUSR1, &action, nullptr);
    fault.signal.store(SIGUSR1);
    Arm();
  }
  ~Hold() { fault.point.store(0); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  void Check() const {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    CHECK_EQ(next_, steps_.size());
  }

 private:
  static void Arm() {
    if (next_ == steps_.size()) return;
    fault.countdown.store(0);
    fault.point.store(static_cast<int>(steps_[next_].first));
  }
  static void Strike() {
    fault.point.store(0);  // not for what `then` runs
    try {
      steps_[next_++].second();
    } catch (...) {
      failure_ = std::current_exception();  // no way through a signal frame
    }
    Arm();
  }
  static inline std::vector<Step> steps_;
  static inline size_t next_;
  static inline std::exception_ptr failure_;
};

Settings Staged(uint64_t timeout_ns) {
  Settings s;
  s.inplace_ns = 0;
  s.timeout_ns = timeout_ns;
  s.direct = false;
  return s;
}

constexpr uint64_t kLong = 100'000 * kMs;

// Until it ends.  A millisecond at a time, for nobody else runs meanwhile.
void Finish(Stepped* call) {
  while (call->pending()) call->Step(1 * kMs);
}

// Rank 0 gives up, for rank 1 is missing.  Before it says so, rank 1 comes,
// finds it POSTED, and succeeds.  So must rank 0.
TEST(WhoGivesUpLooksAgain) {
  const Deadline deadline("WhoGivesUpLooksAgain", 60);
  for (int64_t count : {4, 2000}) {
    Node node(2, Staged(20 * kMs));
    Instance* i = node.Compile(fleet::Psum({0, 1}, count));
    Stepped call0(&node, i, 0, 1, 1);
    const Hold hold(FaultPoint::kGivingUp,
                    [&] { CHECK(Stepped(&node, i, 1, 1, 1).done()); });
    Finish(&call0);
    hold.Check();
    CHECK(call0.done());
    CHECK_EQ(node.world().counters().aborts.load(), 0u);
  }
}

// As before, but rank 0 has said so: its request counts as posted, and rank 1
// turns it down.
TEST(ARequestIsTurnedDownByWhoSucceeds) {
  const Deadline deadline("ARequestIsTurnedDownByWhoSucceeds", 60);
  Node node(2, Staged(20 * kMs));
  Instance* i = node.Compile(fleet::Psum({0, 1}, 100));
  Stepped call0(&node, i, 0, 1, 1);
  const Hold hold(FaultPoint::kAbortRequested, [&] {
    CHECK(PhaseOf(StateOf(*call0.op()->own())) == Phase::kAbortReq);
    CHECK(Stepped(&node, i, 1, 1, 1).done());
    CHECK(PhaseOf(StateOf(*call0.op()->own())) == Phase::kPosted);
  });
  Finish(&call0);
  hold.Check();
  CHECK(call0.done());
}

// A source of a permutation may ask for an abort (of what it receives itself):
// its bytes are good, and nobody decides for it.
TEST(ARequestOfAOneSidedSourceIsLeftAlone) {
  const Deadline deadline("ARequestOfAOneSidedSource", 60);
  Node node(3, Staged(20 * kMs));
  Instance* i =
      node.Compile(fleet::Ppermute({0, 1, 2}, 100, {{0, 1}, {1, 2}, {2, 0}}));
  Stepped call0(&node, i, 0, 1, 1);
  const Hold hold(FaultPoint::kAbortRequested, [&] {
    CHECK(Stepped(&node, i, 1, 1, 1).done());
    CHECK(PhaseOf(StateOf(*call0.op()->own())) == Phase::kAbortReq);
  });
  Finish(&call0);
  hold.Check();
  CheckFailure(call0.failure(), ErrorKind::kDeadlineExceeded, {"rank 2"});
}

// Rank 1 has seen rank 0's post and misses rank 2.  Rank 0 aborts.  Then rank 2
// posts, and before it can notice anything, rank 1 has all it needs; but rank 0
// will fail, so it must, too.
TEST(WhoSucceedsLooksAtItsSourcesOnceMore) {
  const Deadline deadline("WhoSucceedsLooksAtItsSources", 60);
  for (int64_t count : {4, 2000}) {
    Node node(3, Staged(20 * kMs));
    Instance* i = node.Compile(fleet::Psum({0, 1, 2}, count));
    Stepped call0(&node, i, 0, 1, 1);
    node.world().mutable_settings().timeout_ns = kLong;
    Stepped call1(&node, i, 1, 1, 1);
    CHECK(call1.pending());
    node.world().mutable_settings().timeout_ns = 20 * kMs;
    Finish(&call0);
    CheckFailure(call0.failure(), ErrorKind::kDeadlineExceeded);
    node.world().mutable_settings().timeout_ns = kLong;
    const Hold hold(FaultPoint::kAfterPost, [&] {
      CHECK(call1.pending());
      call1.Step();
    });
    Stepped call2(&node, i, 2, 1, 1);
    hold.Check();
    Finish(&call2);
    Finish(&call1);
    CheckFailure(call1.failure(), ErrorKind::kDeadlineExceeded);
    CheckFailure(call2.failure(), ErrorKind::kDeadlineExceeded);
  }
}

// Rank 1 is about to post when a sibling aborts its launch.  From then on rank
// 0 may take its post back, so rank 1 must not read it.
TEST(APostIntoAnAbortedLaunchReadsNothing) {
  const Deadline deadline("APostIntoAnAbortedLaunch", 60);
  for (bool direct : {false, true}) {
    Settings s = Staged(20 * kMs);
    s.direct = direct;
    Node node(2, s);
    Instance* sibling = node.Compile(fleet::Psum({0, 1}, 10));
    Instance* i = node.Compile(fleet::Ppermute({0, 1}, 3000, {{0, 1}}));
    Stepped source(&node, i, 0, 1, 1);
    CHECK(source.pending() == direct);
    Stepped lost(&node, sibling, 1, 1, 1);
    const Hold hold(FaultPoint::kBeforePost, [&] { Finish(&lost); });
    Stepped reader(&node, i, 1, 1, 1);
    hold.Check();
    CheckFailure(lost.failure(), ErrorKind::kDeadlineExceeded);
    CheckFailure(reader.failure(), ErrorKind::kDeadlineExceeded);
    CHECK(source.Step() == Outcome::kDone);
  }
}

// The same in a call of all to all: there rank 0 may have succeeded by the very
// post, so rank 1 must not fail for its launch alone.
TEST(APostIntoAnAbortedLaunchMayBeTheLastOneMissing) {
  const Deadline deadline("APostIntoAnAbortedLaunchMayBeTheLast", 60);
  for (int64_t count : {4, 2000}) {
    Node node(2, Staged(20 * kMs));
    Instance* sibling = node.Compile(fleet::Psum({0, 1}, 10));
    Instance* i = node.Compile(fleet::Psum({0, 1}, count));
    Stepped call0(&node, i, 0, 1, 1);
    Stepped lost(&node, sibling, 1, 1, 1);
    const Hold hold({
        {FaultPoint::kBeforePost, [&] { Finish(&lost); }},
        {FaultPoint::kAfterPost,
         [&] { CHECK(call0.Step() == Outcome::kDone); }},
    });
    Stepped call1(&node, i, 1, 1, 1);
    hold.Check();
    CheckFailure(lost.failure(), ErrorKind::kDeadlineExceeded);
    CHECK(call1.done());
  }
}

// Rank 1 waits for call A when its sibling B gives up and its next launch
// begins.  Rank 0 comes to A, has all it needs, and must not have its operand
// back before rank 1 has read it.
TEST(TheNextLaunchDoesNotReleaseWhatIsStillRead) {
  const Deadline deadline("TheNextLaunchDoesNotRelease", 60);
  Settings s = Staged(20 * kMs);
  s.direct = true;
  Node node(2, s);
  Instance* a = node.Compile(fleet::Psum({0, 1}, 3000, 1));
  Instance* b = node.Compile(fleet::Psum({0, 1}, 3000, 2));
  CHECK(node.Of(a, 0)->transport == Transport::kDirect);
  Stepped b1(&node, b, 1, 1, 1);
  node.world().mutable_settings().timeout_ns = kLong;
  Stepped a1(&node, a, 1, 1, 1);
  CHECK(a1.pending());
  node.world().mutable_settings().timeout_ns = 20 * kMs;
  Finish(&b1);  // rank 0 does not call B
  CheckFailure(b1.failure(), ErrorKind::kDeadlineExceeded);
  node.world().mutable_settings().timeout_ns = kLong;
  Stepped next(&node, a, 1, 2, 2);
  CHECK(next.pending());
  CHECK_EQ(node.Of(a, 1)->comm->OrdinalOf(2), 2u);
  Stepped a0(&node, a, 0, 1, 1);
  for (int i = 0; i < 5; ++i) CHECK(a0.Step(1 * kMs) == Outcome::kPending);
  Finish(&a1);
  CHECK(a1.done());
  CHECK(a0.Step() == Outcome::kDone);
  // And the next launch is a launch like any other.
  Stepped next0(&node, a, 0, 2, 2);
  while (next.pending() || next0.pending()) {
    next.Step();
    next0.Step();
  }
  CHECK(next.done() && next0.done());
}

// Under direct transport an operation that aborts waits for readers which have
// matched it, not for those that have yet to come.
TEST(AnAbortedDirectCallWaitsForItsReaders) {
  const Deadline deadline("AnAbortedDirectCallWaits", 60);
  Settings s = Staged(20 * kMs);
  s.direct = true;
  Node node(3, s);
  Instance* i = node.Compile(fleet::Psum({0, 1, 2}, 3000));
  node.world().mutable_settings().timeout_ns = kLong;
  Stepped call1(&node, i, 1, 1, 1);
  node.world().mutable_settings().timeout_ns = 20 * kMs;
  Stepped call0(&node, i, 0, 1, 1);
  // Rank 1 has matched rank 0, and reads, as far as rank 0 can know.
  CHECK(call1.Step() == Outcome::kPending);
  std::atomic<bool> ended{false};
  harness::RunThreads(2, [&](int who) {
    if (who == 0) {
      Finish(&call0);
      ended.store(true);
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    CHECK(!ended.load());
    Finish(&call1);
  });
  CheckFailure(call0.failure(), ErrorKind::kDeadlineExceeded, {"rank 2"});
  CheckFailure(call1.failure(), ErrorKind::kDeadlineExceeded);
  // Rank 2 has not come and was not waited for.
  Stepped call2(&node, i, 2, 1, 1);
  Finish(&call2);
  CheckFailure(call2.failure(), ErrorKind::kDeadlineExceeded);
}

// One rank is held before its last stage while the other ends the call and goes
// on to the next: nothing of what the first still reads is given up.
TEST(ALateReaderReadsWhatWasPosted) {
  const Deadline deadline("ALateReaderReadsWhatWasPosted", 60);
  for (bool two_phase : {false, true}) {
    Settings s = Staged(kLong);
    s.algorithm = two_phase ? 2 : 1;
    s.chunk_bytes = 4096;
    Node node(2, s);
    Instance* i = node.Compile(fleet::Psum({0, 1}, 4000));
    for (uint64_t salt = 0; salt < 12; salt += 2) {
      Stepped calls[] = {{&node, i, 0, 1, salt}, {&node, i, 1, 1, salt}};
      std::unique_ptr<Stepped> next[2];
      int stepped = 0;
      const Hold hold(FaultPoint::kMidStages, [&] {
        const int other = 1 - stepped;
        for (int step = 0; step < 10; ++step) calls[other].Step();
        CHECK(calls[other].done());
        next[other] = std::make_unique<Stepped>(&node, i, other, 1, salt + 1);
        for (int step = 0; step < 10; ++step) next[other]->Step();
        CHECK(next[other]->pending());
      });
      for (; calls[stepped].pending(); stepped = 1 - stepped) {
        calls[stepped].Step();
      }
      hold.Check();
      CHECK(calls[0].done() && calls[1].done());
      for (int rank : {0, 1}) {
        if (next[rank] != nullptr) continue;
        next[rank] = std::make_unique<Stepped>(&node, i, rank, 1, salt + 1);
      }
      while (next[0]->pending() || next[1]->pending()) {
        next[0]->Step();
        next[1]->Step();
      }
      CHECK(next[0]->done() && next[1]->done());
    }
  }
}

}  // namespace
}  // namespace strata
