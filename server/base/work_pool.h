// A small thread pool for tasks that would block the I/O threads or the engine thread.
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
  ~WorkPool();  // runs the waiting tasks, then joins the threads

  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  // Queues a task, which must not throw. Returns false, without queueing it, if `max_waiting` tasks
  // are already waiting.
  [[nodiscard]] bool Post(std::function<void()> task);

  // Blocks until no task is waiting or running, or until `deadline`.
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
