// The CPU backend's threads: one pool, dynamic chunks, the caller works too.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace moeserve::cpu {

// Runs numbered tasks on `threads` threads, the calling one included. Tasks are handed out one by
// one, so a thread that the system takes off its core delays only the task it holds. Between calls
// workers spin briefly and then sleep: an idle pool costs nothing.
class ThreadPool {
 public:
  // threads >= 1.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls task(i, worker) for every i in [0, count), worker in [0, threads()); returns when all
  // are done. Not reentrant; one caller at a time.
  template <typename Task>
  void Run(int64_t count, const Task& task) {
    if (count <= 0) return;
    if (workers_.empty() || count == 1) {
      for (int64_t i = 0; i < count; ++i) task(i, 0);
      return;
    }
    RunErased(count, &task, [](const void* t, int64_t i, int worker) {
      (*static_cast<const Task*>(t))(i, worker);
    });
  }

 private:
  using Invoke = void (*)(const void* task, int64_t index, int worker);
  struct Job {
    std::atomic<const void*> task{nullptr};
    std::atomic<Invoke> invoke{nullptr};
    std::atomic<int64_t> base{0};
  };

  void RunErased(int64_t count, const void* task, Invoke invoke);
  // Takes tasks of the current job until none is left; returns the ticket it saw last.
  uint64_t Work(int worker);
  void WorkerLoop(int worker);

  // epoch (24 bits) | number of tasks (20) | next task (20). A thread takes a task by adding one;
  // while it holds one of epoch e the job of e cannot end, so jobs_[e % 2] is stable.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> stop_{false};
  Job jobs_[2];
  std::vector<std::thread> workers_;
};

}  // namespace moeserve::cpu
