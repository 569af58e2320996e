// The CPU backend's thread pool must run every task once.

#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace moeserve::cpu {
namespace {

TEST(ThreadPool, RunsEveryTaskOnce) {
  ThreadPool pool(4);
  for (int64_t count : {0, 1, 2, 3, 17, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
    pool.Run(count, [&](int64_t i, int worker) {
      EXPECT_TRUE(worker >= 0 && worker < 4);
      ++runs[static_cast<size_t>(i)];
    });
    for (const auto& n : runs) EXPECT_EQ(n, 1);
  }
}

}  // namespace
}  // namespace moeserve::cpu
