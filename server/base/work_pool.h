// A few threads for work that is too long for io threads and must not reach the engine's.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace moeserve::server {

// Thread-safe.
class WorkPool {
 public:
  WorkPool(int threads, size_t max_waiting);
  ~WorkPool();  // runs what was posted, then joins

  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  // False, and nothing posted: `max_waiting` tasks wait already. A task must not throw.
  [[nodiscard]] bool Post(std::function<void()> task);

  // Until nothing waits and nothing runs, or until `deadline`.
  void WaitUntilIdle(std::chrono::steady_clock::time_point deadline);

 private:
  void Run();

  const size_t max_waiting_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable idle_;
  std::deque<std::function<void()>> tasks_;
  int running_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace moeserve::server
