// Owns: what the concurrent C++ tests share: deadlines, seeds, threads that may
// fail, and an arena for one process.  Invariant: a test that hangs ends the
// program with a message that names it, and a random test prints its seed.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fabric/arena.h"

namespace harness {

inline constexpr int kHungExit = 98;

// Sanitizers make everything several times slower.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr int kSlow = 4;
#else
inline constexpr int kSlow = 1;
#endif

// Ends the whole program if the scope lasts longer than `seconds`.
class Deadline {
 public:
  Deadline(const char* test, unsigned seconds) {
    name_ = test;
    struct sigaction action = {};
    action.sa_handler = [](int) {
      for (const char* s : {"FAILED ", name_, "\n  hung past its deadline\n"}) {
        if (write(STDERR_FILENO, s, std::strlen(s)) < 0) break;
      }
      _exit(kHungExit);
    };
    sigaction(SIGALRM, &action, nullptr);
    alarm(seconds * kSlow);
  }
  ~Deadline() { alarm(0); }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  static inline const char* name_ = "";
};

// The seeds of a random test: STRATACL_SEEDS of them, from STRATACL_SEED on.
inline std::vector<uint64_t> Seeds(const char* test, uint64_t usual = 2) {
  auto setting = [](const char* name, uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
  };
  std::vector<uint64_t> seeds;
  const uint64_t first = setting("STRATACL_SEED", 1);
  const uint64_t count = setting("STRATACL_SEEDS", usual);
  for (uint64_t i = 0; i < count; ++i) seeds.push_back(first + i);
  std::printf("%s: seeds %llu to %llu (STRATACL_SEED, STRATACL_SEEDS)\n", test,
              static_cast<unsigned long long>(first),
              static_cast<unsigned long long>(first + count - 1));
  std::fflush(stdout);
  return seeds;
}

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  uint64_t Below(uint64_t limit) { return generator_() % limit; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  template <typename T>
  void Shuffle(std::vector<T>& v) {
    for (size_t i = v.size(); i > 1; --i) std::swap(v[i - 1], v[Below(i)]);
  }

 private:
  std::mt19937_64 generator_;
};

// Runs body(0) ... body(n - 1) on threads; rethrows what the first one threw.
inline void RunThreads(int n, const std::function<void(int)>& body) {
  std::mutex mutex;
  std::exception_ptr failure;
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) {
    threads.emplace_back([&, i] {
      try {
        body(i);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex);
        if (failure == nullptr) failure = std::current_exception();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  if (failure != nullptr) std::rethrow_exception(failure);
}

// Small enough for a test machine, large enough for the posting tables.
inline constexpr size_t kSpan = size_t{2} << 30;
inline constexpr size_t kEager = 1024;

inline uint64_t FreeBase(size_t bytes) {
  for (uint64_t base : strata::CandidateBases()) {
    if (strata::RangeIsFree(base, bytes)) return base;
  }
  throw check::Failure("no candidate base is free");
}

inline std::unique_ptr<strata::Arena> PrivateArena() {
  return std::make_unique<strata::Arena>(0, 1, FreeBase(kSpan), kSpan,
                                         strata::ControlGeometry(kEager));
}

// A zero-filled Control outside any arena.
class OneControl {
 public:
  OneControl()
      : map_(mmap(nullptr, sizeof(strata::Control), PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    CHECK(map_ != MAP_FAILED);
  }
  ~OneControl() { munmap(map_, sizeof(strata::Control)); }
  OneControl(const OneControl&) = delete;
  OneControl& operator=(const OneControl&) = delete;
  strata::Control* operator->() const { return get(); }
  strata::Control* get() const { return static_cast<strata::Control*>(map_); }

 private:
  void* map_;
};

}  // namespace harness
