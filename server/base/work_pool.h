// A small thread pool for tasks that would block the I/O threads or the engine thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"

namespace moeserve::server {

// Whose task it is: equal for tasks of one client, different for those of others. 0: nobody's in
// particular.
using ClientId = uint64_t;

// Runs the tasks of clients in fair shares. The next task is one of the client with the fewest
// running tasks and, among those, with the least recent running time, so a client that sends slow
// tasks does not delay others by more than the task that a thread is at. Beyond that, one thread of
// several runs no tasks of clients that have used much time recently. The tasks of one client run
// in order. Thread-safe.
class WorkPool {
 public:
  // At most `max_waiting` tasks wait; three quarters of them may be one client's.
  WorkPool(int threads, size_t max_waiting);
  ~WorkPool();  // runs the waiting tasks, then joins the threads

  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  // Queues a task, which must not throw. Returns false, without queueing it, if too many tasks are
  // already waiting.
  [[nodiscard]] bool Post(std::function<void()> task, ClientId client = 0);

  // Blocks until no task is waiting or running, or until `deadline`.
  void WaitUntilIdle(std::chrono::steady_clock::time_point deadline);

 private:
  using Clock = std::chrono::steady_clock;

  struct Client {
    std::deque<std::function<void()>> tasks;
    int running = 0;
    double used_seconds = 0.0;  // at `since`; halves every kHalfLife
    Clock::time_point since;
  };

  void Run();
  // Returns the client whose task is to run next; end() if no task may run now.
  std::unordered_map<ClientId, Client>::iterator Next(Clock::time_point now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets clients without tasks that have used little time, or, if there are many, any.
  void Forget(Clock::time_point now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static double Used(const Client& client, Clock::time_point now);
  static bool IsHeavy(ClientId id, const Client& client, Clock::time_point now);

  const size_t max_waiting_;
  const int threads_for_heavy_;
  Mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable idle_;
  std::unordered_map<ClientId, Client> clients_ ABSL_GUARDED_BY(mutex_);
  size_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;  // tasks of all clients
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  // Tasks that began when their client had used much time.
  int running_heavy_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace moeserve::server
