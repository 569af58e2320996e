// Destroys the CPU backend's thread pool at arbitrary moments.

#include <gtest/gtest.h>

#include "kernels/cpu/thread_pool.h"

namespace moeserve::cpu {
namespace {

// A worker that is about to sleep must not miss the destruction, because nothing would wake it
// afterwards. The critical moment is a few instructions long, so a pool with this bug hangs in
// about one of 10,000 destructions.
TEST(ThreadPool, EndsAtAnyMoment) {
  for (int i = 0; i < 150'000; ++i) {
    ThreadPool pool(3);
    if (i % 3 != 0) pool.Run(4, [](int64_t, int) {});
  }
}

}  // namespace
}  // namespace moeserve::cpu
