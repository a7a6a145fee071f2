// Owns: jobs of several processes: forks them, lets them meet through memory
// that all share, and collects how they ended.  Invariant: no child outlives
// the test, and a child that fails, crashes or hangs fails the test by name.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "check.h"
#include "fabric/arena.h"
#include "harness.h"

namespace forked {

inline constexpr int kMost = 8;

// What the processes of a job and the test share besides the fabric.
struct Board {
  std::atomic<int> pid[kMost];
  std::atomic<int> memfd[kMost];
  std::atomic<int> arrived;
  // For the tests: what happened to call i on rank r, and whatever else.
  static constexpr int kCalls = 2048;
  std::atomic<int> outcome[kCalls][kMost];
  std::atomic<uint64_t> words[64];

  // Meets all n processes; `round` counts from 1.
  void Meet(int n, int round) {
    arrived.fetch_add(1);
    while (arrived.load() < n * round) sched_yield();
  }
};

class Job {
 public:
  // Runs body(process, board) in n processes; `seconds` is what each may last.
  // No thread of this process may be alive, or the sanitizers refuse.
  Job(int n, unsigned seconds, const std::function<void(int, Board*)>& body)
      : map_(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    CHECK(map_ != MAP_FAILED);
    new (map_) Board();
    std::fflush(nullptr);
    const int parent = getpid();
    for (int p = 0; p < n; ++p) {
      const int pid = fork();
      CHECK(pid >= 0);
      if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        Child(p, seconds, body);
      }
      board()->pid[p].store(pid);
      pids_.push_back(pid);
    }
  }
  ~Job() {
    for (int pid : pids_) {
      if (pid != 0) kill(pid, SIGKILL);
    }
    for (int pid : pids_) {
      if (pid != 0) waitpid(pid, nullptr, 0);
    }
    munmap(map_, sizeof(Board));
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  Board* board() const { return static_cast<Board*>(map_); }
  int pid(int p) const { return pids_[static_cast<size_t>(p)]; }

  // Waits for process p: its exit code, or the negative signal that ended it.
  int Wait(int p) {
    int& pid = pids_[static_cast<size_t>(p)];
    int status = 0;
    while (waitpid(pid, &status, 0) < 0) CHECK(errno == EINTR);
    pid = 0;
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }
  // Waits until process p is stopped.
  void WaitStopped(int p) {
    int status = 0;
    while (waitpid(pid(p), &status, WUNTRACED) < 0) CHECK(errno == EINTR);
    CHECK(WIFSTOPPED(status));
  }
  // All ended well, but for those that the test killed.
  void Join(const std::vector<int>& killed = {}) {
    std::string bad;
    for (size_t p = 0; p < pids_.size(); ++p) {
      if (pids_[p] == 0) continue;
      int want = 0;
      for (int k : killed) want = k == static_cast<int>(p) ? -SIGKILL : want;
      const int got = Wait(static_cast<int>(p));
      if (got != want) {
        bad += " process " + std::to_string(p) + ": " + std::to_string(got);
      }
    }
    CHECK_MSG(bad.empty(), "exit codes:" + bad);
  }

 private:
  [[noreturn]] void Child(int p, unsigned seconds,
                          const std::function<void(int, Board*)>& body) {
    int code = 1;
    {
      const harness::Deadline deadline("a process of a job", seconds);
      try {
        body(p, board());
        code = 0;
      } catch (const std::exception& e) {
        std::printf("process %d: %s\n", p, e.what());
      }
    }
    std::fflush(nullptr);
    // Not exit: what this process took over from its parent is not its own.
    _exit(code);
  }

  void* map_;
  std::vector<int> pids_;
};

// The arenas of a job, attached to each other in every process.  Uses round 1
// and 2 of the board.
inline std::unique_ptr<strata::Arena> MeetInArenas(int p, int n, uint64_t base,
                                                   Board* board) {
  auto arena = std::make_unique<strata::Arena>(
      p, n, base, harness::kSpan, strata::ControlGeometry(harness::kEager));
  board->memfd[p].store(arena->memfd());
  board->Meet(n, 1);
  for (int q = 0; q < n; ++q) {
    if (q == p) continue;
    while (board->pid[q].load() == 0) sched_yield();
    const std::string path = "/proc/" + std::to_string(board->pid[q].load()) +
                             "/fd/" + std::to_string(board->memfd[q].load());
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    CHECK_MSG(fd >= 0, path);
    arena->Attach(q, fd);
    close(fd);
  }
  board->Meet(n, 2);
  return arena;
}

inline int OpenPidfd(int pid) {
  const long fd = syscall(SYS_pidfd_open, pid, 0);
  CHECK(fd >= 0);
  return static_cast<int>(fd);
}

}  // namespace forked
