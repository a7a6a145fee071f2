// A library that tests load into rank processes: a custom call that tells where
// its operand lies, and a signal handler that makes one thread slow.
#include <signal.h>
#include <time.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

struct Seen {
  uint64_t address, bytes, tag;
};
std::mutex mutex;
std::vector<Seen> seen;

ffi::Error Look(int64_t tag, ffi::AnyBuffer in, ffi::Result<ffi::AnyBuffer> out) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    seen.push_back({reinterpret_cast<uint64_t>(in.untyped_data()),
                    in.size_bytes(), static_cast<uint64_t>(tag)});
  }
  if (out->untyped_data() != in.untyped_data()) {
    std::memcpy(out->untyped_data(), in.untyped_data(), in.size_bytes());
  }
  return ffi::Error::Success();
}

long nap_ns = 0;

void Nap(int) {
  timespec left = {nap_ns / 1000000000, nap_ns % 1000000000};
  while (nanosleep(&left, &left) != 0) {
  }
}

}  // namespace

// Passes its operand through, and notes address, size and tag.
XLA_FFI_DEFINE_HANDLER_SYMBOL(ProbeLook, Look,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("tag")
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

// Moves at most `room` notes (address, bytes, tag) to `to`; returns how many.
extern "C" int64_t ProbeTake(uint64_t* to, int64_t room) {
  std::lock_guard<std::mutex> lock(mutex);
  int64_t n = 0;
  while (n < room && !seen.empty()) {
    const Seen& s = seen.back();
    to[3 * n] = s.address;
    to[3 * n + 1] = s.bytes;
    to[3 * n + 2] = s.tag;
    seen.pop_back();
    ++n;
  }
  return n;
}

// From now on a thread that gets signal `number` sleeps in its handler.
extern "C" int ProbeNapOn(int number, double seconds) {
  nap_ns = static_cast<long>(seconds * 1e9);
  struct sigaction action = {};
  action.sa_handler = Nap;
  action.sa_flags = SA_RESTART;
  return sigaction(number, &action, nullptr);
}
