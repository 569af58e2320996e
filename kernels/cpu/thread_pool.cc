#include "kernels/cpu/thread_pool.h"

#include <new>

#include "base/check.h"

namespace moeserve::cpu {
namespace {

constexpr int kIndexBits = 20;
constexpr uint64_t kIndexMask = (uint64_t{1} << kIndexBits) - 1;
// Attempts to take a task when none is left also increment the index, so half of the index range is
// reserved for them.
constexpr int64_t kMaxTasks = int64_t{1} << (kIndexBits - 1);
constexpr int kSpins = 4000;  // some tens of microseconds, the time between two operations

uint64_t Epoch(uint64_t ticket) { return ticket >> (2 * kIndexBits); }
uint64_t Count(uint64_t ticket) { return (ticket >> kIndexBits) & kIndexMask; }
uint64_t Index(uint64_t ticket) { return ticket & kIndexMask; }

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  MOESERVE_CHECK(threads >= 1, "a pool needs a thread");
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { WorkerLoop(i); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  ticket_.fetch_add(uint64_t{1} << (2 * kIndexBits));  // starts an epoch without tasks
  ticket_.notify_all();
  for (std::thread& t : workers_) t.join();
}

uint64_t ThreadPool::Work(int worker) {
  for (;;) {
    const uint64_t seen = ticket_.load(std::memory_order_acquire);
    if (Index(seen) >= Count(seen)) return seen;
    const uint64_t taken = ticket_.fetch_add(1, std::memory_order_acq_rel);
    if (Index(taken) >= Count(taken)) continue;
    Job& job = jobs_[Epoch(taken) % 2];
    const int64_t base = job.base.load(std::memory_order_relaxed);
    try {
      job.invoke.load(std::memory_order_relaxed)(job.task.load(std::memory_order_relaxed),
                                                 base + static_cast<int64_t>(Index(taken)), worker);
    } catch (const std::bad_alloc&) {
      lacks_memory_.store(true, std::memory_order_relaxed);
    }
    done_.fetch_add(1, std::memory_order_acq_rel);
  }
}

void ThreadPool::RunErased(int64_t count, const void* task, Invoke invoke) {
  for (int64_t base = 0; base < count; base += kMaxTasks) {
    const int64_t part = count - base < kMaxTasks ? count - base : kMaxTasks;
    const uint64_t epoch = Epoch(ticket_.load(std::memory_order_relaxed)) + 1;
    Job& job = jobs_[epoch % 2];
    job.task.store(task, std::memory_order_relaxed);
    job.invoke.store(invoke, std::memory_order_relaxed);
    job.base.store(base, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(epoch << (2 * kIndexBits) | static_cast<uint64_t>(part) << kIndexBits,
                  std::memory_order_release);
    ticket_.notify_all();
    Work(0);
    while (done_.load(std::memory_order_acquire) < part) Pause();
  }
  if (lacks_memory_.exchange(false, std::memory_order_relaxed)) throw std::bad_alloc();
}

void ThreadPool::WorkerLoop(int worker) {
  for (;;) {
    const uint64_t seen = Work(worker);
    // stop_ must be read after the ticket: the epoch that Work() returned may already be the last
    // one, which the destructor started, and no later epoch would wake this thread.
    if (stop_.load(std::memory_order_acquire)) return;
    int spins = 0;
    uint64_t now = seen;
    while (Epoch(now) == Epoch(seen) && spins++ < kSpins) {
      Pause();
      now = ticket_.load(std::memory_order_acquire);
    }
    if (Epoch(now) == Epoch(seen)) ticket_.wait(now, std::memory_order_acquire);
  }
}

}  // namespace moeserve::cpu
