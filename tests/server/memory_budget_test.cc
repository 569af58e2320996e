#include "server/base/memory_budget.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/base/api_error.h"
#include "server/process/allocator_trim.h"

namespace moeserve::server {
namespace {

TEST(MemoryBudgetTest, KeepsAQuarterForRunningRequests) {
  MemoryBudget budget(1000);
  EXPECT_TRUE(budget.TryTake(750, ChargeFor::kNewRequest));
  EXPECT_FALSE(budget.TryTake(1, ChargeFor::kNewRequest));
  EXPECT_TRUE(budget.TryTake(250, ChargeFor::kRunningRequest));
  EXPECT_FALSE(budget.TryTake(1, ChargeFor::kRunningRequest));
  EXPECT_FALSE(budget.TryTake(1, ChargeFor::kNewRequest));
  EXPECT_EQ(budget.used(), 1000u);
  EXPECT_EQ(budget.refused(), 3u);
  budget.Give(1000);
  EXPECT_TRUE(budget.TryTake(750, ChargeFor::kNewRequest));
}

TEST(MemoryBudgetTest, KeepsAQuarterFromLargeBodies) {
  const auto budget = std::make_shared<MemoryBudget>(1000);
  MemoryCharge bodies(budget);
  EXPECT_EQ(ApiCode(bodies.Add(501, ChargeFor::kArriving)), "request_too_large");
  EXPECT_TRUE(bodies.Add(500, ChargeFor::kArriving).ok());
  EXPECT_EQ(ApiCode(MemoryCharge(budget).Add(1, ChargeFor::kArriving)), "out_of_memory");
  EXPECT_TRUE(MemoryCharge(budget).Add(250).ok());
}

TEST(MemoryBudgetTest, TellsThePeakSinceTheLastQuestion) {
  MemoryBudget budget(1000);
  EXPECT_TRUE(budget.TryTake(300, ChargeFor::kNewRequest));
  EXPECT_TRUE(budget.TryTake(200, ChargeFor::kNewRequest));
  budget.Give(400);
  EXPECT_EQ(budget.TakePeak(), 500u);
  EXPECT_EQ(budget.TakePeak(), 100u);
}

TEST(AllocatorTrimTest, GivesMemoryBackSomeTimeAfterItWasHeld) {
  constexpr size_t kMuch = 4 * AllocatorTrim::kWorthwhile;
  AllocatorTrim trim;
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(trim.Tick(0, AllocatorTrim::kWorthwhile / 2));
  EXPECT_FALSE(trim.Tick(0, kMuch));
  // Requests that follow each other: nothing is given back.
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(trim.Tick(0, i % 3 == 0 ? kMuch : 0)) << i;
  int given = 0;
  for (int i = 0; i < 20; ++i) given += trim.Tick(0, 0) ? 1 : 0;
  EXPECT_EQ(given, 1);
}

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Returns the MiB of this process that are in memory.
int64_t ResidentMiB() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE) >> 20;
}

// Fills 40 MiB of blocks in the arena of a thread and frees them.
void FillAndFreeBlocks() {
  std::thread([] { std::vector<std::string> blocks(400, std::string(100'000, 'x')); }).join();
}

TEST(AllocatorTrimTest, ArenasOfThreadsKeepLittle) {
  // glibc raises its limits to the size of this block. The pointer is volatile so that the compiler
  // does not remove the call.
  void* volatile large = std::malloc(size_t{30} << 20);
  std::free(large);
  const int64_t before = ResidentMiB();
  FillAndFreeBlocks();
  ASSERT_GT(ResidentMiB() - before, 30) << "this C library gives memory back by itself";
  LimitKeptMemory();
  FillAndFreeBlocks();  // in the arena of the first thread, which has ended
  EXPECT_LT(ResidentMiB() - before, 8);
}
#endif

TEST(MemoryBudgetTest, HugeSizesDoNotWrap) {
  MemoryBudget budget(1000);
  EXPECT_TRUE(budget.TryTake(10, ChargeFor::kNewRequest));
  EXPECT_FALSE(budget.TryTake(~size_t{0}, ChargeFor::kNewRequest));
  EXPECT_FALSE(budget.TryTake(~size_t{0} - 5, ChargeFor::kRunningRequest));
  EXPECT_EQ(budget.used(), 10u);
}

TEST(MemoryBudgetTest, ChargesTellWhichRequestsCanBeTriedAgain) {
  const auto budget = std::make_shared<MemoryBudget>(1000);
  MemoryCharge first(budget);
  EXPECT_TRUE(first.Add(700).ok());
  MemoryCharge second(budget);
  EXPECT_EQ(ApiCode(second.Add(700)), "out_of_memory");
  EXPECT_EQ(ApiCode(second.Add(751)), "request_too_large");
  EXPECT_EQ(ApiCode(first.Add(51)), "request_too_large");
  EXPECT_EQ(second.bytes(), 0u);
  first.Release();
  EXPECT_TRUE(second.Add(700).ok());
}

TEST(MemoryBudgetTest, ChargesAreGivenBackOnce) {
  const auto budget = std::make_shared<MemoryBudget>(1000);
  {
    MemoryCharge first(budget);
    ASSERT_TRUE(first.Add(100).ok());
    MemoryCharge second(std::move(first));
    EXPECT_EQ(budget->used(), 100u);
    MemoryCharge third(budget);
    ASSERT_TRUE(third.Add(50).ok());
    third = std::move(second);
    EXPECT_EQ(budget->used(), 100u);
  }
  EXPECT_EQ(budget->used(), 0u);
  MemoryCharge unlimited;
  EXPECT_TRUE(unlimited.Add(~size_t{0}).ok());
}

TEST(MemoryBudgetTest, ThreadsNeverTakeMoreThanThereIs) {
  const auto budget = std::make_shared<MemoryBudget>(1000);
  std::vector<std::thread> threads;
  std::atomic<bool> exceeded{false};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20000; ++i) {
        MemoryCharge charge(budget);
        (void)charge.Add(300, ChargeFor::kRunningRequest);
        if (budget->used() > 1000) exceeded = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(exceeded);
  EXPECT_EQ(budget->used(), 0u);
}

TEST(MemoryBudgetTest, DefaultIsWithinItsRange) {
  EXPECT_GE(DefaultRequestMemory(), size_t{128} << 20);
  EXPECT_LE(DefaultRequestMemory(), size_t{4} << 30);
}

}  // namespace
}  // namespace moeserve::server
