// Allocations of the engine and its workers that fail: the requests of the step end, and nothing
// else does.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

#include "base/steady_clock.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"

namespace {

// Allocations of at least this size count.
constexpr size_t kLarge = 1024;
std::atomic<size_t> g_least{kLarge};
// The number of the allocation of the other threads that fails, counted from 1; 0: none.
std::atomic<int> g_failing{0};
std::atomic<int> g_failed{0};

// Set on the thread of the test, whose allocations do not count.
thread_local bool t_of_test = false;

void* Allocate(size_t size, size_t alignment) {
  if (size >= g_least && g_failing.load() > 0 && !t_of_test && g_failing.fetch_sub(1) == 1) {
    ++g_failed;
    throw std::bad_alloc();
  }
  const size_t rounded = (std::max<size_t>(size, 1) + alignment - 1) / alignment * alignment;
  void* const memory = std::aligned_alloc(alignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

[[gnu::noinline]] void* operator new(size_t size) {
  return Allocate(size, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new(size_t size, std::align_val_t alignment) {
  return Allocate(size, static_cast<size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace moeserve::testing {
namespace {

Request LongRequest(int number) {
  Request request;
  request.id = std::to_string(number);
  for (int i = 0; i < 60; ++i) request.prompt.push_back(1 + i % 7);
  request.sampling.temperature = 0.0;
  request.sampling.max_tokens = 4;
  request.sampling.ignore_eos = true;
  return request;
}

TEST(OutOfMemory, EndsTheRequestsOfTheStepOnly) {
  // A new engine for each allocation, because buffers that have grown are not allocated again.
  t_of_test = true;
  std::vector<TokenId> expected;
  int failures = 0;
  for (int number = 0; number < 500; ++number) {
    EngineOptions options;
    options.max_model_len = 256;
    auto engine = TestEngine::Start(GoldenModels().front().model, options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    g_failing = number;
    const int before = g_failed;
    const auto first = (*engine)->Submit(LongRequest(0));
    const auto second = (*engine)->Submit(LongRequest(1));
    for (const auto& sink : {first, second}) {
      const absl::Status status = sink->Wait();
      EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
      EXPECT_EQ(sink->endings(), 1);
      if (status.ok() && number == 0) expected = sink->tokens();
    }
    const bool failed = g_failed > before;
    g_failing = 0;
    const auto third = (*engine)->Submit(LongRequest(2));
    EXPECT_TRUE(third->Wait().ok()) << number;
    EXPECT_EQ(third->tokens(), expected) << number;
    (*engine)->ExpectIdle();
    if (number > 0 && !failed) break;  // there is no further allocation
    failures += failed ? 1 : 0;
  }
  EXPECT_GT(failures, 3);
}

// A sink whose own allocations do not count.
class UncountedSink final : public CollectingSink {
 public:
  void OnDelta(OutputDelta delta) override {
    t_of_test = true;
    CollectingSink::OnDelta(std::move(delta));
    t_of_test = false;
  }
  void OnError(const absl::Status& status) override {
    t_of_test = true;
    CollectingSink::OnError(status);
    t_of_test = false;
  }
};

// Whichever allocation fails, however small: requests end, their ids are free again, and nothing is
// left to wait for.
TEST(OutOfMemory, LeavesNothingBehind) {
  t_of_test = true;
  EngineOptions options;
  options.max_model_len = 256;
  auto engine = TestEngine::Start(GoldenModels().front().model, options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const auto run = [&](int id) {
    auto sink = std::make_shared<UncountedSink>();
    const absl::Status submitted = (*engine)->get().Submit({LongRequest(id)}, {sink});
    EXPECT_TRUE(submitted.ok()) << submitted;
    return submitted.ok() ? sink : nullptr;
  };
  const auto whole = run(0);
  ASSERT_TRUE(whole != nullptr && whole->Wait().ok());
  (*engine)->ExpectIdle();
  g_least = 0;
  int failures = 0;
  for (int number = 1; number < 5000 && !HasFailure(); ++number) {
    SCOPED_TRACE(number);
    const int before = g_failed;
    g_failing = number;
    for (const auto& sink : {run(0), run(1)}) {
      if (sink == nullptr) continue;
      const absl::Status status = sink->Wait();
      EXPECT_TRUE(status.ok() ? sink->tokens() == whole->tokens()
                              : absl::IsResourceExhausted(status))
          << status;
      EXPECT_EQ(sink->endings(), 1);
    }
    const bool failed = g_failed > before;
    g_failing = 0;
    if (!failed) break;  // there is no further allocation
    ++failures;
    (*engine)->ExpectIdle();
    const auto after = run(2);
    if (after == nullptr) continue;
    EXPECT_TRUE(after->Wait().ok());
    EXPECT_EQ(after->tokens(), whole->tokens());
    (*engine)->ExpectIdle();
  }
  g_least = kLarge;
  EXPECT_GT(failures, 100);
  EXPECT_TRUE((*engine)->get().Drain(SteadyNow() + absl::Seconds(60)));
}

}  // namespace
}  // namespace moeserve::testing
