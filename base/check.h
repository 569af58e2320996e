// A broken invariant prints a message and aborts the process. Errors in untrusted input are
// returned as absl::Status instead.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace moeserve::internal {

[[noreturn]] inline void CheckFailed(const char* file, int line, const char* condition,
                                     const char* context) {
  std::fprintf(stderr, "%s:%d: invariant violated: %s (%s)\n", file, line, condition, context);
  std::fflush(stderr);
  std::abort();
}

}  // namespace moeserve::internal

// `context` is a string literal that names what to examine after the crash.
#define MOESERVE_CHECK(condition, context)                                        \
  do {                                                                            \
    if (!(condition)) [[unlikely]]                                                \
      ::moeserve::internal::CheckFailed(__FILE__, __LINE__, #condition, context); \
  } while (false)
