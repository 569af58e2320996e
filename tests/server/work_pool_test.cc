// The work pool: which task runs next, what is refused, and its end.
#include "server/base/work_pool.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "gtest/gtest.h"

namespace moeserve::server {
namespace {

constexpr std::chrono::seconds kLong{20};

// Holds threads of a pool until it is opened.
class Gate {
 public:
  // Posts a task of `client` that waits for the gate, and returns when the task runs.
  void Occupy(WorkPool& pool, ClientId client) {
    std::promise<void> begun;
    ASSERT_TRUE(pool.Post(
        [&begun, open = open_] {
          begun.set_value();
          open.wait();
        },
        client));
    begun.get_future().wait();
  }
  void Open() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
  std::shared_future<void> open_ = opened_.get_future().share();
};

// Notes in which order tasks ran.
class Record {
 public:
  std::function<void()> Task(char name) {
    return [this, name] {
      MutexLock lock(mutex_);
      names_ += name;
    };
  }
  std::string names() {
    MutexLock lock(mutex_);
    return names_;
  }

 private:
  Mutex mutex_;
  std::string names_ ABSL_GUARDED_BY(mutex_);
};

void RunFor(WorkPool& pool, ClientId client, std::chrono::milliseconds time) {
  ASSERT_TRUE(pool.Post([time] { std::this_thread::sleep_for(time); }, client));
  pool.WaitUntilIdle(std::chrono::steady_clock::now() + kLong);
}

TEST(WorkPool, RefusesWhatDoesNotFitAndRunsTheRest) {
  std::atomic<int> ran = 0;
  {
    std::atomic<bool> go = false;
    std::atomic<bool> begun = false;
    WorkPool pool(1, 2);
    ASSERT_TRUE(pool.Post([&] {
      begun = true;
      begun.notify_all();
      go.wait(false);
      ++ran;
    }));
    begun.wait(false);
    EXPECT_TRUE(pool.Post([&] { ++ran; }));
    EXPECT_TRUE(pool.Post([&] { ++ran; }));
    EXPECT_FALSE(pool.Post([&] { ++ran; }));
    go = true;
    go.notify_all();
  }
  EXPECT_EQ(ran, 3);
}

TEST(WorkPool, WaitsUntilIdleOrTheDeadline) {
  const auto soon = [] { return std::chrono::steady_clock::now() + std::chrono::milliseconds(20); };
  WorkPool pool(1, 2);
  pool.WaitUntilIdle(soon());
  std::promise<void> go;
  std::atomic<bool> ran = false;
  ASSERT_TRUE(pool.Post([&, ready = go.get_future().share()] {
    ready.wait();
    ran = true;
  }));
  pool.WaitUntilIdle(soon());
  EXPECT_FALSE(ran);
  go.set_value();
  pool.WaitUntilIdle(std::chrono::steady_clock::now() + std::chrono::seconds(10));
  EXPECT_TRUE(ran);
}

TEST(WorkPool, AClientThatHasUsedLittleComesFirst) {
  Record record;
  {
    WorkPool pool(1, 100);
    RunFor(pool, 1, std::chrono::milliseconds(30));
    Gate gate;
    gate.Occupy(pool, 1);
    for (const char name : {'a', 'b', 'c'}) ASSERT_TRUE(pool.Post(record.Task(name), 1));
    ASSERT_TRUE(pool.Post(record.Task('x'), 2));
    ASSERT_TRUE(pool.Post(record.Task('y'), 3));
    gate.Open();
  }
  const std::string names = record.names();
  EXPECT_EQ(names.substr(2), "abc") << names;
}

TEST(WorkPool, AThreadIsLeftToClientsThatUseLittle) {
  WorkPool pool(2, 100);
  RunFor(pool, 1, std::chrono::milliseconds(700));
  RunFor(pool, 2, std::chrono::milliseconds(700));
  Gate gate;
  gate.Occupy(pool, 1);
  Record record;
  ASSERT_TRUE(pool.Post(record.Task('a'), 1));
  ASSERT_TRUE(pool.Post(record.Task('b'), 2));
  std::promise<void> ran;
  ASSERT_TRUE(pool.Post([&] { ran.set_value(); }, 3));
  EXPECT_EQ(ran.get_future().wait_for(kLong), std::future_status::ready);
  EXPECT_EQ(record.names(), "");
  gate.Open();
  pool.WaitUntilIdle(std::chrono::steady_clock::now() + kLong);
  EXPECT_EQ(record.names().size(), 2u);
}

TEST(WorkPool, OneClientDoesNotFillTheQueue) {
  WorkPool pool(1, 8);
  Gate gate;
  gate.Occupy(pool, 1);
  Record record;
  int taken = 0;
  while (pool.Post(record.Task('a'), 1)) ++taken;
  EXPECT_EQ(taken, 6);
  EXPECT_TRUE(pool.Post(record.Task('b'), 2));
  EXPECT_TRUE(pool.Post(record.Task('c')));
  EXPECT_FALSE(pool.Post(record.Task('d'), 3)) << "the queue is full";
  gate.Open();
}

TEST(WorkPool, RunsEveryTaskOfManyClients) {
  constexpr int kClients = 3000;
  std::atomic<int> ran = 0;
  {
    WorkPool pool(3, 100);
    for (ClientId client = 1; client <= kClients; ++client) {
      while (!pool.Post([&] { ++ran; }, client)) std::this_thread::yield();
    }
  }
  EXPECT_EQ(ran, kClients);
}

}  // namespace
}  // namespace moeserve::server
