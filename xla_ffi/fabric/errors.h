// Owns: the error taxonomy on the native side.  Invariant: the names are those
// of stratacl_jax/runtime/errors.py, which finds them again in XLA's message.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace strata {

enum class ErrorKind : uint8_t {
  kNone = 0,
  kInvalidUsage = 1,
  kMismatch = 2,
  kPeerLost = 3,
  kDeadlineExceeded = 4,
  kResourceExhausted = 5,
  kUnsupported = 6,
};

inline const char* NameOf(ErrorKind k) {
  switch (k) {
    case ErrorKind::kInvalidUsage:
      return "InvalidUsage";
    case ErrorKind::kMismatch:
      return "Mismatch";
    case ErrorKind::kPeerLost:
      return "PeerLost";
    case ErrorKind::kDeadlineExceeded:
      return "DeadlineExceeded";
    case ErrorKind::kResourceExhausted:
      return "ResourceExhausted";
    case ErrorKind::kUnsupported:
      return "Unsupported";
    case ErrorKind::kNone:
      break;
  }
  return "StrataError";
}

struct Failure {
  ErrorKind kind = ErrorKind::kNone;
  std::string message;
  explicit operator bool() const { return kind != ErrorKind::kNone; }
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what)
      : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace strata
