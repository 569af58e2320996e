// The CPU backend's threads: a single pool that hands out tasks dynamically. The calling thread
// also runs tasks.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace moeserve::cpu {

// Runs numbered tasks on `threads` threads, including the calling thread. Tasks are handed out one
// by one, so a thread that the system deschedules delays only the task that it is running. Between
// calls, workers spin briefly and then sleep, so an idle pool uses no CPU time.
class ThreadPool {
 public:
  // `threads` must be at least 1.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls task(i, worker) for every i in [0, count), with worker in [0, threads()). Returns when
  // all calls are done. Not reentrant; only one thread at a time may call Run(). Throws
  // std::bad_alloc, then, if a call has thrown it; calls must throw nothing else.
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
  // Runs tasks of the current job until none is left. Returns the last value of ticket_ that it
  // read.
  uint64_t Work(int worker);
  void WorkerLoop(int worker);

  // Run() hands out its tasks as one or more jobs, which are numbered by an epoch. Bits of the
  // ticket: epoch (24) | number of tasks (20) | index of the next task (20). A thread takes a task
  // by adding 1 to the ticket. While a thread runs a task of epoch e, the job of epoch e cannot
  // end, so jobs_[e % 2] is not overwritten.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> lacks_memory_{false};  // whether a task has thrown std::bad_alloc
  Job jobs_[2];
  std::vector<std::thread> workers_;
};

}  // namespace moeserve::cpu
