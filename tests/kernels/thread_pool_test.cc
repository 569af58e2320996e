// The CPU backend's thread pool: every task once, and an end whatever the moment.

#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
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

// A worker that is about to sleep must not miss the end: what it waits for would never come. More
// threads than cores, so that the system interrupts workers at every point.
TEST(ThreadPool, EndsAtAnyMoment) {
  std::vector<std::thread> owners;
  for (int owner = 0; owner < 8; ++owner) {
    owners.emplace_back([] {
      for (int i = 0; i < 2'000; ++i) {
        ThreadPool pool(3);
        if (i % 3 != 0) pool.Run(4, [](int64_t, int) {});
      }
    });
  }
  for (std::thread& owner : owners) owner.join();
}

}  // namespace
}  // namespace moeserve::cpu
