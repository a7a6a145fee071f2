#include "fabric/world.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <mutex>

namespace strata {
namespace {

std::atomic<bool> forked{false};

void WatchForks() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr,
                   [] { forked.store(true, std::memory_order_relaxed); });
  });
}

uint64_t ProcessCpuNs() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u +
         static_cast<uint64_t>(t.tv_nsec);
}

}  // namespace

bool InForkedChild() { return forked.load(std::memory_order_relaxed); }

World::World(std::unique_ptr<Arena> arena, const Settings& settings)
    : arena_(std::move(arena)), settings_(settings) {
  const size_t n = static_cast<size_t>(arena_->processes());
  pidfds_.assign(n, -1);
  pids_.assign(n, 0);
  dead_ = std::make_unique<std::atomic<bool>[]>(n);
  WatchForks();
}

std::unique_ptr<Arena> World::TakeArena(bool unread) {
  EndThreads();
  arena_->Detach(unread);
  return std::move(arena_);
}

void World::EndThreads() {
  registrar_.reset();
  stop_.store(true, std::memory_order_relaxed);
  if (monitor_.joinable()) {
    const uint64_t one = 1;
    if (write(stop_event_, &one, sizeof(one)) < 0) {
      // The monitor also looks at stop_ four times a second.
    }
    monitor_.join();
  }
}

World::~World() {
  EndThreads();
  if (stop_event_ >= 0) close(stop_event_);
  for (int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
}

void World::Watch(int p, int pidfd, int64_t pid) {
  pidfds_[static_cast<size_t>(p)] = pidfd;
  pids_[static_cast<size_t>(p)] = pid;
}

void World::Start(const std::vector<std::pair<int, int64_t>>& ranks,
                  bool divergent_programs) {
  if (ranks.size() > kMaxRanks) {
    throw Error(ErrorKind::kInvalidUsage, std::to_string(ranks.size()) +
                                              " ranks; this version serves " +
                                              std::to_string(kMaxRanks));
  }
  divergent_ = divergent_programs;
  std::vector<int> next_local(static_cast<size_t>(arena_->processes()), 0);
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto [process, device] = ranks[i];
    Rank r;
    r.world = static_cast<int>(i);
    r.process = process;
    r.device_id = device;
    r.local = next_local[static_cast<size_t>(process)]++;
    if (r.local >= kMaxLocalRanks) {
      throw Error(ErrorKind::kInvalidUsage,
                  "process " + std::to_string(process) + " has more than " +
                      std::to_string(kMaxLocalRanks) + " devices");
    }
    r.mine = process == arena_->process();
    r.rw = arena_->Writable(process, r.local);
    r.shadow = arena_->Shadow(process, r.local);
    by_device_[device] = r.world;
    ranks_.push_back(r);
  }
  registrar_ = std::make_unique<Registrar>(
      arena_.get(), settings_.registration == Registration::kOnAllocation);
  stop_event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  monitor_ = std::thread([this] { Monitor(); });
}

int World::RankOfDevice(int64_t device_id) const {
  const auto it = by_device_.find(device_id);
  return it == by_device_.end() ? -1 : it->second;
}

std::string World::Name(int world) const {
  const Rank& r = rank(world);
  std::string s = "rank " + std::to_string(world);
  const int64_t pid = pids_[static_cast<size_t>(r.process)];
  if (pid != 0) s += " (pid " + std::to_string(pid) + ")";
  return s;
}

void World::MarkDead(int process) {
  dead_[static_cast<size_t>(process)].store(true, std::memory_order_release);
  for (const Rank& r : ranks_) {
    if (r.mine) WakeAll(r.rw);
  }
}

// One thread a process.  It looks at nothing that the fast path writes.
void World::Monitor() {
  pthread_setname_np(pthread_self(), "strata-monitor");
  Control* mine = nullptr;
  for (const Rank& r : ranks_) {
    if (r.mine) {
      mine = r.rw;
      break;
    }
  }
  std::vector<pollfd> fds;
  std::vector<int> process_of;
  fds.push_back({stop_event_, POLLIN, 0});
  process_of.push_back(-1);
  for (size_t p = 0; p < pidfds_.size(); ++p) {
    if (pidfds_[p] >= 0) {
      fds.push_back({pidfds_[p], POLLIN, 0});
      process_of.push_back(static_cast<int>(p));
    }
  }
  while (!stopping()) {
    if (mine != nullptr) {
      mine->cpu_ns.store(ProcessCpuNs(), std::memory_order_relaxed);
      mine->beat_ns.store(NowNs(), std::memory_order_release);
    }
    const int n = poll(fds.data(), fds.size(), 250);
    arena_->quarantine().Sweep([this](void* p) { arena_->Free(p); });
    if (n <= 0) continue;
    for (size_t i = 1; i < fds.size(); ++i) {
      if (fds[i].revents != 0) {
        fds[i].fd = -1;  // poll ignores it from now on
        MarkDead(process_of[i]);
      }
    }
  }
}

}  // namespace strata
