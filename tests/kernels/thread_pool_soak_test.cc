// The CPU backend's thread pool comes to its end at whatever moment.

#include <gtest/gtest.h>

#include "kernels/cpu/thread_pool.h"

namespace moeserve::cpu {
namespace {

// A worker that is about to sleep must not miss the end: what it waits for would never come. The
// moment is a few instructions long, so a pool with that fault hangs once in some 10,000 times.
TEST(ThreadPool, EndsAtAnyMoment) {
  for (int i = 0; i < 150'000; ++i) {
    ThreadPool pool(3);
    if (i % 3 != 0) pool.Run(4, [](int64_t, int) {});
  }
}

}  // namespace
}  // namespace moeserve::cpu
