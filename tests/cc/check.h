// Owns: the whole C++ test framework.  A test file includes this header once
// and is an executable: TEST(Name) { CHECK(...); CHECK_EQ(a, b); }.  The main
// function runs every test, or those whose names contain argv[1], prints
// "N passed, N failed" and returns nonzero if one failed.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& Registry() {
  static std::vector<Test> tests;
  return tests;
}

struct Registration {
  Registration(const char* name, void (*run)()) {
    Registry().push_back({name, run});
  }
};

// A failed check ends its test.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void Fail(const char* file, int line,
                              const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename A, typename B>
void Equal(const A& a, const B& b, const char* text, const char* file,
           int line) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " != " << b;
  Fail(file, line, out.str());
}

}  // namespace check

#define TEST(name)                                                         \
  static void Test##name();                                                \
  static const check::Registration registration##name(#name, &Test##name); \
  static void Test##name()

#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) check::Fail(__FILE__, __LINE__, #condition); \
  } while (false)

// As CHECK, with a std::string that says which case it was.
#define CHECK_MSG(condition, message)                          \
  do {                                                         \
    if (!(condition))                                          \
      check::Fail(__FILE__, __LINE__,                          \
                  std::string(#condition) + ": " + (message)); \
  } while (false)

#define CHECK_EQ(a, b) check::Equal((a), (b), #a " == " #b, __FILE__, __LINE__)

// The expression throws Exception and its message contains `part`.
#define CHECK_THROWS(expression, Exception, part)                        \
  do {                                                                   \
    std::string what_was_said = "nothing was thrown";                    \
    try {                                                                \
      (void)(expression);                                                \
    } catch (const Exception& e) {                                       \
      what_was_said = e.what();                                          \
    }                                                                    \
    if (what_was_said.find(part) == std::string::npos)                   \
      check::Fail(__FILE__, __LINE__, #expression ": " + what_was_said); \
  } while (false)

#if defined(__SANITIZE_THREAD__)
// Tests that stop an operation at a fault point do so by a signal that its own
// thread raises, and the handler may do what it likes.
extern "C" inline __attribute__((used, visibility("default"))) const char*
__tsan_default_options() {
  return "halt_on_error=1:report_signal_unsafe=0:allocator_may_return_null=1";
}
#endif

int main(int argc, char** argv) {
  int passed = 0, failed = 0;
  for (const check::Test& test : check::Registry()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    try {
      test.run();
      ++passed;
    } catch (const std::exception& e) {
      ++failed;
      std::printf("FAILED %s\n  %s\n", test.name, e.what());
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
