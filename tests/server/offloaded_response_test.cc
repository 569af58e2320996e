#include "server/http/offloaded_response.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "base/mutex.h"

namespace moeserve::server::http {
namespace {

// Counts calls; WaitFor() blocks until there were so many.
class Counter {
 public:
  void Add() {
    MutexLock lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  void WaitFor(int count) {
    MutexLock lock(mutex_);
    changed_.wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return count_ >= count; });
  }
  int count() {
    MutexLock lock(mutex_);
    return count_;
  }

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
};

// What the tests see of a ScriptedResponse, also after its end.
struct Observations {
  std::deque<std::thread::id> threads;  // that called Next()
  Counter backlogs;
  Counter destroyed;
};

struct ScriptedStep {
  bool slow = false;
  std::string data = {};  // empty: nothing to send yet
  bool throws = false;    // instead of returning
  std::function<void()> before = [] {};
};

class ScriptedResponse final : public PendingResponse {
 public:
  ScriptedResponse(std::deque<ScriptedStep> steps, Observations& seen)
      : steps_(std::move(steps)), seen_(seen) {}
  ~ScriptedResponse() override { seen_.destroyed.Add(); }

  bool NextIsSlow() const override { return !steps_.empty() && steps_.front().slow; }
  void CheckBacklog() override { seen_.backlogs.Add(); }
  int FinalStatus() const override { return 418; }
  Progress Next() override {
    seen_.threads.push_back(std::this_thread::get_id());
    if (steps_.empty()) return Wait{};
    const ScriptedStep step = std::move(steps_.front());
    steps_.pop_front();
    step.before();
    if (step.throws) throw std::runtime_error("scripted");
    if (step.data.empty()) return Wait{};
    return StreamPart{step.data, false};
  }

 private:
  std::deque<ScriptedStep> steps_;
  Observations& seen_;
};

class OffloadedResponseTest : public ::testing::Test {
 protected:
  std::unique_ptr<OffloadedResponse> Make(std::deque<ScriptedStep> steps) {
    return std::make_unique<OffloadedResponse>(
        std::make_shared<ScriptedResponse>(std::move(steps), seen_), *pool_,
        [this] { wakes_.Add(); });
  }

  static std::string Data(const Progress& progress) {
    const StreamPart* part = std::get_if<StreamPart>(&progress);
    return part != nullptr ? part->data : "";
  }

  Observations seen_;
  Counter wakes_;
  std::unique_ptr<WorkPool> pool_ = std::make_unique<WorkPool>(1, 1);
};

TEST_F(OffloadedResponseTest, OnlySlowStepsRunOnThePool) {
  auto response = Make({{.data = "a"}, {.slow = true, .data = "b"}, {.data = "c"}});
  EXPECT_EQ(Data(response->Next()), "a");
  EXPECT_TRUE(std::holds_alternative<Wait>(response->Next()));
  wakes_.WaitFor(1);
  EXPECT_EQ(Data(response->Next()), "b");
  EXPECT_EQ(Data(response->Next()), "c");
  ASSERT_EQ(seen_.threads.size(), 3u);
  EXPECT_EQ(seen_.threads[0], std::this_thread::get_id());
  EXPECT_NE(seen_.threads[1], std::this_thread::get_id());
  EXPECT_EQ(seen_.threads[2], std::this_thread::get_id());
  EXPECT_EQ(response->FinalStatus(), 418);
}

// Calls of `wake` during a step have no effect of their own, so the next step follows at once.
TEST_F(OffloadedResponseTest, ContinuesAfterAStepWithNothingToSend) {
  auto response = Make({{.slow = true}, {.data = "next"}});
  EXPECT_TRUE(std::holds_alternative<Wait>(response->Next()));
  wakes_.WaitFor(1);
  EXPECT_EQ(Data(response->Next()), "next");
}

TEST_F(OffloadedResponseTest, WaitsWhileAStepRuns) {
  Counter started, go;
  auto response = Make({{.slow = true, .data = "late", .before = [&] {
                           started.Add();
                           go.WaitFor(1);
                         }}});
  EXPECT_TRUE(std::holds_alternative<Wait>(response->Next()));
  started.WaitFor(1);
  EXPECT_TRUE(std::holds_alternative<Wait>(response->Next()));
  response->CheckBacklog();
  EXPECT_EQ(seen_.backlogs.count(), 0) << "the step uses the response";
  go.Add();
  wakes_.WaitFor(1);
  EXPECT_EQ(Data(response->Next()), "late");
  response->CheckBacklog();
  EXPECT_EQ(seen_.backlogs.count(), 1);
}

TEST_F(OffloadedResponseTest, RunsHereIfThePoolIsFull) {
  Counter started, go;
  ASSERT_TRUE(pool_->Post([&] {
    started.Add();
    go.WaitFor(1);
  }));
  started.WaitFor(1);
  ASSERT_TRUE(pool_->Post([] {}));
  auto response = Make({{.slow = true, .data = "a"}});
  EXPECT_EQ(Data(response->Next()), "a");
  go.Add();
  pool_ = nullptr;  // its task uses `started` and `go`
}

TEST_F(OffloadedResponseTest, ExceptionsReachTheCaller) {
  auto response = Make({{.slow = true, .throws = true}});
  EXPECT_TRUE(std::holds_alternative<Wait>(response->Next()));
  wakes_.WaitFor(1);
  EXPECT_THROW(response->Next(), std::runtime_error);
}

TEST_F(OffloadedResponseTest, ADestroyedResponseEndsAfterItsStep) {
  Counter started, go;
  auto response = Make({{.slow = true, .data = "a", .before = [&] {
                           started.Add();
                           go.WaitFor(1);
                         }}});
  response->Next();
  started.WaitFor(1);
  auto waiting = Make({{.slow = true, .data = "never"}});
  waiting->Next();
  response = nullptr;
  waiting = nullptr;
  EXPECT_EQ(seen_.destroyed.count(), 0);
  go.Add();
  pool_ = nullptr;  // runs what waits
  EXPECT_EQ(seen_.destroyed.count(), 2);
  EXPECT_EQ(seen_.threads.size(), 1u) << "a step of a destroyed response ran";
}

}  // namespace
}  // namespace moeserve::server::http
